//! The laws of plans for links and for the tunnel.

use super::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn ingress_is_attached_after_all_services_and_all_egress_programs(
        (before, after, dirty) in testing::snapshot_change()
    ) {
        let mut state = programmed(&before);
        let changes = plan(&state, &after, &dirty);
        for (at, step) in changes.steps.iter().enumerate() {
            let later = &changes.steps[at..];
            if matches!(step, Step::AttachLink(..)) {
                prop_assert!(later.iter().all(|step| !matches!(step, Step::Put(MapEntry::Service(..) | MapEntry::Endpoint(..)))));
            }
            state.record(step);
            let ingress = LinkHook { hook: Hook::Ingress, index: step.link().unwrap_or_default() };
            if matches!(step, Step::AttachLink(at, _) if *at == ingress) {
                let with_egress = after.node.links.iter().filter(|(_, link)| link.framing != Framing::Tunnel);
                for (index, link) in with_egress {
                    let egress = LinkHook { hook: Hook::Egress, index: *index };
                    prop_assert_eq!(state.links.get(&egress), Some(&HookState::Current(link.framing)));
                }
            }
        }
    }

    #[test]
    fn links_get_the_programs_of_their_framing_and_unwanted_ones_are_detached(
        (before, after, dirty) in testing::snapshot_change(),
        is_restarted in any::<bool>(),
    ) {
        let mut state = programmed(&before);
        let dirty = if is_restarted { state = restarted(&state); Dirty::everything() } else { dirty };
        let change = plan(&state, &after, &dirty);
        apply(&mut state, &change);
        prop_assert_eq!(&state.links, &wanted_links(&after));
        prop_assert_eq!(&state.local_links, &after.node.local_links);
        let bridge_ports = after.node.bridge_ports.iter();
        let bridge_ports = bridge_ports.map(|(index, address)| (*index, HardwareAddress::new(address.0)));
        prop_assert_eq!(&state.bridge_ports, &bridge_ports.collect::<BTreeMap<_, _>>());
        prop_assert_eq!(&state.vlans, &after.node.vlans.iter().copied().map(translate::vlan).collect());
    }

    #[test]
    fn maps_know_the_nodes_behind_the_tunnel((before, after, dirty) in testing::snapshot_change()) {
        let mut state = programmed(&before);
        let changes = plan(&state, &after, &dirty);
        apply(&mut state, &changes);
        let tunnel = after.node.tunnel.as_ref();
        let nodes = tunnel.map(translate::dsr_nodes).unwrap_or_default();
        prop_assert_eq!(&state.dsr_nodes, &nodes);
        for (address, kind) in &nodes {
            let is_end = tunnel.is_some_and(|tunnel| tunnel.nodes.contains(&IpAddr::from(*address)));
            prop_assert_eq!(*kind == DsrAddress::End as u8, is_end);
        }
        prop_assert_eq!(state.tunnel.link, tunnel.filter(|tunnel| tunnel.is_up).map_or(0, |tunnel| tunnel.link));
        let ports = after.ports.values().filter(|port| !port.frontends.is_empty());
        let wanted: BTreeSet<_> = ports.flat_map(|port| &port.dsr_nodes).map(|(_, node)| *node).collect();
        let known: BTreeSet<_> = state.dsr_endpoints.values().map(|node| IpAddr::from(*node)).collect();
        prop_assert_eq!(known, wanted);
    }

    /// Before a frontend sends packets through the tunnel, the nodes of its endpoints are known.
    /// The frontend for packets that come through it never sends them on.
    #[test]
    fn frontends_with_direct_server_return_have_a_second_one_for_the_tunnel(
        snapshot in testing::snapshot()
    ) {
        let state = programmed(&snapshot);
        for key in frontends(&state) {
            let value = *state.service(&key).expect("a frontend");
            let is_dsr = value.flags & flags::DSR != 0;
            prop_assert!(key.tunneled == 0 || !is_dsr);
            let second = state.service(&key.tunneled());
            prop_assert!(!is_dsr || second.is_some());
            if let Some(second) = second.filter(|second| second.outside_list == List::Local as u8) {
                prop_assert_eq!(second.flags & (flags::MASQUERADE_OUTSIDE | flags::MASQUERADE_INSIDE), 0);
                prop_assert_eq!(second.service, value.service);
            }
        }
    }

    /// A packet of a new flow is translated by programs that are on all links, or by netfilter. A
    /// flow of the programs goes on while they are detached, because conntrack has it by then.
    #[test]
    fn link_programs_take_new_flows_only_while_they_are_on_all_links(
        (before, after, dirty) in testing::snapshot_change()
    ) {
        let mut state = programmed(&before);
        let changes = plan(&state, &after, &dirty);
        let is_switch = state.links.is_empty() || wanted_links(&after).is_empty();
        for (at, step) in changes.steps.iter().enumerate() {
            let leaves = state.new_flows == NewFlows::Leave as u16;
            let (earlier, later) = changes.steps.split_at(at);
            match step {
                Step::AttachLink(..) if is_switch => prop_assert!(leaves),
                Step::LeaveLink(_) => {
                    prop_assert!(leaves && earlier.contains(&Step::HandFlowsToConntrack));
                }
                Step::HandFlowsToConntrack => {
                    prop_assert!(leaves && earlier.contains(&Step::TrackFlows));
                }
                // Netfilter gives new flows no addresses that it does not know to be in use.
                Step::TrackFlows => prop_assert!(!leaves),
                Step::ForgetFlows(StaleFlows::Left) => {
                    let translates = |step: &Step| *step == Step::SetNewFlows(NewFlows::Translate);
                    let position = earlier.iter().position(translates);
                    let listed = position.map(|at| earlier[at..].contains(&Step::LeaveFlowsToConntrack));
                    prop_assert_eq!(listed, Some(true));
                }
                Step::ForgetFlows(stale) => {
                    // What netfilter began meanwhile may have the addresses of a flow that ended.
                    let all = state.links.is_empty() && is_netfilter(&before);
                    prop_assert_eq!(*stale == StaleFlows::All, all);
                }
                Step::SetNewFlows(NewFlows::Translate) => {
                    prop_assert!(earlier.contains(&Step::LeaveFlowsToConntrack));
                    // Flows that began after the first list.
                    prop_assert!(later.contains(&Step::LeaveFlowsToConntrack));
                    prop_assert!(!later.iter().any(|step| matches!(step, Step::AttachLink(..))));
                }
                _ => {}
            }
            state.record(step);
        }
        let path = if is_netfilter(&after) { NewFlows::Leave } else { NewFlows::Translate };
        prop_assert!(state.new_flows == path as u16);
    }

    #[test]
    fn direct_path_is_on_only_while_all_programs_translate_and_ends_with_the_endpoints_of_datagrams(
        (before, after, dirty) in testing::snapshot_change()
    ) {
        let mut state = programmed(&before);
        let steps = plan(&state, &after, &dirty).steps;
        for (at, step) in steps.iter().enumerate() {
            let (epoch, later) = (state.direct.epoch, &steps[at + 1..]);
            match step {
                Step::SetDirect(DirectFields { epoch: next, .. }) => {
                    prop_assert!(next.0 > epoch.0, "no epoch returns");
                    let attaches = later.iter().any(|step| matches!(step, Step::AttachLink(..)));
                    prop_assert!(!next.is_on() || !attaches && state.new_flows == NewFlows::Translate as u16);
                }
                Step::Remove(MapEntry::Member(_) | MapEntry::DirectLink(_) | MapEntry::PeerLink(_))
                    if epoch.is_on() =>
                {
                    prop_assert!(later.iter().any(|step| matches!(step, Step::SetDirect(_))), "{later:?}");
                }
                Step::LeaveLink(_) | Step::HandFlowsToConntrack => prop_assert!(!epoch.is_on()),
                _ => {}
            }
            state.record(step);
        }
        match after.node.link_path {
            LinkPath::Direct { scope, lease, .. } => {
                prop_assert!(state.direct.epoch.is_on());
                prop_assert_eq!(state.direct.scope, scope as u16);
                prop_assert_eq!(state.direct.lease_ns, clock::nanos(lease));
            }
            _ => prop_assert!(!state.direct.epoch.is_on()),
        }
        prop_assert_eq!(state.direct_links, after.node.direct_links);
        prop_assert_eq!(state.peer_links, after.node.peer_links);
    }

    #[test]
    fn xdp_programs_forward_only_where_they_are_attached(
        (before, after, dirty) in testing::snapshot_change()
    ) {
        let mut state = programmed(&before);
        let steps = plan(&state, &after, &dirty).steps;
        for (at, step) in steps.iter().enumerate() {
            match step {
                Step::AttachXdp(index, link) => {
                    let is_replaced = state.xdp_mode(*index) == Some(link.mode);
                    prop_assert!(is_replaced || !state.xdp_links.contains_key(index));
                    prop_assert!(!steps[at..].iter().any(|step| matches!(step, Step::AttachLink(..))));
                }
                Step::DetachXdp(index) => prop_assert!(!state.xdp_links.contains_key(index)),
                Step::Put(MapEntry::XdpLink(index, _)) => {
                    prop_assert!(state.xdp_mode(*index).is_some());
                    prop_assert!(after.node.direct_links.contains(index));
                }
                _ => {}
            }
            state.record(step);
        }
        prop_assert_eq!(&state.xdp_links, &translate::xdp_links(&after.node, &state));
        for (index, link) in after.node.xdp_links.iter().filter(|(_, link)| link.forwards) {
            prop_assert_eq!(state.xdp.get(index), Some(&XdpState::Current(link.mode)));
        }
        prop_assert!(state.xdp.keys().all(|index| after.node.xdp_links.contains_key(index)));
    }

    #[test]
    fn link_that_refuses_an_xdp_program_forwards_nothing_and_is_not_asked_again_at_once(
        snapshot in testing::snapshot()
    ) {
        let mut state = programmed(&snapshot);
        state.xdp.values_mut().for_each(|state| *state = XdpState::Refused(state.mode()));
        let refused = plan(&state, &snapshot, &Dirty::everything());
        prop_assert!(!refused.steps.iter().any(|step| matches!(step, Step::AttachXdp(..))));
        apply(&mut state, &refused);
        prop_assert!(state.xdp_links.is_empty());
        prop_assert_eq!(plan(&state, &snapshot, &Dirty::everything()).steps, []);
    }
}
