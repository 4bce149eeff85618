//! Counts of packets, read from the kernel when they are asked for.

use std::{
    fmt,
    sync::{Arc, PoisonError, RwLock},
};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _},
    metrics::{MetricType, counter::ConstCounter},
};

use crate::dataplane::PacketCounts;

/// Where to read them, once there is a dataplane that counts.
#[derive(Clone, Default)]
pub(super) struct Packets(Arc<RwLock<Option<PacketCounts>>>);

impl fmt::Debug for Packets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Packets")
    }
}

impl Packets {
    pub(super) fn set(&self, read: Option<PacketCounts>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = read;
    }
}

impl Collector for Packets {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let counts = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let Some(counts) = &*counts else { return Ok(()) };
        let help = "Packets to Services that came in on links, by what became of them";
        let mut family = encoder.encode_descriptor("link_packets", help, None, MetricType::Counter)?;
        for (fate, count) in counts() {
            ConstCounter::new(count).encode(family.encode_family(&[("fate", fate)])?)?;
        }
        Ok(())
    }
}
