//! Plans what concerns the node as a whole: its addresses, links and sockets.

use std::collections::{BTreeMap, BTreeSet};

use proxy_common::{
    Addr,
    layout::{HardwareAddress, Masquerading, NewFlows, XdpLinkValue},
};

use super::{
    super::links::{HookState, LinkHook, has_program, xdp::XdpState},
    Planner,
    step::{DirectFields, MapEntry, StaleFlows, Step},
    translate,
};
use crate::{
    kernel::bpf::tc::Hook,
    model::{Framing, LinkPath, PortRange},
};

impl Planner<'_> {
    pub(super) fn node_addresses(&mut self) {
        let addresses = self.node.node_port_addresses.iter();
        let wanted = addresses.map(|address| Addr::from(*address).node_address()).collect();
        self.difference(&self.state.node_addresses, &wanted, MapEntry::NodeAddress);
    }

    /// Plans how local clients are recognized. Returns true if that changes.
    pub(super) fn local_clients(&mut self) -> bool {
        let (state, node) = (self.state, self.node);
        let (detection, sources) = translate::local_detection(node);
        self.difference(&state.local_sources, &sources, MapEntry::LocalSource);
        self.difference(&state.local_links, &node.local_links, MapEntry::LocalLink);
        let mode_differs = state.local_detection != detection as u32;
        // After the sources that it looks at, and before the Services that rely on it.
        self.phases.additions.extend(mode_differs.then_some(Step::SetLocalDetection(detection)));
        mode_differs || state.local_sources != sources
    }

    /// Plans which sockets are served. An exempt namespace is known before the scope relies on it,
    /// and the addresses of its pod before its first packets to a VIP come in on a link.
    pub(super) fn socket_scope(&mut self) {
        let (state, node) = (self.state, self.node);
        let sources = node.exempt_addresses.iter().map(|address| Addr::from(*address)).collect();
        self.difference(&state.exempt_sources, &sources, MapEntry::ExemptSource);
        let (scope, exempt) = translate::socket_scope(node);
        self.difference(&state.exempt_netns, exempt, MapEntry::ExemptNetns);
        let differs = state.socket_scope != scope as u16;
        self.phases.additions.extend(differs.then_some(Step::SetSocketScope(scope)));
    }

    pub(super) fn bridge_ports(&mut self) {
        let (node, state) = (self.node, self.state);
        let ports = node.bridge_ports.iter();
        let wanted = ports.map(|(index, bridge)| (*index, HardwareAddress::new(bridge.0))).collect();
        self.value_difference(&state.bridge_ports, &wanted, MapEntry::BridgePort);
    }

    /// Plans the sources of masqueraded packets. If netfilter is to masquerade, its rules are
    /// installed before the programs leave new flows to it.
    pub(super) fn masquerade(&mut self) {
        let (node, state) = (self.node, self.state);
        let wanted = translate::masquerade_addresses(node);
        self.value_difference(&state.masquerade_addresses, &wanted, MapEntry::MasqueradeAddress);
        let ports = self.masquerade_ports();
        if ports.is_some() {
            let addresses = |of: &BTreeMap<_, Addr>| of.values().copied().collect::<BTreeSet<Addr>>();
            let gone = &addresses(&state.masquerade_addresses) - &addresses(&wanted);
            self.phases.releases.extend(gone.into_iter().map(Step::ForgetSource));
        }
        let fields = state.masquerade.after(ports);
        if fields != state.masquerade {
            let phase =
                if ports.is_some() { &mut self.phases.additions } else { &mut self.phases.attachments };
            phase.push(Step::SetMasquerade(fields));
            let began = state.masquerade.masquerading != fields.masquerading && ports.is_some();
            if began && !state.links.is_empty() {
                // These ports may be those of connections that netfilter masqueraded so far.
                phase.push(Step::LeaveFlowsToConntrack);
            }
        }
    }

    /// Returns the source ports if the programs masquerade.
    pub(super) fn masquerade_ports(&self) -> Option<PortRange> {
        let masquerades = self.state.masquerade.masquerading == Masquerading::Programs as u16;
        self.node.masquerade_ports(masquerades)
    }

    /// Returns true if the programs may refuse packets before netfilter sees them. Then no rule and
    /// no filter of others looks at packets that come in.
    ///
    /// The answer leaves on the same link. Netfilter refuses packets that come in on a port of a
    /// bridge, which has rules of its own about what leaves there; on a link without Ethernet
    /// headers, which may need a route to send; through the tunnel; and on a link beneath one that
    /// is left out.
    pub(super) fn programs_may_refuse(&self) -> bool {
        let LinkPath::Direct { lease, without, .. } = &self.node.link_path else { return false };
        let is_plain = self.node.links.values().all(|link| link.framing == Framing::Ethernet);
        let leaves_out = self.state.links.values().any(|state| *state == HookState::LeftOut);
        !lease.is_zero() && without.is_empty() && is_plain && self.node.bridge_ports.is_empty() && !leaves_out
    }

    /// Plans which flows take the direct path. It ends before anything else changes.
    pub(super) fn direct_path(&mut self) {
        let (node, state) = (self.node, self.state);
        self.difference(&state.direct_links, &node.direct_links, MapEntry::DirectLink);
        self.difference(&state.peer_links, &node.peer_links, MapEntry::PeerLink);
        let epoch = state.direct.epoch;
        if let Some(fields) = DirectFields::of(&node.link_path, epoch) {
            self.direct_begins = !epoch.is_on() || state.direct != fields;
        } else if epoch.is_on() {
            let off = DirectFields { epoch: epoch.off(), ..state.direct };
            self.phases.additions.insert(0, Step::SetDirect(off));
        }
    }

    /// Returns the step that begins a new epoch of the direct path after the programs are on links
    /// and entries are removed. Datagrams must not reach an endpoint that is gone, come in on a
    /// link that others watch, or pass by a qdisc.
    pub(super) fn next_epoch(&self) -> Option<Step> {
        let epoch = self.state.direct.epoch;
        let fields = DirectFields::of(&self.node.link_path, epoch.next_on())?;
        let ends_flows = |step: &Step| {
            use MapEntry::{DirectLink, Member, PeerLink};
            matches!(step, Step::Remove(Member(_) | DirectLink(_) | PeerLink(_)))
        };
        let ends = epoch.is_on() && self.phases.removals.iter().any(ends_flows);
        (self.direct_begins || ends).then_some(Step::SetDirect(fields))
    }

    /// Plans the programs on links. Until they are on all links, and the flows of conntrack are
    /// known, netfilter keeps new flows: so far it may have translated all packets.
    ///
    /// The flows of conntrack are listed twice. Before the programs translate, the first list has
    /// those that began without programs. Flows that begin during it are marked by the programs
    /// (`flow_state::LEFT`), and the second list has them. Those that it does not have get an
    /// endpoint then: no rule translated them.
    ///
    /// The first step forgets the flows that an earlier process left to conntrack: their
    /// connections may have ended. If another mode was interrupted while it took over, the programs
    /// are still on the links. They have flows that were not handed over, and these flows stay.
    pub(super) fn translate_on_links(&mut self) {
        let (node, state) = (self.node, self.state);
        let leaves = state.new_flows == NewFlows::Leave as u16;
        let takes_over = leaves || state.links.is_empty() && !node.links.is_empty();
        if takes_over {
            let outdated =
                if leaves && state.links.is_empty() { StaleFlows::All } else { StaleFlows::Passed };
            self.phases.attachments.push(Step::ForgetFlows(outdated));
            if !leaves {
                self.phases.attachments.push(Step::SetNewFlows(NewFlows::Leave));
            }
        }
        for hook in [Hook::Egress, Hook::Ingress] {
            let links = node.links.iter().filter(|(_, link)| has_program(hook, link.framing));
            for (&index, link) in links {
                let at = LinkHook { hook, index };
                let is_right = match state.links.get(&at) {
                    Some(HookState::Current(framing) | HookState::Displaced(framing)) => {
                        *framing == link.framing
                    }
                    Some(HookState::LeftOut) => true,
                    Some(HookState::Outdated) | None => false,
                };
                if !is_right {
                    self.phases.attachments.push(Step::AttachLink(at, link.clone()));
                }
            }
        }
        let is_wanted =
            |at: &LinkHook| node.links.get(&at.index).is_some_and(|link| has_program(at.hook, link.framing));
        let unwanted = state.links.keys().rev().filter(|at| !is_wanted(at));
        let detached = unwanted.filter_map(|at| {
            let bond = node.bond_ports.get(&at.index).copied();
            let is_left_out =
                |bond| state.links.get(&LinkHook { index: bond, ..*at }) == Some(&HookState::LeftOut);
            (!bond.is_some_and(is_left_out)).then_some(Step::DetachLink(*at, bond))
        });
        self.phases.attachments.extend(detached);
        if takes_over {
            self.phases.attachments.extend([
                Step::LeaveFlowsToConntrack,
                Step::SetNewFlows(NewFlows::Translate),
                Step::LeaveFlowsToConntrack,
                Step::ForgetFlows(StaleFlows::Left),
            ]);
        }
    }

    /// Plans which packets are left to the programs on the links of VLANs: while these have
    /// programs. If a link was left out, it may be that of a VLAN, and its packets stay with the
    /// link beneath.
    pub(super) fn vlans(&mut self) {
        let is_left_out = self.state.links.values().any(|state| *state == HookState::LeftOut);
        let vlans = self.node.vlans.iter().copied().filter(|_| !is_left_out);
        let wanted = vlans.map(translate::vlan).collect::<BTreeSet<_>>();
        let had = &self.state.vlans;
        self.phases.additions.extend(had.difference(&wanted).map(|vlan| Step::Remove(MapEntry::Vlan(*vlan))));
        self.phases.attachments.extend(wanted.difference(had).map(|vlan| Step::Put(MapEntry::Vlan(*vlan))));
    }

    /// Plans the tunnel to other nodes.
    pub(super) fn tunnel(&mut self) {
        let (node, state) = (self.node, self.state);
        let wanted = node.tunnel.as_ref().map(translate::dsr_nodes).unwrap_or_default();
        self.value_difference(&state.dsr_nodes, &wanted, MapEntry::DsrNode);
        let fields = node.tunnel.as_ref().map(translate::tunnel).unwrap_or_default();
        self.phases.additions.extend((fields != state.tunnel).then_some(Step::SetTunnel(fields)));
    }

    /// Plans the XDP programs, after all other programs on links. A program forwards packets only
    /// between links with entries. So an entry is written after its program is attached, and
    /// removed before its program is detached or attached in another mode.
    pub(super) fn xdp(&mut self) {
        let (node, state) = (self.node, self.state);
        let wanted = translate::xdp_links(node, state);
        let stays = |index: &u32, value: &XdpLinkValue| {
            let mode = node.xdp_links.get(index).map(|link| link.mode);
            wanted.get(index) == Some(value) && mode == state.xdp_mode(*index)
        };
        let held = state.xdp_links.iter().map(|(index, value)| (*index, *value));
        let (kept, ended): (BTreeMap<u32, XdpLinkValue>, BTreeMap<u32, XdpLinkValue>) =
            held.partition(|(index, value)| stays(index, value));
        let removals = ended.into_iter().map(|(index, value)| Step::Remove(MapEntry::XdpLink(index, value)));
        self.phases.attachments.extend(removals);
        let unwanted = state.xdp.keys().filter(|index| !node.xdp_links.contains_key(index));
        self.phases.attachments.extend(unwanted.copied().map(Step::DetachXdp));
        for (&index, link) in &node.xdp_links {
            let is_right = match state.xdp.get(&index) {
                Some(XdpState::Current(mode) | XdpState::Refused(mode)) => *mode == link.mode,
                Some(XdpState::Outdated(_)) => false,
                None => !link.forwards,
            };
            if !is_right {
                self.phases.attachments.push(Step::AttachXdp(index, link.clone()));
            }
        }
        let begun = wanted.into_iter().filter(|(index, _)| !kept.contains_key(index));
        self.phases
            .attachments
            .extend(begun.map(|(index, value)| Step::Put(MapEntry::XdpLink(index, value))));
    }

    /// Plans the removal of the programs from links, in the opposite order of their attachment.
    /// Conntrack takes over their flows first.
    pub(super) fn leave_links_to_netfilter(&mut self) {
        let state = self.state;
        if state.new_flows != NewFlows::Leave as u16 {
            if !state.links.is_empty() {
                self.phases.attachments.push(Step::TrackFlows);
            }
            self.phases.attachments.push(Step::SetNewFlows(NewFlows::Leave));
        }
        if !state.links.is_empty() {
            self.phases.attachments.push(Step::HandFlowsToConntrack);
            self.phases.attachments.extend(state.links.keys().rev().copied().map(Step::LeaveLink));
        }
    }
}
