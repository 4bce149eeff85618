//! Reads the maps that userspace writes, hash maps in batches.

use aya::maps::{MapData, lpm_trie::LpmTrie};
use proxy_common::{
    Addr,
    layout::{
        DsrKey, EndpointKey, EndpointValue, HardwareAddress, MasqueradeSubnet, MemberKey, ServiceKey,
        ServiceValue, SourceRange, VlanKey, XdpLinkValue,
    },
};

use super::{
    super::plan::{
        ranges::{LinkSubnet, Prefix, Range},
        step::MapEntry,
    },
    failed,
};
use crate::kernel::{
    KernelError,
    bpf::{Object, Reader},
    netns::NetnsCookie,
};

/// Reads all entries of the maps that userspace writes, except `node`.
pub(crate) struct EntryReader {
    services: Reader<ServiceKey, ServiceValue>,
    endpoints: Reader<EndpointKey, EndpointValue>,
    members: Reader<MemberKey, u8>,
    node_addresses: Reader<Addr, u8>,
    local_links: Reader<u32, u8>,
    direct_links: Reader<u32, u8>,
    peer_links: Reader<u32, u8>,
    xdp_links: Reader<u32, XdpLinkValue>,
    dsr_endpoints: Reader<DsrKey, Addr>,
    dsr_nodes: Reader<Addr, u8>,
    bridge_ports: Reader<u32, HardwareAddress>,
    vlans: Reader<VlanKey, u8>,
    exempt_netns: Reader<u64, u8>,
    exempt_sources: Reader<Addr, u8>,
    // Kernels before 5.16 have no batches for tries.
    source_ranges: LpmTrie<MapData, SourceRange, u32>,
    local_sources: LpmTrie<MapData, Addr, u8>,
    masquerade_addresses: LpmTrie<MapData, MasqueradeSubnet, Addr>,
}

impl EntryReader {
    pub(crate) fn open(object: &Object) -> Result<Self, KernelError> {
        Ok(Self {
            services: object.reader("services")?,
            endpoints: object.reader("endpoints")?,
            members: object.reader("members")?,
            node_addresses: object.reader("node_addresses")?,
            local_links: object.reader("local_links")?,
            direct_links: object.reader("direct_links")?,
            peer_links: object.reader("peer_links")?,
            xdp_links: object.reader("xdp_links")?,
            dsr_endpoints: object.reader("dsr_endpoints")?,
            dsr_nodes: object.reader("dsr_nodes")?,
            bridge_ports: object.reader("bridge_ports")?,
            vlans: object.reader("vlans")?,
            exempt_netns: object.reader("exempt_netns")?,
            exempt_sources: object.reader("exempt_sources")?,
            source_ranges: object.open_map("source_ranges")?,
            local_sources: object.open_map("local_sources")?,
            masquerade_addresses: object.open_map("masquerade_addresses")?,
        })
    }

    /// Passes on all entries.
    pub(crate) fn read(&mut self, mut visit: impl FnMut(MapEntry)) -> Result<(), KernelError> {
        let v = &mut visit;
        read(&mut self.services, "services", |key, value| v(MapEntry::Service(key, value)))?;
        read(&mut self.endpoints, "endpoints", |key, value| v(MapEntry::Endpoint(key, value)))?;
        read(&mut self.members, "members", |key, _| v(MapEntry::Member(key)))?;
        read(&mut self.node_addresses, "node_addresses", |key, _| v(MapEntry::NodeAddress(key)))?;
        read(&mut self.local_links, "local_links", |key, _| v(MapEntry::LocalLink(key)))?;
        read(&mut self.direct_links, "direct_links", |key, _| v(MapEntry::DirectLink(key)))?;
        read(&mut self.peer_links, "peer_links", |key, _| v(MapEntry::PeerLink(key)))?;
        read(&mut self.xdp_links, "xdp_links", |key, value| v(MapEntry::XdpLink(key, value)))?;
        read(&mut self.dsr_endpoints, "dsr_endpoints", |key, node| v(MapEntry::DsrEndpoint(key, node)))?;
        read(&mut self.dsr_nodes, "dsr_nodes", |key, kind| v(MapEntry::DsrNode(key, kind)))?;
        read(&mut self.bridge_ports, "bridge_ports", |key, value| v(MapEntry::BridgePort(key, value)))?;
        read(&mut self.vlans, "vlans", |key, _| v(MapEntry::Vlan(key)))?;
        read(&mut self.exempt_netns, "exempt_netns", |key, _| v(MapEntry::ExemptNetns(NetnsCookie(key))))?;
        read(&mut self.exempt_sources, "exempt_sources", |key, _| v(MapEntry::ExemptSource(key)))?;
        for key in self.source_ranges.keys() {
            v(MapEntry::SourceRange(Range::from_key(&key.map_err(failed("read", "source_ranges"))?)));
        }
        for key in self.local_sources.keys() {
            v(MapEntry::LocalSource(Prefix::from_key(&key.map_err(failed("read", "local_sources"))?)));
        }
        for entry in &self.masquerade_addresses {
            let (key, address) = entry.map_err(failed("read", "masquerade_addresses"))?;
            v(MapEntry::MasqueradeAddress(LinkSubnet::from_key(&key), address));
        }
        Ok(())
    }
}

fn read<K: aya::Pod, V: aya::Pod>(
    reader: &mut Reader<K, V>,
    map: &'static str,
    visit: impl FnMut(K, V),
) -> Result<(), KernelError> {
    reader.read_all(visit).map_err(KernelError::call("read map", map))
}
