//! Who calls: whose source is kept or replaced, who gets which endpoints, and who may call at all.

use super::{PROTOS, Served, addr};
use crate::{
    Protocol::{Tcp, Udp},
    layout::{Counter, LocalDetection, flags},
    packet::TcpFlags,
    testing::{Scene, Sent},
};

/// Another client of the same.
fn by(served: &Served, client: std::net::SocketAddr) -> Sent {
    served.first.clone().from(client)
}

fn sources_are_kept_unless_the_service_says_otherwise(scene: &mut Scene<'_>) {
    let masquerade = scene.world.node.masquerade_mark;
    for proto in PROTOS {
        let served = Served::new(scene, proto);
        scene.enters(&served.first).becomes(&served.first.clone().to(served.endpoint)).is_marked(0);
        scene.put(&served.service.clone().flagged(flags::MASQUERADE_OUTSIDE));
        let other = by(&served, addr(scene.at.client, 40_001));
        scene.enters(&other).becomes(&other.clone().to(served.endpoint)).is_marked(masquerade);
        let next = other.clone().flags(TcpFlags::ACK_ALONE);
        scene.enters(&next).becomes(&next.clone().to(served.endpoint)).is_marked(masquerade);
        let answer = other.clone().to(served.endpoint).reversed().flags(TcpFlags::SYN_ACK);
        scene.leaves(&answer).becomes(&answer.clone().from(served.vip)).is_marked(0);
        // Inside callers are none here, as nothing tells them apart.
        scene.put(&served.service.clone().flagged(flags::MASQUERADE_INSIDE));
        let third = by(&served, addr(scene.at.other_pod, 40_002));
        scene.enters(&third).becomes(&third.clone().to(served.endpoint)).is_marked(0);
    }
}

/// Plays it where `client` is local as the scene has been told.
fn local_and_other_callers_are_told_apart(scene: &mut Scene<'_>, local: bool) {
    let masquerade = scene.world.node.masquerade_mark;
    let caller = if local { scene.at.other_pod } else { scene.at.client };
    let outside = addr(scene.at.pod, 9090);
    for proto in PROTOS {
        let served = Served::new(scene, proto);
        let wanted = if local { served.endpoint } else { outside };
        let mut port = 50_000;
        for (flag, marks) in [
            (0, 0),
            (flags::MASQUERADE_INSIDE, if local { masquerade } else { 0 }),
            (flags::MASQUERADE_OUTSIDE, if local { 0 } else { masquerade }),
        ] {
            scene.put(&served.service.clone().with_outside(&[outside]).flagged(flag));
            port += 1;
            let sent = by(&served, addr(caller, port));
            scene.enters(&sent).becomes(&sent.clone().to(wanted)).is_marked(marks);
        }
    }
}

fn callers_from_a_local_source_are_told_apart(scene: &mut Scene<'_>) {
    scene.world.node.local_detection = LocalDetection::Source as u32;
    let (pods, length) = scene.at.pods;
    scene.world.local_sources.insert((pods.into(), length));
    // A local link does not count.
    scene.world.local_links.insert(1);
    local_and_other_callers_are_told_apart(scene, true);
    local_and_other_callers_are_told_apart(scene, false);
}

fn callers_on_a_local_link_are_told_apart(scene: &mut Scene<'_>) {
    scene.world.node.local_detection = LocalDetection::Link as u32;
    // A local source does not count.
    scene.world.local_sources.insert((scene.at.client.into(), 128));
    scene.world.local_links.insert(2);
    local_and_other_callers_are_told_apart(scene, false);
    scene.world.local_links.insert(1);
    local_and_other_callers_are_told_apart(scene, true);
}

fn without_local_detection_all_callers_are_others(scene: &mut Scene<'_>) {
    scene.world.local_sources.insert((scene.at.client.into(), 128));
    scene.world.local_links.insert(1);
    local_and_other_callers_are_told_apart(scene, false);
}

fn source_ranges_let_in_whom_they_hold(scene: &mut Scene<'_>) {
    for proto in PROTOS {
        let served = Served::new(scene, proto);
        let number = served.service.value.service;
        scene.world.source_ranges.insert((number, scene.at.client.into(), 128));
        scene.world.source_ranges.insert((number + 100, scene.at.other_client.into(), 128));
        scene.put(&served.service.clone().flagged(flags::SOURCE_RANGES));
        served.begin(scene);
        let denied = by(&served, addr(scene.at.other_client, 40_000));
        scene.enters(&denied).is_dropped();
    }
    assert_eq!(scene.count(Counter::SourceNotAllowed), 2);
    assert_eq!(scene.count(Counter::FlowsBegun), 2);
}

fn source_ranges_hold_by_their_prefix(scene: &mut Scene<'_>) {
    let served = Served::new(scene, Tcp);
    let (pods, length) = scene.at.pods;
    scene.world.source_ranges.insert((served.service.value.service, pods.into(), length));
    scene.put(&served.service.clone().flagged(flags::SOURCE_RANGES));
    let allowed = by(&served, addr(scene.at.other_pod, 40_000));
    scene.enters(&allowed).becomes(&allowed.clone().to(served.endpoint));
    scene.enters(&served.first).is_dropped();
}

fn no_source_range_keeps_endpoints_from_refusing(scene: &mut Scene<'_>) {
    let served = Served::new(scene, Udp);
    scene.world.source_ranges.insert((served.service.value.service, scene.at.client.into(), 128));
    scene.put(&served.service.clone().moved_to(&[]).flagged(flags::SOURCE_RANGES));
    scene.enters(&served.first).is_refused();
    scene.enters(&by(&served, addr(scene.at.other_client, 1))).is_dropped();
}

super::scenarios! {
    sources_are_kept_unless_the_service_says_otherwise,
    callers_from_a_local_source_are_told_apart,
    callers_on_a_local_link_are_told_apart,
    without_local_detection_all_callers_are_others,
    source_ranges_let_in_whom_they_hold,
    source_ranges_hold_by_their_prefix,
    no_source_range_keeps_endpoints_from_refusing,
}
