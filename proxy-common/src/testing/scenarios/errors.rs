//! ICMP errors: who is told of a packet is told of it as it was sent.

use std::{net::IpAddr, vec::Vec};

use super::{PROTOS, Served, addr, any};
use crate::{
    Protocol::{Tcp, Udp},
    testing::{Carries, Extension, Places, Scene, Sent},
};

/// Types and codes of errors; the first of them are those of path MTU discovery.
fn kinds(at: &Places) -> [[u8; 2]; 5] {
    if at.node.is_ipv4() {
        [[3, 4], [3, 3], [4, 0], [11, 0], [12, 0]]
    } else {
        [[2, 0], [1, 4], [1, 0], [3, 0], [4, 1]]
    }
}

/// An error about a packet, of which it holds so many bytes behind the IP header.
fn about(kind: [u8; 2], from: IpAddr, to: IpAddr, told: Sent, bytes: usize) -> Sent {
    let header = if from.is_ipv4() { 20 } else { 40 };
    let mut error = Sent::error(kind, from, to, told);
    if let Carries::Icmp { length, .. } = &mut error.carries {
        *length = bytes.saturating_add(header);
    }
    error
}

/// A packet with the transport checksum of another: that of what was told of stays as it was.
fn summed_as(sent: Sent, other: &Sent) -> Sent {
    let sum = if sent.proto() == 6 { 16 } else { 6 };
    let carried = other.carried();
    Sent { checksum: Some([carried[sum], carried[sum + 1]]), ..sent }
}

const LENGTHS: [usize; 4] = [4, 8, 20, usize::MAX];

fn a_client_is_told_of_its_packet_as_it_sent_it(scene: &mut Scene<'_>) {
    let at = scene.at;
    for proto in PROTOS {
        let served = Served::new(scene, proto);
        served.begin(scene);
        let sent = served.next();
        let translated = summed_as(sent.clone().to(served.endpoint), &sent);
        for (from, came_from) in
            [(at.router, at.router), (at.node, at.node), (served.endpoint.ip(), served.vip.ip())]
        {
            for (kind, bytes) in kinds(&at).into_iter().flat_map(|kind| LENGTHS.map(|length| (kind, length)))
            {
                let error = about(kind, from, at.client, translated.clone(), bytes);
                let wanted = about(kind, came_from, at.client, sent.clone(), bytes);
                scene.leaves(&error).becomes(&wanted).is_marked(0);
            }
        }
    }
}

fn an_endpoint_is_told_of_its_answer_as_it_sent_it(scene: &mut Scene<'_>) {
    let at = scene.at;
    for proto in PROTOS {
        let served = Served::new(scene, proto);
        served.begin(scene);
        let sent = served.answer();
        let translated = summed_as(sent.clone().from(served.vip), &sent);
        for from in [at.router, at.client] {
            for (kind, bytes) in kinds(&at).into_iter().flat_map(|kind| LENGTHS.map(|length| (kind, length)))
            {
                let error = about(kind, from, served.vip.ip(), translated.clone(), bytes);
                let wanted = about(kind, from, served.endpoint.ip(), sent.clone(), bytes);
                scene.enters(&error).becomes(&wanted).is_marked(0);
            }
        }
    }
}

fn an_error_about_an_answer_that_is_for_another_host_stays_for_that_one(scene: &mut Scene<'_>) {
    let at = scene.at;
    let served = Served::new(scene, Udp);
    served.begin(scene);
    let sent = served.answer();
    let translated = summed_as(sent.clone().from(served.vip), &sent);
    let error = about(kinds(&at)[0], at.router, at.node, translated, 8);
    scene.enters(&error).becomes(&about(kinds(&at)[0], at.router, at.node, sent, 8));
}

fn errors_about_what_is_nobodys_are_left_alone(scene: &mut Scene<'_>) {
    let at = scene.at;
    let served = Served::new(scene, Udp);
    served.begin(scene);
    let other = served.first.clone().from(addr(at.client, 41_000));
    for kind in kinds(&at) {
        let back = about(kind, at.router, at.client, other.clone().to(served.endpoint), 8);
        scene.leaves(&back).is_left_alone();
        let forth = about(kind, at.router, served.vip.ip(), other.clone().reversed(), 8);
        scene.enters(&forth).is_left_alone();
        // Of one that was already translated back, on another link on top of the first.
        scene.leaves(&about(kind, at.router, at.client, served.first.clone(), 8)).is_left_alone();
    }
}

fn errors_that_hold_too_little_are_left_alone(scene: &mut Scene<'_>) {
    let at = scene.at;
    let served = Served::new(scene, Udp);
    served.begin(scene);
    let header = if at.node.is_ipv4() { 20 } else { 40 };
    for length in 0..header + 4 {
        let mut error =
            Sent::error(kinds(&at)[0], at.router, at.client, served.first.clone().to(served.endpoint));
        if let Carries::Icmp { length: kept, .. } = &mut error.carries {
            *kept = length;
        }
        scene.leaves(&error).is_left_alone();
    }
}

