//! The scenarios of flows hold on nodes with a direct path, too.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    vec::Vec,
};

use super::{Scenario, affinity, counts, errors, floods, maglev, ports, sources, tcp, udp};
use crate::{
    layout::DirectScope,
    testing::{Addresses, TestNode, forwarding::ForwardingMaps},
};

/// Scenarios of flows. Those of the other files name the hook or the path.
const OF_FLOWS: [&[Scenario]; 9] = [
    affinity::ALL,
    counts::ALL,
    errors::ALL,
    floods::ALL,
    maglev::ALL,
    ports::ALL,
    sources::ALL,
    tcp::ALL,
    udp::ALL,
];

/// Packets of clients leave in this scenario that did not come in.
const ONLY_LEAVES: &str = "packets_of_no_service_are_left_alone";

/// Runs the scenarios, and returns how many packets took the direct path.
fn run(scope: DirectScope) -> usize {
    let mut failed = Vec::new();
    let mut direct = 0;
    let scenarios = OF_FLOWS.into_iter().flatten().filter(|scenario| !scenario.name.ends_with(ONLY_LEAVES));
    for scenario in scenarios {
        for addresses in Addresses::BOTH {
            let mut maps = ForwardingMaps::new(scope);
            let result =
                catch_unwind(AssertUnwindSafe(|| (scenario.run)(&mut TestNode::new(&mut maps, addresses))));
            direct += maps.direct;
            failed.extend(result.is_err().then_some(scenario.name));
        }
    }
    assert!(failed.is_empty(), "{failed:?}");
    direct
}

#[test]
fn scenarios_of_flows_hold_where_learned_flows_take_the_direct_path() {
    assert!(run(DirectScope::Learned) >= 20, "packets took the direct path");
}

#[test]
fn scenarios_of_flows_hold_where_whole_flows_take_the_direct_path() {
    assert!(run(DirectScope::Whole) > 2_000, "nearly all packets took the direct path");
}
