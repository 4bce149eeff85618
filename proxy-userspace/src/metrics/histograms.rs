//! The histograms: upstream's buckets, and native buckets if the feature gate is on.

use prometheus_client::metrics::{
    family::{Family, MetricConstructor},
    histogram::{Histogram, NativeHistogramConfig, exponential_buckets},
};

use super::{Labels, TextLabels};

/// Histograms by constant labels.
pub(super) type Histograms = Family<Labels<1>, Histogram, NewHistogram>;

/// Creates histograms of one metric.
#[derive(Clone, Copy, Debug)]
pub(super) struct NewHistogram {
    bounds: fn() -> Vec<f64>,
    has_native_buckets: bool,
}

impl MetricConstructor<Histogram> for NewHistogram {
    fn new_metric(&self) -> Histogram {
        let bounds = (self.bounds)();
        if !self.has_native_buckets {
            return Histogram::new(bounds);
        }
        // Upstream's `defaultNativeHistogramOptions` (`component-base/metrics/internal`).
        Histogram::new_classic_and_native(bounds, NativeHistogramConfig::new(1.1).max_buckets(160))
    }
}

/// The histograms of durations in seconds.
#[derive(Clone, Debug)]
pub(super) struct Durations {
    pub(super) sync: Histograms,
    pub(super) sync_full: Histograms,
    pub(super) sync_partial: Histograms,
    pub(super) programming: Histograms,
    pub(super) conntrack: Histograms,
    pub(super) api_requests: Family<TextLabels, Histogram, NewHistogram>,
}

impl Durations {
    /// Creates empty histograms.
    pub(super) fn new(has_native_buckets: bool) -> Self {
        let constructor = |bounds| NewHistogram { bounds, has_native_buckets };
        let histograms = |bounds| Histograms::new_with_constructor(constructor(bounds));
        Self {
            sync: histograms(sync_bounds),
            sync_full: histograms(sync_bounds),
            sync_partial: histograms(sync_bounds),
            programming: histograms(programming_bounds),
            conntrack: histograms(sync_bounds),
            api_requests: Family::new_with_constructor(constructor(request_bounds)),
        }
    }
}

impl Default for Durations {
    fn default() -> Self {
        Self::new(false)
    }
}

/// From a millisecond to 16 seconds.
fn sync_bounds() -> Vec<f64> {
    exponential_buckets(0.001, 2.0, 15).collect()
}

/// Zero, which upstream's `MergeBuckets` puts first: a clock may be behind that of the control
/// plane. Then quarter seconds to 0.5, seconds to 59, five seconds to 115, half minutes to 5
/// minutes.
fn programming_bounds() -> Vec<f64> {
    let steps = |first: u16, step: u16, count: u16| (0..count).map(move |n| f64::from(first + n * step));
    [0.0, 0.25, 0.5]
        .into_iter()
        .chain(steps(1, 1, 59))
        .chain(steps(60, 5, 12))
        .chain(steps(120, 30, 7))
        .collect()
}

/// From 5 milliseconds to a minute.
fn request_bounds() -> Vec<f64> {
    vec![0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0]
}
