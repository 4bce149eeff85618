//! The ways of traffic from outside that are compared: what the node has for each.

use anyhow::Result;
use serde::Serialize;
use serde_yaml_ng::Mapping;

use super::floor::{self, Memory};

/// A way from the client through the node to an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// No Service, no proxy, no rules: what the ratios of the other ways would be if they cost
    /// nothing.
    Routed,
    /// The same direct connections, with the proxy in mode ebpf with its default settings. Towards
    /// the other node, no end is one of a Service. The pod of this node is an endpoint.
    Foreign,
    /// The same without the proxy: programs on the links of the node and of the pod read headers,
    /// and let all packets pass.
    FloorForeign,
    /// Two rules of the kernel translate and masquerade.
    KernelNat,
    /// The proxy in mode nftables.
    Nftables,
    /// The proxy in mode ebpf with its default settings. On this node, packets of learned flows
    /// take the direct path.
    Default,
    /// The proxy in mode ebpf, with programs on links, and netfilter masquerades.
    Programs,
    /// The same, but the programs masquerade.
    Masquerading,
    /// The same, and packets of learned flows take the direct path.
    Direct,
    /// The same, and whole flows take the direct path.
    Whole,
    /// As [`Way::Direct`], with XDP in the kernel. Only for packets of the kernel: those of
    /// processes have no complete checksums here.
    XdpGeneric,
    /// The same, in the driver.
    XdpNative,
    /// No proxy: XDP sends frames back as they are. No XDP program can be faster here. Only for
    /// packets of the kernel.
    XdpBare,
    /// The proxy in mode ebpf on both nodes, with direct server return. Only for an endpoint on
    /// another node.
    Dsr,
    /// The same, and whole flows take the direct path.
    DsrWhole,
    /// As [`Way::Dsr`], and answers go back through the tunnel.
    DsrReturn,
    /// No proxy: programs on links translate one connection by constants. Programs cost no less.
    FloorPrograms,
    /// The same, and each packet is looked up in a table that has every flow.
    FloorProgramsTable,
    /// The same, and the programs know the state of each flow: it is in another table until its
    /// client has acknowledged the endpoint's answer.
    FloorProgramsState,
    /// As [`Way::FloorPrograms`], and packets leave at once with constant Ethernet addresses.
    FloorDirect,
    /// The same, and each packet is looked up in a table that has every flow.
    FloorDirectTable,
    /// The same, and the programs know the state of each flow, as for
    /// [`Way::FloorProgramsState`].
    FloorDirectState,
    /// As [`Way::FloorDirectTable`] with XDP, which sends packets back before the stack. Only for
    /// packets of the kernel.
    FloorXdpTable,
}

