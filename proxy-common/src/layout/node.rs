//! The facts about the node, as single values of maps.

use crate::addr::Addr;

map_type! {
    /// The only value of `node`. The first two fields have the same place in every layout.
    NodeValue, 112 {
        /// The [`super::LAYOUT_VERSION`] of the maps in the directory.
        layout: u32,
        /// The [`super::STATE_LAYOUT_VERSION`] of the maps in the directory that programs write.
        state_layout: u32,
        /// The network namespace cookie of the node, or [`NodeValue::NETNS_UNKNOWN`].
        netns: u64,
        /// The bit of the mark that makes netfilter masquerade a packet, or the program on the
        /// link where it leaves.
        masquerade_mark: u32,
        /// The bit of the mark of packets that are refused. It makes netfilter reject them.
        reject_mark: u32,
        /// The [`LocalDetection`].
        local_detection: u32,
        /// The [`SocketScope`].
        socket_scope: u16,
        /// The [`NewFlows`].
        new_flows: u16,
        /// The end of settling on the monotonic clock. Until then flows may be missing, because
        /// these maps replaced maps of another size.
        settling_until_ns: u64,
        /// The [`Masquerading`].
        masquerading: u16,
        /// The first source port of masqueraded flows.
        first_port: u16,
        /// The last source port of masqueraded flows.
        last_port: u16,
        /// The [`DirectScope`].
        direct_scope: u16,
        /// The epoch of the direct path. If it is odd, packets take the direct path by the entries
        /// of `direct_flows_v4` and `direct_flows_v6` with the same epoch.
        direct_epoch: u64,
        /// For how many nanoseconds packets take the direct path after one that went through the
        /// stack, if [`DirectWatch`] says that nothing changed. With 0, it makes no difference.
        direct_lease_ns: u64,
        /// The interface index of the tunnel to other nodes, or 0 without one.
        tunnel_link: u32,
        /// The bytes of the longest packet that leaves the node in one piece with the headers of
        /// the tunnel, including these.
        tunnel_mtu: u32,
        /// The source of packets of the tunnel to nodes with an IPv4 address. `::` if this node
        /// has none: the kernel chooses.
        tunnel_v4: Addr,
        /// The same for nodes with an IPv6 address.
        tunnel_v6: Addr,
        /// 1 if replies of new flows from the tunnel go back through it.
        tunnel_returns: u32,
        /// The [`Refusing`].
        refusing: u32,
    }
}

map_type! {
    /// The only value of `direct_watch`: what userspace knows of changes to what the kernel does
    /// with forwarded packets. Times are nanoseconds of the monotonic clock.
    DirectWatch, 24 {
        /// When userspace last learned of a change, or began to watch.
        since_ns: u64,
        /// When the value ceases to count. While userspace watches, it raises this time.
        until_ns: u64,
        /// Until when routes do not depend on ports.
        portless_until_ns: u64,
    }
}

/// The test for packets of local clients (`detectLocalMode`).
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LocalDetection {
    /// All clients are outside.
    None = 0,
    /// Clients are inside if their source is in `local_sources`.
    Source = 1,
    /// Clients are inside if their packets come in on a link of `local_links`.
    Link = 2,
}

/// The sockets that the socket programs serve.
#[repr(u16)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SocketScope {
    /// All.
    All = 0,
    /// Those in the network namespace of the node.
    Node = 1,
    /// All but those in the network namespaces in `exempt_netns`.
    NotExempt = 2,
}

/// What the link programs do with new flows. Known flows go on in any case.
#[repr(u16)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum NewFlows {
    /// They translate them.
    Translate = 0,
    /// They leave them to netfilter.
    Leave = 1,
}

/// What masquerades packets.
#[repr(u16)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Masquerading {
    /// Netfilter.
    Netfilter = 0,
    /// The programs masquerade the flows that they know, and netfilter masquerades new ones.
    KnownFlows = 1,
    /// The programs.
    Programs = 2,
}

/// What refuses packets: to a Service without endpoints, and segments of unknown connections.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Refusing {
    /// Netfilter, by the mark [`NodeValue::reject_mark`].
    Netfilter = 0,
    /// The programs.
    Programs = 1,
}

/// Which packets of a flow take the direct path.
#[repr(u16)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DirectScope {
    /// Those that are as the ones that went through the stack before.
    Learned = 0,
    /// All, from the first one on. The programs ask for the route.
    Whole = 1,
}

impl NodeValue {
    /// The cookie is unknown, as in a new map. Userspace can read it from kernel 5.14 on. On older
    /// kernels it learns the cookie from the programs. Until then the programs take the node to be
    /// in the initial network namespace.
    pub const NETNS_UNKNOWN: u64 = 0;
    /// The default masquerade bit of kube-proxy, 14.
    pub const MASQUERADE_MARK: u32 = 1 << 14;
    /// The bit of kube-proxy for packets that it drops, 15.
    pub const REJECT_MARK: u32 = 1 << 15;

    /// Returns true if packets take the direct path.
    #[inline(always)]
    pub const fn is_direct(&self) -> bool {
        self.direct_epoch & 1 != 0
    }

    /// Returns the lower half of [`Self::direct_epoch`], which tells two epochs apart.
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "the lower half")]
    pub const fn short_direct_epoch(&self) -> u32 {
        self.direct_epoch as u32
    }

    /// Returns true if the node is set to [`DirectScope::Whole`]. A change begins a new epoch of
    /// the direct path.
    #[inline(always)]
    pub const fn is_for_whole_flows(&self) -> bool {
        self.direct_scope == DirectScope::Whole as u16
    }

    /// Returns true if packets take the direct path from the first one of a flow on. Then netfilter
    /// must not masquerade them.
    #[inline(always)]
    pub const fn is_whole(&self) -> bool {
        self.is_direct() && self.is_for_whole_flows() && self.masquerading == Masquerading::Programs as u16
    }
}
