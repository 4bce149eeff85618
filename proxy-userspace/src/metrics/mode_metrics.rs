//! Exports the metrics that only the current mode has. They are read at each scrape.

use std::{
    fmt,
    sync::{Arc, PoisonError, RwLock},
};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
};

use crate::dataplane::{MetricValue, ModeMetric, ModeMetricsReader};

/// Reads the metrics of the current dataplane, if it has any.
#[derive(Clone, Default)]
pub(super) struct ModeMetricsCollector(Arc<RwLock<Option<ModeMetricsReader>>>);

impl fmt::Debug for ModeMetricsCollector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ModeMetricsCollector")
    }
}

impl ModeMetricsCollector {
    pub(super) fn set(&self, read: Option<ModeMetricsReader>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = read;
    }
}

impl Collector for ModeMetricsCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let read = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let metrics = read.as_ref().map_or_else(Vec::new, |read| read());
        for same_name in metrics.chunk_by(|one, other| one.name == other.name) {
            let Some(ModeMetric { name, help, value, .. }) = same_name.first() else { continue };
            let kind = match value {
                MetricValue::Counter(_) => MetricType::Counter,
                MetricValue::Gauge(_) => MetricType::Gauge,
            };
            let mut family = encoder.encode_descriptor(name, help, None, kind)?;
            for ModeMetric { labels, value, .. } in same_name {
                let labelled = family.encode_family(labels)?;
                match value {
                    MetricValue::Counter(value) => ConstCounter::new(*value).encode(labelled)?,
                    MetricValue::Gauge(value) => ConstGauge::new(*value).encode(labelled)?,
                }
            }
        }
        Ok(())
    }
}