fn errors_about_later_fragments_are_left_alone(scene: &mut Scene<'_>) {
    let at = scene.at;
    let served = Served::new(scene, Udp);
    served.begin(scene);
    let mut told = served.first.clone().to(served.endpoint);
    // The later part begins with what would be the flow's ports.
    let ports = [40_000u16, 8080].map(u16::to_be_bytes).concat();
    told.carries = Carries::Udp { data: ports.repeat(16) };
    let later = told.clone().part(4, 16..32);
    scene.leaves(&about(kinds(&at)[0], at.router, at.client, later, 64)).is_left_alone();
    let first = summed_as(told.clone().part(4, 0..32), &told);
    let sent = summed_as(first.clone().to(served.vip), &told);
    let error = about(kinds(&at)[0], at.router, at.client, first, 64);
    scene.leaves(&error).becomes(&about(kinds(&at)[0], at.router, at.client, sent, 64));
}

fn messages_that_are_no_errors_are_left_alone(scene: &mut Scene<'_>) {
    let at = scene.at;
    let served = Served::new(scene, Udp);
    served.begin(scene);
    // Echo and its answer, and, which would lead a client past the node, redirects.
    let kinds = if at.node.is_ipv4() { [[8, 0], [0, 0], [5, 1]] } else { [[128, 0], [129, 0], [137, 0]] };
    for kind in kinds {
        let told = served.first.clone().to(served.endpoint);
        scene.leaves(&about(kind, at.router, at.client, told, 8)).is_left_alone();
        let told = served.first.clone().reversed();
        scene.enters(&about(kind, at.router, served.vip.ip(), told, 8)).is_left_alone();
    }
}

fn icmp_of_the_other_family_is_left_alone(scene: &mut Scene<'_>) {
    let at = scene.at;
    let served = Served::new(scene, Udp);
    served.begin(scene);
    let proto = if at.node.is_ipv4() { 58 } else { 1 };
    let disguised = |error: Sent| {
        let bytes = error.carried();
        Sent { carries: Carries::Other { proto, bytes }, ..error }
    };
    let told = served.first.clone().to(served.endpoint);
    scene.leaves(&disguised(about(kinds(&at)[0], at.router, at.client, told, 8))).is_left_alone();
    let told = served.first.clone().reversed();
    let error = about(kinds(&at)[0], at.router, served.vip.ip(), told, 8);
    scene.enters(&disguised(error)).is_left_alone();
}

fn the_node_is_told_of_its_own_datagrams_as_they_are(scene: &mut Scene<'_>) {
    let at = scene.at;
    let own = addr(at.node, 30_053);
    Served::at(scene, Udp, own, addr(any(at.node), 30_053));
    let question = Sent::udp(own, addr(at.other_client, 53));
    scene.leaves(&question).is_left_alone();
    for kind in kinds(&at) {
        scene.enters(&about(kind, at.router, at.node, question.clone(), 8)).is_left_alone();
    }
}

fn errors_about_packets_with_options_or_extensions_are_translated(scene: &mut Scene<'_>) {
    let at = scene.at;
    let served = Served::new(scene, Tcp);
    served.begin(scene);
    let mut sent = served.next();
    if at.node.is_ipv4() {
        sent.options = Vec::from([1; 12]);
    } else {
        sent.extensions = Vec::from([Extension { kind: 0, length: 16 }, Extension { kind: 60, length: 8 }]);
    }
    let kind = kinds(&at)[0];
    let outer =
        |error: Sent| Sent { options: sent.options.clone(), extensions: sent.extensions.clone(), ..error };
    let translated = summed_as(sent.clone().to(served.endpoint), &sent);
    let error = outer(about(kind, at.router, at.client, translated, 64));
    scene.leaves(&error).becomes(&outer(about(kind, at.router, at.client, sent.clone(), 64)));
}

super::scenarios! {
    a_client_is_told_of_its_packet_as_it_sent_it,
    an_endpoint_is_told_of_its_answer_as_it_sent_it,
    an_error_about_an_answer_that_is_for_another_host_stays_for_that_one,
    errors_about_what_is_nobodys_are_left_alone,
    errors_that_hold_too_little_are_left_alone,
    errors_about_later_fragments_are_left_alone,
    messages_that_are_no_errors_are_left_alone,
    icmp_of_the_other_family_is_left_alone,
    the_node_is_told_of_its_own_datagrams_as_they_are,
    errors_about_packets_with_options_or_extensions_are_translated,
}
