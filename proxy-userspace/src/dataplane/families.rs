//! What went wrong in one IP family alone, where the other goes on, and how often; the same for every mode.

use std::{
    error::Error,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use super::{Reading, ReadingValue, Readings};
use crate::model::IpFamily;

/// One family alone failed; all of the other is as it should be.
#[derive(Debug)]
pub struct OneFamily<E> {
    /// The family.
    pub family: IpFamily,
    /// Why.
    pub source: Box<E>,
}

impl<E: fmt::Display> fmt::Display for OneFamily<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} alone failed: {}", self.family, self.source)
    }
}

impl<E: Error + 'static> Error for OneFamily<E> {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&*self.source)
    }
}

/// The error of all that went wrong, each with its family if it is of one: the first, as [`OneFamily`] where all are of the same. None
/// where nothing went wrong.
pub(super) fn error_of<E: From<OneFamily<E>>>(errors: Vec<(Option<IpFamily>, E)>) -> Option<E> {
    let family = errors.first().and_then(|(family, _)| *family);
    let is_alone = errors.iter().all(|(of, _)| *of == family);
    let (_, first) = errors.into_iter().next()?;
    Some(match family {
        Some(family) if is_alone => OneFamily { family, source: Box::new(first) }.into(),
        _ => first,
    })
}

/// The label that upstream's metrics have for a family.
pub(super) const fn label(family: IpFamily) -> (&'static str, &'static str) {
    ("ip_family", family.name())
}

/// How often each family failed. Clones share it, so that it can be read while the mode works.
#[derive(Clone, Debug, Default)]
pub(super) struct Failures {
    v4: Arc<AtomicU64>,
    v6: Arc<AtomicU64>,
}

impl Failures {
    const fn of(&self, family: IpFamily) -> &Arc<AtomicU64> {
        match family {
            IpFamily::V4 => &self.v4,
            IpFamily::V6 => &self.v6,
        }
    }

    /// It failed once more.
    pub(super) fn count(&self, family: IpFamily) {
        self.of(family).fetch_add(1, Ordering::Relaxed);
    }

    /// As a counter of upstream's, with its name and help.
    pub(super) fn readings(&self, name: &'static str, help: &'static str) -> Readings {
        let this = self.clone();
        let read = move |family| {
            let value = ReadingValue::Counter(this.of(family).load(Ordering::Relaxed));
            Reading { name, help, labels: vec![label(family)], value }
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
        OfFamily(#[from] OneFamily<Failure>),
    }

    fn told(errors: &[(Option<IpFamily>, &'static str)]) -> Option<String> {
        let errors = errors.iter().map(|(family, why)| (*family, Failure::Other(why))).collect();
        error_of(errors).map(|error| error.to_string())
    }

    #[test]
    fn a_family_is_named_where_nothing_else_failed() {
        let (v4, v6) = (Some(IpFamily::V4), Some(IpFamily::V6));
        assert_eq!(told(&[]), None);
        assert_eq!(told(&[(v6, "one"), (v6, "two")]).as_deref(), Some("IPv6 alone failed: one"));
        assert_eq!(told(&[(v4, "one"), (v6, "two")]).as_deref(), Some("one"));
        assert_eq!(told(&[(v4, "one"), (None, "two")]).as_deref(), Some("one"));
        assert_eq!(told(&[(None, "one")]).as_deref(), Some("one"));
    }

    #[test]
    fn failures_are_counted_by_family_from_zero_on() {
        let failures = Failures::default();
        let read = failures.readings("restores", "help");
        failures.count(IpFamily::V6);
        failures.count(IpFamily::V6);
        let seen: Vec<_> = read().into_iter().map(|reading| (reading.labels, reading.value)).collect();
        let counter = |family, count| (vec![("ip_family", family)], ReadingValue::Counter(count));
        assert_eq!(seen, [counter("IPv4", 0), counter("IPv6", 2)]);
    }
}
