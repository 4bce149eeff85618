//! Errors and failure counters of a single IP family, for all modes that serve each family
//! separately.

use std::{
    error::Error,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use super::{MetricValue, ModeMetric, ModeMetricsReader};
use crate::model::IpFamily;

/// The error of one family. Everything of the other family was applied.
#[derive(Debug)]
pub struct FamilyError<E> {
    /// The family.
    pub family: IpFamily,
    /// The cause.
    pub source: Box<E>,
}

impl<E: fmt::Display> fmt::Display for FamilyError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "only {} failed: {}", self.family, self.source)
    }
}

impl<E: Error + 'static> Error for FamilyError<E> {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&*self.source)
    }
}

/// Returns the first of several errors. If all of them are of the same family, it is a
/// [`FamilyError`].
pub(super) fn first_error<E: From<FamilyError<E>>>(errors: Vec<(Option<IpFamily>, E)>) -> Option<E> {
    let family = errors.first().and_then(|(family, _)| *family);
    let is_only_family = errors.iter().all(|(of, _)| *of == family);
    let (_, first) = errors.into_iter().next()?;
    Some(match family {
        Some(family) if is_only_family => FamilyError { family, source: Box::new(first) }.into(),
        _ => first,
    })
}

/// Returns the family of all items; `None` if there are items of both families, or none.
pub(super) fn only_family(families: impl IntoIterator<Item = IpFamily>) -> Option<IpFamily> {
    let mut families = families.into_iter();
    let first = families.next()?;
    families.all(|family| family == first).then_some(first)
}

/// Returns the label of a family in kube-proxy's metrics.
pub(super) const fn label(family: IpFamily) -> (&'static str, &'static str) {
    ("ip_family", family.name())
}

/// The number of failures of each family. Clones share the counters.
#[derive(Clone, Debug, Default)]
pub(super) struct FailureCounters(Arc<[AtomicU64; 2]>);

impl FailureCounters {
    /// Counts a failure.
    pub(super) fn count(&self, family: IpFamily) {
        self.0[family as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Returns a reader of the counters as a metric of kube-proxy with this name and help text.
    pub(super) fn metrics(&self, name: &'static str, help: &'static str) -> ModeMetricsReader {
        let Self(counters) = self.clone();
        let read = move |family| {
            let value = MetricValue::Counter(counters[family as usize].load(Ordering::Relaxed));
            ModeMetric { name, help, labels: vec![label(family)], value }
        };
        Box::new(move || IpFamily::ALL.map(&read).into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    enum Failure {
        #[error("{0}")]
        Other(&'static str),
        #[error(transparent)]
        OfFamily(#[from] FamilyError<Failure>),
    }

    fn message(errors: &[(Option<IpFamily>, &'static str)]) -> Option<String> {
        let errors = errors.iter().map(|(family, cause)| (*family, Failure::Other(cause))).collect();
        first_error(errors).map(|error| error.to_string())
    }

    #[test]
    fn an_error_names_the_family_if_only_one_failed() {
        let (v4, v6) = (Some(IpFamily::V4), Some(IpFamily::V6));
        assert_eq!(message(&[]), None);
        assert_eq!(message(&[(v6, "one"), (v6, "two")]).as_deref(), Some("only IPv6 failed: one"));
        assert_eq!(message(&[(v4, "one"), (v6, "two")]).as_deref(), Some("one"));
        assert_eq!(message(&[(v4, "one"), (None, "two")]).as_deref(), Some("one"));
        assert_eq!(message(&[(None, "one")]).as_deref(), Some("one"));
    }

    #[test]
    fn only_items_of_one_family_have_a_family() {
        use IpFamily::{V4, V6};
        assert_eq!(only_family([]), None);
        assert_eq!(only_family([V6, V6]), Some(V6));
        assert_eq!(only_family([V6, V4, V6]), None);
    }

    #[test]
    fn failures_are_counted_by_family() {
        let failures = FailureCounters::default();
        let read = failures.metrics("restores", "help");
        failures.count(IpFamily::V6);
        failures.count(IpFamily::V6);
        let metrics: Vec<_> = read().into_iter().map(|metric| (metric.labels, metric.value)).collect();
        let counter = |family, count| (vec![("ip_family", family)], MetricValue::Counter(count));
        assert_eq!(metrics, [counter("IPv4", 0), counter("IPv6", 2)]);
    }
}
