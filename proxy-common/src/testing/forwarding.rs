//! A node in memory that forwards packets: each comes in on a link and leaves on another one, on
//! the direct path or through the stack.

use super::{ConfigMaps, FrameResult, FrameRunner, Hook, InputFrame, LO, MemoryMaps, StateMaps};
use crate::{
    Addr,
    layout::{DirectScope, Masquerading, NodeValue},
    link::Outcome,
    packet::Route,
};

/// The link of clients, and that of pods.
const OUTSIDE: u32 = LO;
const POD: u32 = 4_711;
/// How long userspace lets packets skip the stack.
const LEASE_NS: u64 = 500 * MILLISECOND;
const MILLISECOND: u64 = 1_000_000;
/// The bytes of the two Ethernet addresses.
const HARDWARE: usize = 12;

/// Runs each packet where it comes in, and where it leaves. A packet of a client has the result of
/// the first, a packet of an endpoint that of the last. Results do not show the path, so that the
/// same test works with each: a redirected packet has its first hop limit and Ethernet addresses.
/// Masqueraded packets do not leave, because the node has no address for them.
#[derive(Debug)]
pub(super) struct ForwardingMaps {
    maps: MemoryMaps,
    scope: DirectScope,
    /// The number of packets that took the direct path.
    pub(super) direct: usize,
}

impl ForwardingMaps {
    /// Returns a node on which these flows take the direct path.
    pub(super) fn new(scope: DirectScope) -> Self {
        // One in eight packets is learned from, by chance. Here it is each.
        let random_of = |number: u32| number & !0x7;
        Self { maps: MemoryMaps { random_of, ..MemoryMaps::default() }, scope, direct: 0 }
    }

    /// Lets a frame come in on the first link. It leaves on the second one.
    fn come_in(&mut self, input: &InputFrame, [link, out]: [u32; 2]) -> Option<FrameResult> {
        let route = Some(Route { link: out, next_hop: Addr::from_v4([192, 0, 2, 1]), ..Route::NONE });
        self.maps.run(Hook::Ingress, &InputFrame { link, route, ..input.clone() })
    }

    /// Lets a frame that came in on the first link leave on the second one. On the direct path it
    /// passes the programs where it leaves, too.
    fn leave(&mut self, came_in: &FrameResult, [ingress_link, link]: [u32; 2]) -> Option<FrameResult> {
        let FrameResult { bytes, mark, note, input, .. } = came_in.clone();
        self.maps.run(Hook::Egress, &InputFrame { bytes, mark, link, note, ingress_link, ..input })
    }

    /// Approves what was learned, and lets time pass.
    fn approve(&mut self) {
        let now = self.maps.now_ns.get();
        self.maps.approve_direct_flows(now + LEASE_NS);
        self.maps.now_ns.set(now + MILLISECOND);
    }
}

impl FrameRunner for ForwardingMaps {
    /// A new epoch begins, as it does when the endpoint of a UDP flow goes.
    fn configure(&mut self, config: &ConfigMaps) {
        let mut config = config.clone();
        config.node.direct_epoch = self.maps.config.node.direct_epoch.max(1) + 2;
        config.node.direct_scope = self.scope as u16;
        config.node.masquerading = Masquerading::Programs as u16;
        config.direct_links.extend([OUTSIDE, POD]);
        self.maps.configure(&config);
    }

    fn state(&mut self) -> StateMaps {
        self.maps.state()
    }

    fn set_state(&mut self, state: &StateMaps) {
        self.maps.set_state(state);
    }

    fn run(&mut self, hook: Hook, input: &InputFrame) -> Option<FrameResult> {
        let links = if hook == Hook::Egress { [POD, OUTSIDE] } else { [OUTSIDE, POD] };
        let mut result = self.come_in(&with_hardware_of(hook, input), links)?;
        let is_refused = result.mark & NodeValue::REJECT_MARK != 0;
        match result.outcome {
            Outcome::Redirect => self.direct += 1,
            Outcome::Proceed if !is_refused => pass_router(&mut result.bytes, -1),
            _ => return Some(FrameResult { input: input.clone(), ..result }),
        }
        if hook == Hook::Egress {
            result = self.leave(&result, links)?;
        } else if result.mark & self.maps.config.node.masquerade_mark == 0 {
            let left = self.leave(&result, links)?;
            assert_eq!((left.outcome, &left.bytes), (Outcome::Proceed, &result.bytes), "where it leaves");
        }
        self.approve();
        pass_router(&mut result.bytes, 1);
        result.bytes[..HARDWARE].copy_from_slice(&input.bytes[..HARDWARE]);
        Some(FrameResult { input: input.clone(), outcome: Outcome::Proceed, ..result })
    }
}

/// Returns a frame that comes in for this host.
fn with_hardware_of(hook: Hook, input: &InputFrame) -> InputFrame {
    let mut input = input.clone();
    if hook == Hook::Egress {
        input.bytes[..6].fill(0);
    }
    input
}

/// Adds to the hop limit of an IP packet.
fn pass_router(bytes: &mut [u8], hops: i8) {
    let is_v4 = bytes[12..14] == [8, 0];
    let at = if is_v4 { 22 } else { 21 };
    let before = [bytes[22], bytes[23]];
    bytes[at] = bytes[at].wrapping_add_signed(hops);
    if is_v4 {
        let difference = crate::checksum::Difference::of_bytes(before, [bytes[22], bytes[23]]);
        let checksum = difference.apply([bytes[24], bytes[25]]);
        bytes[24..26].copy_from_slice(&checksum);
    }
}
