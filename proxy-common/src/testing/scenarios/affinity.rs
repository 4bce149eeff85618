//! Session affinity by client address.

use std::vec::Vec;

use super::{PROTOS, Served, addr};
use crate::{
    Protocol::Tcp,
    layout::{Counter, Flow},
    packet::TcpFlags,
    testing::{Scene, Sent},
};

/// A service port with affinity and so many endpoints that chance alone would not hit the same one.
fn sticky(scene: &mut Scene<'_>, proto: crate::Protocol) -> Served {
    let mut served = Served::new(scene, proto);
    let endpoints: Vec<_> = (1..=200).map(|port| addr(scene.at.pod, 1000 + port)).collect();
    served.service = served.service.moved_to(&endpoints);
    served.service.value.affinity_seconds = 60;
    scene.put(&served.service);
    served
}

/// The flow of a first packet.
fn placed(scene: &mut Scene<'_>, sent: &Sent) -> Flow {
    scene.enters(sent);
    scene.flow(crate::layout::Direction::Original, sent).expect("noted")
}

fn a_client_address_comes_back_to_its_endpoint(scene: &mut Scene<'_>) {
    for proto in PROTOS {
        let served = sticky(scene, proto);
        let one = placed(scene, &served.first);
        for port in 41_000..41_005 {
            scene.wait(50);
            let again = served.first.clone().from(addr(scene.at.client, port));
            assert_eq!(placed(scene, &again).destination, one.destination, "each try begins the time anew");
        }
    }
}

fn affinity_ends_when_a_client_was_away_for_long_or_its_endpoint_went(scene: &mut Scene<'_>) {
    let mut served = sticky(scene, Tcp);
    scene.enters(&served.first);
    let others: Vec<_> = (1..=200).map(|port| addr(scene.at.other_pod, 1000 + port)).collect();
    served.service = served.service.moved_to(&others);
    scene.put(&served.service);
    let again = served.first.clone().from(addr(scene.at.client, 41_000));
    let placed_anew = placed(scene, &again);
    assert_eq!(placed_anew.destination.addr, scene.at.other_pod.into(), "the first endpoint went");
    let once_more = served.first.clone().from(addr(scene.at.client, 41_001));
    assert_eq!(placed(scene, &once_more).destination, placed_anew.destination);
    // That 20 clients who were away all come to the same of 200 again does not happen.
    let mut moved = 0;
    for port in 42_000..42_020 {
        scene.wait(61);
        let again = served.first.clone().from(addr(scene.at.client, port));
        moved += u32::from(placed(scene, &again).destination != placed_anew.destination);
    }
    assert!(moved > 10, "{moved} of 20");
}

fn a_connection_that_goes_on_does_not_ask_for_affinity(scene: &mut Scene<'_>) {
    let served = sticky(scene, Tcp);
    let one = placed(scene, &served.first);
    scene.wait(61);
    let next = served.first.clone().flags(TcpFlags::ACK_ALONE);
    assert_eq!(placed(scene, &next).destination, one.destination);
    assert_eq!(scene.count(Counter::FlowsBegun), 0, "since the wait");
}

super::scenarios! {
    a_client_address_comes_back_to_its_endpoint,
    affinity_ends_when_a_client_was_away_for_long_or_its_endpoint_went,
    a_connection_that_goes_on_does_not_ask_for_affinity,
}
