//! What the programs on links count.

use aya::maps::{MapData, PerCpuArray};
use proxy_common::layout::Counter;

use crate::{
    dataplane::PacketCounts,
    kernel::{KernelError, bpf::Object},
};

/// Adds up what all CPUs counted, whenever it is called.
pub(super) fn reader(object: &mut Object) -> Result<PacketCounts, KernelError> {
    let counters: PerCpuArray<MapData, u64> = object.take_map("counters")?;
    let sum = move |counter: Counter| {
        // A slot of an array is always there; should reading fail, nothing is better than a wrong number.
        counters.get(&(counter as u32), 0).map_or(0, |of_cpus| of_cpus.iter().sum())
    };
    Ok(Box::new(move || Counter::ALL.map(|(counter, name)| (name, sum(counter))).into()))
}
