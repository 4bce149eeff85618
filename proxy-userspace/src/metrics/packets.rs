//! Counts of packets, read from the kernel when they are asked for.

use std::{
    fmt,
    sync::{Arc, OnceLock},
};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _},
    metrics::{MetricType, counter::ConstCounter},
};

use crate::dataplane::PacketCounts;

/// Where to read them, once there is a dataplane that counts.
#[derive(Clone, Default)]
pub(super) struct Packets(Arc<OnceLock<PacketCounts>>);

impl fmt::Debug for Packets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Packets").field(&self.0.get().is_some()).finish()
    }
}

impl Packets {
    pub(super) fn set(&self, counts: PacketCounts) -> Result<(), PacketCounts> {
        self.0.set(counts)
    }
}

impl Collector for Packets {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let Some(counts) = self.0.get() else { return Ok(()) };
        let help = "Packets to Services that came in on links, by what became of them";
        let mut family = encoder.encode_descriptor("link_packets", help, None, MetricType::Counter)?;
        for (fate, count) in counts() {
            ConstCounter::new(count).encode(family.encode_family(&[("fate", fate)])?)?;
        }
        Ok(())
    }
}
