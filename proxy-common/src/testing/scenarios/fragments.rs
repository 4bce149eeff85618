//! Fragments: the first alone has ports, and the others go where it went.

use super::{PROTOS, Served, addr, any, first};
use crate::{
    Protocol::{Tcp, Udp},
    layout::{Counter, flags},
    packet::TcpFlags,
    testing::{Carries, Scene, Sent},
};

/// A packet that is sent in four parts.
fn long(mut sent: Sent) -> Sent {
    if let Carries::Tcp { data, .. } | Carries::Udp { data } = &mut sent.carries {
        *data = (0..100).collect();
    }
    sent
}

const PARTS: [std::ops::Range<usize>; 4] = [0..40, 40..64, 64..72, 72..usize::MAX];

fn fragments_follow_their_first_one(scene: &mut Scene<'_>) {
    for proto in PROTOS {
        let served = Served::new(scene, proto);
        let (first, answer) = (long(served.first.clone()), long(served.answer()));
        for part in PARTS {
            let sent = first.clone().part(77, part.clone());
            scene.enters(&sent).becomes(&sent.clone().to(served.endpoint)).is_marked(0);
        }
        for part in PARTS {
            let sent = answer.clone().part(77, part);
            scene.leaves(&sent).becomes(&sent.clone().from(served.vip)).is_marked(0);
        }
    }
    assert_eq!(scene.count(Counter::FlowsBegun), 2);
}

fn later_fragments_are_masqueraded_like_their_first_one(scene: &mut Scene<'_>) {
    let served = Served::new(scene, Udp);
    scene.put(&served.service.clone().flagged(flags::MASQUERADE_OUTSIDE));
    let mark = scene.world.node.masquerade_mark;
    for part in PARTS {
        let sent = long(served.first.clone()).part(0xffff, part);
        scene.enters(&sent).becomes(&sent.clone().to(served.endpoint)).is_marked(mark);
    }
}

fn later_fragments_whose_first_one_nobody_saw_are_left_alone(scene: &mut Scene<'_>) {
    let served = Served::new(scene, Udp);
    let first = long(served.first.clone());
    let later = first.clone().part(1, PARTS[1].clone());
    scene.enters(&later).is_left_alone();
    scene.enters(&first.clone().part(1, PARTS[0].clone()));
    scene.enters(&later).becomes(&later.clone().to(served.endpoint));
    scene.enters(&later.clone().part(2, PARTS[1].clone())).is_left_alone();
    scene.enters(&later.clone().from(addr(scene.at.other_client, 40_000))).is_left_alone();
    scene.leaves(&later).is_left_alone();
    scene.leaves(&later.clone().to(served.endpoint).reversed()).is_left_alone();
    let mut tcp = long(super::first(Tcp, first.from, first.to)).part(1, PARTS[1].clone());
    scene.enters(&tcp).is_left_alone();
    tcp.carries = later.carries.clone();
    scene.enters(&tcp).becomes(&tcp.clone().to(served.endpoint));
}

fn fragments_of_what_is_refused_are_not_translated(scene: &mut Scene<'_>) {
    let served = Served::new(scene, Udp);
    scene.put(&served.service.clone().moved_to(&[]));
    scene.enters(&long(served.first.clone()).part(5, PARTS[0].clone())).is_refused();
    scene.enters(&long(served.first.clone()).part(5, PARTS[1].clone())).is_left_alone();
}

fn fragments_of_answers_to_the_nodes_own_datagrams_are_left_alone(scene: &mut Scene<'_>) {
    let at = scene.at;
    let own = addr(at.node, 30_053);
    Served::at(scene, Udp, own, addr(any(at.node), 30_053));
    let question = long(Sent::udp(own, addr(at.router, 53)));
    scene.leaves(&question.clone().part(9, PARTS[0].clone())).is_left_alone();
    scene.leaves(&question.clone().part(9, PARTS[1].clone())).is_left_alone();
    for part in PARTS {
        scene.enters(&question.clone().reversed().part(10, part)).is_left_alone();
    }
}

fn first_fragments_without_all_of_the_header_go_no_further_than_they_can_be_understood(
    scene: &mut Scene<'_>,
) {
    let served = Served::new(scene, Tcp);
    let syn = long(served.first.clone());
    // Ports but no flags, so that it cannot be told whether it begins anything; and flags but no checksum.
    for length in [8, 16] {
        scene.enters(&syn.clone().part(6, 0..length)).is_left_alone();
        scene.enters(&syn.clone().part(6, length..24)).is_left_alone();
    }
    assert_eq!(scene.flows(), 0);
    let served = Served::new(scene, Udp);
    let datagram = long(served.first.clone()).part(8, 0..8);
    scene.enters(&datagram).becomes(&datagram.clone().to(served.endpoint));
}

fn an_identification_used_again_follows_the_newest_first_fragment(scene: &mut Scene<'_>) {
    let served = Served::new(scene, Udp);
    let other = addr(scene.at.other_pod, 8080);
    for endpoint in [served.endpoint, other] {
        scene.put(&served.service.clone().moved_to(&[endpoint]));
        for part in PARTS {
            let sent = long(first(Udp, served.first.from, served.vip)).part(3, part);
            scene.enters(&sent).becomes(&sent.clone().to(endpoint));
        }
    }
    let segment = long(served.first.clone().flags(TcpFlags::ACK_ALONE));
    scene.enters(&segment).becomes(&segment.clone().to(other));
}

fn fragments_of_a_datagram_that_is_nobodys_do_not_follow_an_older_one(scene: &mut Scene<'_>) {
    let at = scene.at;
    let own = addr(at.node, 30_080);
    let served = Served::at(scene, Udp, own, addr(any(at.node), 30_080));
    let one = long(served.first.clone());
    for part in PARTS {
        let sent = one.clone().part(77, part);
        scene.enters(&sent).becomes(&sent.clone().to(served.endpoint));
    }
    scene.wait(600);
    // To another port of the node, which is no Service's; the identification came round.
    let mut other = one;
    other.to = addr(at.node, 4500);
    scene.enters(&other.clone().part(77, PARTS[0].clone())).is_left_alone();
    scene.enters(&other.clone().part(77, PARTS[1].clone())).is_left_alone();
}

super::scenarios! {
    fragments_of_a_datagram_that_is_nobodys_do_not_follow_an_older_one,
    fragments_follow_their_first_one,
    later_fragments_are_masqueraded_like_their_first_one,
    later_fragments_whose_first_one_nobody_saw_are_left_alone,
    fragments_of_what_is_refused_are_not_translated,
    fragments_of_answers_to_the_nodes_own_datagrams_are_left_alone,
    first_fragments_without_all_of_the_header_go_no_further_than_they_can_be_understood,
    an_identification_used_again_follows_the_newest_first_fragment,
}
