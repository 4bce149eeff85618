//! Where a mode does something else than the cases of all modes say, by design: what holds there instead, which is asserted as all
//! else is.

use std::ops::RangeInclusive;

use crate::{
    case::{Action, Case, Expectation, ExpectedAnswers, Peer, Source},
    world::Host,
};

/// A flow that ends in another way in one mode.
struct Difference {
    mode: &'static str,
    case: &'static str,
    /// Counted from 1.
    step: usize,
    /// Of the step, counted from 1.
    flows: RangeInclusive<usize>,
    expect: fn() -> Expectation,
}

/// One virtual server serves all callers, so that pods and the node reach endpoints of this node only, as callers from outside do,
/// by an external address of a Service with externalTrafficPolicy Local that has one here. The node's own connections to
/// a load-balancer address come from that address, which is the node's too.
const DIFFERENCES: &[Difference] = &[
    difference("ipvs", "loadbalancer-local", 1, 2..=2, || only(Host::A1, None)),
    difference("ipvs", "loadbalancer-local", 1, 3..=3, || only(Host::A1, None)),
    difference("ipvs", "nodeport-local-with-endpoint", 1, 2..=2, || only(Host::A1, None)),
    difference("ipvs", "nodeport-local-with-endpoint", 1, 3..=3, || only(Host::A1, Some(Source::Node))),
    difference("ipvs", "outside-cgroup-local", 1, 1..=12, || only(Host::A2, Some(Source::Client))),
    // The kernel's virtual server sends nothing from loopback to elsewhere: node ports are not there.
    difference("ipvs", "nodeport-localhost", 1, 1..=1, || Expectation::Refused),
    // It refuses where it has no real server. The API leaves open how such traffic is dropped.
    difference("ipvs", "outside-cgroup-internal-local", 1, 9..=16, || Expectation::Refused),
    difference("ipvs", "refused-or-dropped", 1, 113..=120, || Expectation::Refused),
    // What it takes goes from the chain INPUT to OUTPUT, and past FORWARD.
    difference("ipvs", "forward-policy-drop-nft", 1, 13..=16, || only(Host::A1, Some(Source::Client))),
    difference("ipvs", "forward-policy-drop-nft", 1, 17..=20, || any_of(&[Host::A1, Host::B1])),
    difference("ipvs", "forward-policy-drop-legacy", 1, 13..=16, || only(Host::A1, Some(Source::Client))),
    difference("ipvs", "forward-policy-drop-legacy", 1, 17..=20, || any_of(&[Host::A1, Host::B1])),
    // It knows a connection's answers by client and endpoint alone: of several with the same ones, the last has them.
    difference("ipvs", "one-client-port-to-many-addresses", 1, 7..=11, || Expectation::Blocked),
    difference("ipvs", "one-client-port-to-many-addresses", 1, 19..=23, || Expectation::Blocked),
    difference("ipvs", "one-client-port-to-many-addresses", 1, 31..=35, || Expectation::Blocked),
    difference("ipvs", "one-client-port-to-many-addresses", 1, 43..=47, || Expectation::Blocked),
    // What a bridge put together for netfilter no longer says how large its fragments were: too big for one packet of IPv6.
    difference("ipvs", "pods-on-a-bridge-with-netfilter", 1, 36..=36, || Expectation::TooBig),
    // Whatever comes in for a node port is the virtual server's, the answers to what the node itself sends from that port too.
    difference("ipvs", "own-port-is-a-node-port", 1, 1..=8, || Expectation::Blocked),
];

const fn difference(
    mode: &'static str,
    case: &'static str,
    step: usize,
    flows: RangeInclusive<usize>,
    expect: fn() -> Expectation,
) -> Difference {
    Difference { mode, case, step, flows, expect }
}

fn only(host: Host, source: Option<Source>) -> Expectation {
    Expectation::Reach(ExpectedAnswers {
        hosts: [host].into(),
        sticky: false,
        share: None,
        source,
        retransmits: None,
        peer: Peer::default(),
    })
}

/// One of these, which sees the caller's own address.
fn any_of(hosts: &[Host]) -> Expectation {
    Expectation::Reach(ExpectedAnswers {
        hosts: hosts.iter().copied().collect(),
        sticky: true,
        share: None,
        source: Some(Source::Client),
        retransmits: None,
        peer: Peer::default(),
    })
}

/// The case as it is to be in a mode. To hear nothing takes long, so that it is tried once.
pub fn adapt_to_mode(mut case: Case, mode: &str) -> Case {
    for Difference { step, flows, expect, .. } in of(&case.name, mode) {
        let step = case.steps.get_mut(step - 1);
        let all = step.into_iter().flat_map(|step| step.flows.iter_mut().zip(1..));
        for (flow, _) in all.filter(|(_, number)| flows.contains(number)) {
            flow.expect = expect();
            if let (Action::Connect(connect), Expectation::Blocked) = (&mut flow.action, &flow.expect) {
                connect.n = 1;
            }
        }
    }
    case
}

fn of<'a>(case: &'a str, mode: &'a str) -> impl Iterator<Item = &'static Difference> + use<'a> {
    DIFFERENCES.iter().filter(move |difference| difference.case == case && difference.mode == mode)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runner::cases_directory;

    #[test]
    fn every_difference_is_of_a_flow_that_is_there_and_says_something_else() {
        let cases = Case::read_directory(cases_directory(), &[]).unwrap();
        for Difference { mode, case, step, flows, expect } in DIFFERENCES {
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
