//! Exports how full the connection tracking table of the node is. The kernel's counter is read at
//! each scrape.

use std::fmt;

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _},
    metrics::{MetricType, gauge::ConstGauge},
};

use crate::kernel::conntrack::{self, TableFill};

const ENTRIES: &str = "Entries in the connection tracking table of the node";
const LIMIT: &str = "The number of entries at which connection tracking drops packets of new connections";

/// Reads the fill of the table. Two small files of procfs, whatever the size of the table.
#[derive(Debug)]
pub(super) struct ConntrackCollector;

impl Collector for ConntrackCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        match conntrack::table_fill() {
            Ok(Some(fill)) => encode(&mut encoder, fill),
            Ok(None) => Ok(()),
            Err(error) => {
                tracing::debug!(%error, "cannot read the fill of conntrack's table; the scrape omits it");
                Ok(())
            }
        }
    }
}

fn encode(encoder: &mut DescriptorEncoder<'_>, fill: TableFill) -> fmt::Result {
    let values = [("conntrack_entries", ENTRIES, fill.entries), ("conntrack_limit", LIMIT, fill.limit)];
    values.into_iter().try_for_each(|(name, help, value)| {
        let descriptor = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        ConstGauge::new(value).encode(descriptor)
    })
}
