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

use crate::dataplane::{Reading, ReadingValue, Readings};

/// Reads the metrics of the current dataplane, if it has any.
#[derive(Clone, Default)]
pub(super) struct ReadingsCollector(Arc<RwLock<Option<Readings>>>);

impl fmt::Debug for ReadingsCollector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ReadingsCollector")
    }
}

impl ReadingsCollector {
    pub(super) fn set(&self, read: Option<Readings>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = read;
    }
}

impl Collector for ReadingsCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let read = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let readings = read.as_ref().map_or_else(Vec::new, |read| read());
        for same_name in readings.chunk_by(|one, other| one.name == other.name) {
            let Some(Reading { name, help, value, .. }) = same_name.first() else { continue };
            let kind = match value {
                ReadingValue::Counter(_) => MetricType::Counter,
                ReadingValue::Gauge(_) => MetricType::Gauge,
            };
            let mut family = encoder.encode_descriptor(name, help, None, kind)?;
            for Reading { labels, value, .. } in same_name {
                let labelled = family.encode_family(labels)?;
                match value {
                    ReadingValue::Counter(value) => ConstCounter::new(*value).encode(labelled)?,
                    ReadingValue::Gauge(value) => ConstGauge::new(*value).encode(labelled)?,
                }
            }
        }
        Ok(())
    }
}
