//! The flows whose result differs in a mode by design, with the result that holds there instead. It
//! is checked like any other expectation.

use std::ops::RangeInclusive;

use crate::{
    case::{Action, Case, Expectation, ExpectedAnswers, Peer, Source},
    world::Host,
};

/// A range of flows with another result in one mode.
struct ModeDifference {
    mode: &'static str,
    case: &'static str,
    /// The step, counted from 1.
    step: usize,
    /// The flows of the step, counted from 1.
    flows: RangeInclusive<usize>,
    expect: fn() -> Expectation,
}

/// All known differences.
///
/// In IPVS, one virtual server serves all clients. At an external address of a Service with
/// externalTrafficPolicy Local that has an endpoint on this node, pods and the node therefore reach
/// endpoints of this node only, as outside clients do. The node's own connections to a
/// load-balancer address come from that address, because it is an address of the node.
const DIFFERENCES: &[ModeDifference] = &[
    difference("ipvs", "loadbalancer-local", 1, 2..=2, || only(Host::A1, None)),
    difference("ipvs", "loadbalancer-local", 1, 3..=3, || only(Host::A1, None)),
    difference("ipvs", "nodeport-local-with-endpoint", 1, 2..=2, || only(Host::A1, None)),
    difference("ipvs", "nodeport-local-with-endpoint", 1, 3..=3, || only(Host::A1, Some(Source::Node))),
    difference("ipvs", "outside-cgroup-local", 1, 1..=12, || only(Host::A2, Some(Source::Client))),
    // IPVS sends nothing from a loopback address to other hosts, so there are no node ports on
    // loopback.
    difference("ipvs", "nodeport-localhost", 1, 1..=1, || Expectation::Refused),
    // IPVS refuses connections if it has no real server. The API does not define how such traffic
    // is dropped.
    difference("ipvs", "outside-cgroup-internal-local", 1, 9..=16, || Expectation::Refused),
    difference("ipvs", "refused-or-dropped", 1, 113..=120, || Expectation::Refused),
    // Packets that IPVS handles go from the chain INPUT to OUTPUT, and do not pass FORWARD.
    difference("ipvs", "forward-policy-drop-nft", 1, 13..=16, || only(Host::A1, Some(Source::Client))),
    difference("ipvs", "forward-policy-drop-nft", 1, 17..=20, || any_of(&[Host::A1, Host::B1])),
    difference("ipvs", "forward-policy-drop-legacy", 1, 13..=16, || only(Host::A1, Some(Source::Client))),
    difference("ipvs", "forward-policy-drop-legacy", 1, 17..=20, || any_of(&[Host::A1, Host::B1])),
    // IPVS identifies replies by client and endpoint only. If several connections have the same
    // ones, the last connection gets the replies.
    difference("ipvs", "one-client-port-to-many-addresses", 1, 7..=11, || Expectation::Blocked),
    difference("ipvs", "one-client-port-to-many-addresses", 1, 19..=23, || Expectation::Blocked),
    difference("ipvs", "one-client-port-to-many-addresses", 1, 31..=35, || Expectation::Blocked),
    difference("ipvs", "one-client-port-to-many-addresses", 1, 43..=47, || Expectation::Blocked),
    // A datagram that a bridge reassembled for netfilter has lost the size of its fragments: it is
    // too big for one IPv6 packet.
    difference("ipvs", "pods-on-a-bridge-with-netfilter", 1, 36..=36, || Expectation::TooBig),
    // Everything that arrives at a node port belongs to the virtual server, including replies to
    // what the node itself sent from that port.
    difference("ipvs", "own-port-is-a-node-port", 1, 1..=8, || Expectation::Blocked),
];

const fn difference(
    mode: &'static str,
    case: &'static str,
    step: usize,
    flows: RangeInclusive<usize>,
    expect: fn() -> Expectation,
) -> ModeDifference {
    ModeDifference { mode, case, step, flows, expect }
}

fn only(host: Host, source: Option<Source>) -> Expectation {
    Expectation::Reach(ExpectedAnswers {
        hosts: [host].into(),
        sticky: false,
        share: None,
        source,
        original: None,
        retransmits: None,
        peer: Peer::default(),
    })
}

/// Expects one of these hosts, which sees the client's own address.
fn any_of(hosts: &[Host]) -> Expectation {
    Expectation::Reach(ExpectedAnswers {
        hosts: hosts.iter().copied().collect(),
        sticky: true,
        share: None,
        source: Some(Source::Client),
        original: None,
        retransmits: None,
        peer: Peer::default(),
    })
}

/// Returns the case with the expectations of a mode. A flow that expects no answer makes a single
/// attempt, because each attempt takes long.
pub fn adapt_to_mode(mut case: Case, mode: &str) -> Case {
    for ModeDifference { step, flows, expect, .. } in differences_of(&case.name, mode) {
        let step = case.steps.get_mut(step - 1);
        let all = step.into_iter().flat_map(|step| step.flows.iter_mut().zip(1..));
        for (flow, _) in all.filter(|(_, number)| flows.contains(number)) {
            flow.expect = expect();
            if let (Action::Connect(connect), Expectation::Blocked) = (&mut flow.action, &flow.expect) {
                connect.attempts = 1;
            }
        }
    }
    case
}

fn differences_of<'a>(
    case: &'a str,
    mode: &'a str,
) -> impl Iterator<Item = &'static ModeDifference> + use<'a> {
    DIFFERENCES.iter().filter(move |difference| difference.case == case && difference.mode == mode)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runner::cases_directory;

    #[test]
    fn every_difference_changes_an_existing_flow() {
        let cases = Case::read_directory(cases_directory(), &[]).unwrap();
        for ModeDifference { mode, case, step, flows, expect } in DIFFERENCES {
            let found = cases.iter().find(|found| found.name == *case).expect(case);
            for flow in flows.clone() {
                let flow = &found.steps[step - 1].flows[flow - 1];
                assert_ne!(flow.expect, expect(), "{mode} {case}");
            }
            assert_eq!(
                adapt_to_mode(found.clone(), "ebpf").steps[step - 1].flows,
                found.steps[step - 1].flows
            );
        }
    }
}