impl Way {
    /// All ways. Conntrack translates connections in the last three. Afterwards the kernel tracks
    /// connections for a while.
    pub const ALL: [Self; 23] = [
        Self::Routed,
        Self::FloorForeign,
        Self::Foreign,
        Self::FloorPrograms,
        Self::FloorProgramsTable,
        Self::FloorProgramsState,
        Self::FloorDirect,
        Self::FloorDirectTable,
        Self::FloorDirectState,
        Self::FloorXdpTable,
        Self::Default,
        Self::Masquerading,
        Self::Direct,
        Self::Whole,
        Self::XdpGeneric,
        Self::XdpNative,
        Self::XdpBare,
        Self::Dsr,
        Self::DsrWhole,
        Self::DsrReturn,
        Self::KernelNat,
        Self::Nftables,
        Self::Programs,
    ];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Routed => "routed by the node",
            Self::Foreign => "foreign, mode ebpf",
            Self::FloorForeign => "foreign, floor",
            Self::KernelNat => "two NAT rules",
            Self::Nftables => "mode nftables",
            Self::Default => "mode ebpf, default",
            Self::Programs => "mode ebpf, programs",
            Self::Masquerading => "ebpf, masquerading",
            Self::Direct => "ebpf, direct",
            Self::Whole => "ebpf, direct, whole",
            Self::XdpGeneric => "ebpf, generic XDP",
            Self::XdpNative => "ebpf, native XDP",
            Self::XdpBare => "XDP, frames sent back",
            Self::Dsr => "ebpf, DSR",
            Self::DsrWhole => "ebpf, DSR, whole",
            Self::DsrReturn => "ebpf, DSR, return",
            Self::FloorPrograms => "constants",
            Self::FloorProgramsTable => "constants and a table",
            Self::FloorProgramsState => "table and state",
            Self::FloorDirect => "constants, direct",
            Self::FloorDirectTable => "the same and a table",
            Self::FloorDirectState => "the same with state",
            Self::FloorXdpTable => "a table, XDP",
        }
    }

    pub(super) const fn is_dsr(self) -> bool {
        matches!(self, Self::Dsr | Self::DsrWhole | Self::DsrReturn)
    }

    pub(super) const fn is_xdp(self) -> bool {
        matches!(self, Self::XdpGeneric | Self::XdpNative | Self::XdpBare | Self::FloorXdpTable)
    }

    /// Returns true if the client connects to the pod itself.
    pub(super) const fn is_foreign(self) -> bool {
        matches!(self, Self::Routed | Self::Foreign | Self::FloorForeign)
    }

    /// Returns what the programs of this way do, if they translate without a proxy.
    pub(super) const fn floor(self) -> Option<floor::Kind> {
        let (redirects, memory) = match self {
            Self::FloorPrograms => (false, Memory::None),
            Self::FloorProgramsTable => (false, Memory::Table),
            Self::FloorProgramsState => (false, Memory::State),
            Self::FloorDirect => (true, Memory::None),
            Self::FloorDirectTable | Self::FloorXdpTable => (true, Memory::Table),
            Self::FloorDirectState => (true, Memory::State),
            _ => return None,
        };
        Some(floor::Kind { redirects, memory, is_xdp: self.is_xdp() })
    }

    /// Returns true if this kernel can measure the way.
    pub(super) fn is_possible(self) -> bool {
        self.floor().is_none() && self != Self::FloorForeign || floor::is_possible()
    }

    /// Returns true if connections are masqueraded, by the kernel or by a proxy on this node alone.
    pub(super) const fn masquerades(self) -> bool {
        matches!(
            self,
            Self::Default
                | Self::Masquerading
                | Self::Direct
                | Self::Whole
                | Self::KernelNat
                | Self::Nftables
                | Self::Programs
        )
    }

    /// Returns true if packets a second are measured. Those of no Service are not: the part
    /// `outside` measures them with connections.
    pub(super) const fn has_packets(self) -> bool {
        !matches!(self, Self::Foreign | Self::FloorForeign)
    }

    /// Returns mode and configuration of the proxy, unless this way has none.
    pub(super) fn proxy(self) -> Result<Option<(&'static str, Mapping)>> {
        let shunt = match self {
            Self::Routed
            | Self::FloorForeign
            | Self::KernelNat
            | Self::XdpBare
            | Self::FloorPrograms
            | Self::FloorProgramsTable
            | Self::FloorProgramsState
            | Self::FloorDirect
            | Self::FloorDirectTable
            | Self::FloorDirectState
            | Self::FloorXdpTable => return Ok(None),
            Self::Nftables => return Ok(Some(("nftables", Mapping::new()))),
            Self::Default | Self::Foreign => return Ok(Some(("ebpf", Mapping::new()))),
            Self::Programs => "links: {path: programs}",
            Self::Masquerading => "links: {path: programs, masquerade: programs}",
            Self::Direct => "links: {path: direct, masquerade: programs}",
            Self::Whole => "links: {path: direct, direct: whole, masquerade: programs}",
            Self::XdpGeneric => "links: {path: direct, masquerade: programs, xdp: generic}",
            Self::XdpNative => "links: {path: direct, masquerade: programs, xdp: native}",
            Self::Dsr => "dsr: {enabled: true}",
            Self::DsrWhole => {
                "dsr: {enabled: true}, links: {path: direct, direct: whole, masquerade: programs}"
            }
            Self::DsrReturn => "dsr: {enabled: true, return: tunnel}",
        };
        Ok(Some(("ebpf", serde_yaml_ng::from_str(&format!("{{shunt: {{{shunt}}}}}"))?)))
    }
}
