//! Counts the entries of pinned maps, for who has no daemon to ask.

use std::path::Path;

use aya::maps::MapInfo;
use proxy_common::layout::{
    AffinityKey, AffinityValue, Connection, Endpoint, EndpointKey, EndpointValue, Flow, FlowKey, MemberKey,
    ServiceKey, ServiceValue, SocketPeer, UdpSocket,
};

use crate::{
    dataplane::MapFill,
    kernel::{KernelError, bpf},
};

/// Returns how full the maps are that are pinned in a directory and whose size is a setting.
pub(in crate::dataplane) fn pinned_fill(pins: &Path) -> Result<Vec<MapFill>, KernelError> {
    Ok(vec![
        fill::<ServiceKey, ServiceValue>(pins, "services")?,
        fill::<EndpointKey, EndpointValue>(pins, "endpoints")?,
        fill::<MemberKey, u8>(pins, "members")?,
        fill::<AffinityKey, AffinityValue>(pins, "affinity")?,
        fill::<SocketPeer, Endpoint>(pins, "udp_flows")?,
        fill::<u64, UdpSocket>(pins, "udp_sockets")?,
        fill::<u64, Connection>(pins, "tcp_connections")?,
        fill::<FlowKey, Flow>(pins, "flows")?,
        fill::<FlowKey, Flow>(pins, "unassured_flows")?,
    ])
}

fn fill<K: aya::Pod, V: aya::Pod>(pins: &Path, map: &'static str) -> Result<MapFill, KernelError> {
    let mut entries = 0;
    let mut reader = bpf::pinned_reader::<K, V>(pins, map)?;
    reader.read_all(|_, _| entries += 1).map_err(KernelError::call("read map", map))?;
    let info = MapInfo::from_pin(pins.join(map)).map_err(KernelError::bpf("open map", map))?;
    Ok(MapFill { map, entries, capacity: info.max_entries() })
}
