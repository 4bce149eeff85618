//! Headers and frames that are not plain: options, extensions, tags, segments, checksums, and frames cut short.

use std::{net::IpAddr, vec::Vec};

use super::{PROTOS, Served, addr};
use crate::{
    Protocol::{Tcp, Udp},
    testing::{Carries, Extension, Given, Hook, Scene, Sent, Sum},
};

/// Client and endpoint speak through headers that are made something else first.
#[track_caller]
fn speak(scene: &mut Scene<'_>, change: impl Fn(Sent) -> Sent) {
    for proto in PROTOS {
        let served = Served::new(scene, proto);
        let (first, answer) = (change(served.first.clone()), change(served.answer()));
        scene.enters(&first).becomes(&first.clone().to(served.endpoint));
        scene.leaves(&answer).becomes(&answer.clone().from(served.vip));
    }
}

/// The same, but nobody knows them any more.
#[track_caller]
fn speak_in_vain(scene: &mut Scene<'_>, change: impl Fn(Sent) -> Sent) {
    for proto in PROTOS {
        let served = Served::new(scene, proto);
        scene.enters(&change(served.first.clone())).is_left_alone();
        scene.enters(&served.first);
        scene.leaves(&change(served.answer())).is_left_alone();
        scene.enters(&change(served.first)).is_left_alone();
    }
}

fn options_and_extensions_are_stepped_over(scene: &mut Scene<'_>) {
    if scene.at.node.is_ipv4() {
        for length in [4, 20, 40] {
            speak(scene, |sent| Sent { options: [1].repeat(length), ..sent });
        }
        return;
    }
    let [hop_by_hop, destination, routing, authentication] =
        [(0, 8), (60, 248), (43, 24), (51, 24)].map(|(kind, length)| Extension { kind, length });
    for extensions in [
        Vec::from([hop_by_hop]),
        Vec::from([destination]),
        Vec::from([routing]),
        Vec::from([authentication]),
        Vec::from([hop_by_hop, destination, routing, authentication, destination, destination]),
    ] {
        speak(scene, |sent| Sent { extensions: extensions.clone(), ..sent });
    }
}

fn too_many_extensions_are_nobodys(scene: &mut Scene<'_>) {
    if scene.at.node.is_ipv6() {
        let extensions = [Extension { kind: 60, length: 8 }].repeat(7);
        speak_in_vain(scene, |sent| Sent { extensions: extensions.clone(), ..sent });
    }
}

fn a_fragment_that_is_all_of_its_datagram_is_a_packet(scene: &mut Scene<'_>) {
    speak(scene, |sent| sent.part(12, 0..usize::MAX));
    if scene.at.node.is_ipv6() {
        let extensions = [Extension { kind: 0, length: 8 }, Extension { kind: 60, length: 16 }];
        speak(scene, |sent| Sent { extensions: extensions.to_vec(), ..sent }.part(12, 0..usize::MAX));
    }
}

fn tags_in_the_frame_are_stepped_over(scene: &mut Scene<'_>) {
    for tags in [Vec::from([0x8100]), Vec::from([0x88a8]), Vec::from([0x88a8, 0x8100])] {
        speak(scene, |sent| Sent { tags: tags.clone(), ..sent });
    }
    speak_in_vain(scene, |sent| Sent { tags: Vec::from([0x88a8, 0x88a8, 0x8100]), ..sent });
    speak_in_vain(scene, |sent| Sent { tags: Vec::from([0x8847]), ..sent });
}

fn frames_for_another_host_are_left_alone(scene: &mut Scene<'_>) {
    for proto in PROTOS {
        let served = Served::new(scene, proto);
        for to_mac in [[2, 0, 0, 0, 0, 9], [0xff; 6], [1, 0, 0x5e, 0, 0, 1]] {
            scene.enters(&Sent { to_mac, ..served.first.clone() }).is_left_alone();
        }
        assert_eq!(scene.flows(), 0);
        scene.remove(&served.service);
    }
    let served = Served::new(scene, Udp);
    served.begin(scene);
    let answer = Sent { to_mac: [2, 0, 0, 0, 0, 9], ..served.answer() };
    scene.leaves(&answer).becomes(&answer.clone().from(served.vip));
}

fn ipv6_packets_with_mapped_addresses_are_nobodys(scene: &mut Scene<'_>) {
    let mapped = |address: std::net::SocketAddr| match address.ip() {
        IpAddr::V4(v4) => addr(v4.to_ipv6_mapped().into(), address.port()),
        IpAddr::V6(_) => address,
    };
    if scene.at.node.is_ipv4() {
        speak_in_vain(scene, |sent| {
            let (from, to) = (mapped(sent.from), mapped(sent.to));
            sent.from(from).to(to)
        });
    }
}

fn a_datagram_without_a_checksum_gets_none(scene: &mut Scene<'_>) {
    let none = |sent: Sent| Sent { checksum: Some([0, 0]), ..sent };
    let served = Served::new(scene, Udp);
    scene.enters(&none(served.first.clone())).becomes(&none(served.first.clone().to(served.endpoint)));
    scene.leaves(&none(served.answer())).becomes(&none(served.answer().from(served.vip)));
    // Whoever has a sum of the whole packet is told of the change.
    let given = Given { sum: Sum::Complete, ..Given::new(none(served.first.clone()).bytes()) };
    if let Some(ran) = scene.passes(Hook::Ingress, &given) {
        ran.becomes(&none(served.first.clone().to(served.endpoint)));
    }
}

fn a_checksum_that_comes_out_as_zero_is_written_as_all_ones(scene: &mut Scene<'_>) {
    let served = Served::new(scene, Udp);
    let tries = (1024..=u16::MAX).map(|port| served.first.clone().from(addr(scene.at.client, port)));
    let ones = tries
        .map(|sent| (sent.clone(), sent.to(served.endpoint)))
        .find(|(_, translated)| translated.carried()[6..8] == [0xff; 2]);
    let (sent, translated) = ones.expect("one in 65536 has it");
    scene.enters(&sent).becomes(&translated);
}

fn sums_that_hardware_took_stay_right(scene: &mut Scene<'_>) {
    let completed = |sent: &Sent| Given { sum: Sum::Complete, ..Given::new(sent.bytes()) };
    for proto in PROTOS {
        let served = Served::new(scene, proto);
        let translated = served.first.clone().to(served.endpoint);
        let answered = served.answer().from(served.vip);
        let (kind, router) = (if scene.at.node.is_ipv4() { [3, 4] } else { [2, 0] }, scene.at.router);
        let told = |sent: &Sent| Sent { checksum: Some([1, 2]), ..sent.clone() };
        let inward = |sent: &Sent, to| Sent::error(kind, router, to, told(sent));
        let mut long = served.first.clone();
        long.carries = match long.carries {
            Carries::Tcp { flags, .. } => Carries::Tcp { flags, data: [7; 100].to_vec() },
            _ => Carries::Udp { data: [7; 100].to_vec() },
        };
        let [start, rest] = [0..48, 48..usize::MAX].map(|range| long.clone().part(1, range));
        for (hook, sent, wanted) in [
            (Hook::Ingress, served.first.clone(), translated.clone()),
            (Hook::Egress, served.answer(), answered.clone()),
            (Hook::Ingress, start.clone(), start.to(served.endpoint)),
            (Hook::Ingress, rest.clone(), rest.to(served.endpoint)),
            (
                Hook::Ingress,
                inward(&answered, served.vip.ip()),
                inward(&served.answer(), served.endpoint.ip()),
            ),
            (Hook::Egress, inward(&translated, scene.at.client), inward(&served.first, scene.at.client)),
        ] {
            let Some(ran) = scene.passes(hook, &completed(&sent)) else { return };
            ran.becomes(&wanted);
        }
    }
}

fn sums_that_hardware_is_to_take_are_prepared(scene: &mut Scene<'_>) {
    for proto in PROTOS {
        let served = Served::new(scene, proto);
        let (first, answer) = (partial(&served.first), partial(&served.answer()));
        let translated = partial(&served.first.clone().to(served.endpoint));
        let answered = partial(&served.answer().from(served.vip));
        for (hook, sent, wanted) in [(Hook::Ingress, first, translated), (Hook::Egress, answer, answered)] {
            let given = Given { sum: Sum::Partial, ..Given::new(sent.bytes()) };
            let Some(ran) = scene.passes(hook, &given) else { return };
            ran.becomes(&wanted);
        }
    }
}

/// The packet as it is before hardware takes its checksum: with that of the pseudo header, not inverted.
fn partial(sent: &Sent) -> Sent {
    let carried = sent.carried();
    let octets = |ip: IpAddr| match ip {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    };
    let length = u32::try_from(carried.len()).expect("short").to_be_bytes();
    let proto = [0, sent.proto()];
    let header = [&octets(sent.from.ip())[..], &octets(sent.to.ip()), &length, &proto].concat();
    let sum: u32 = header.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    let [.., high, low] = ((folded & 0xffff) + (folded >> 16)).to_be_bytes();
    Sent { checksum: Some([high, low]), ..sent.clone() }
}

fn packets_that_will_be_cut_into_segments_are_translated(scene: &mut Scene<'_>) {
    let served = Served::new(scene, Tcp);
    let mut syn = served.first.clone();
    if let Carries::Tcp { data, .. } = &mut syn.carries {
        *data = [9].repeat(2_500);
    }
    let given = Given { segments: Some((1_000, 3)), ..Given::new(syn.bytes()) };
    let ran = scene.passes(Hook::Ingress, &given).expect("can be given");
    ran.becomes(&syn.to(served.endpoint));
}

fn frames_that_are_cut_short_are_never_half_changed(scene: &mut Scene<'_>) {
    for proto in PROTOS {
        let served = Served::new(scene, proto);
        served.begin(scene);
        let told = served.first.clone().to(served.endpoint);
        let kind = if scene.at.node.is_ipv4() { [3, 4] } else { [2, 0] };
        let error = Sent::error(kind, scene.at.router, scene.at.client, told);
        for (hook, sent) in [
            (Hook::Ingress, served.first.clone()),
            (Hook::Ingress, served.next()),
            (Hook::Egress, served.answer()),
            (Hook::Ingress, Sent { tags: Vec::from([0x8100]), ..served.next() }),
            (Hook::Egress, error),
        ] {
            let bytes = sent.bytes();
            for length in 15..bytes.len() {
                let Some(ran) = scene.passes(hook, &Given::new(bytes[..length].to_vec())) else { continue };
                // Unless all that the headers hold is there, and only what they carry is cut off.
                let is_whole = ran.bytes == ran.given.bytes || {
                    let again = scene.passes(hook, &Given::new(bytes.clone())).expect("can be given");
                    again.bytes[..length] == ran.bytes
                };
                assert!(is_whole, "{ran:?}");
            }
        }
        scene.remove(&served.service);
    }
}

fn frames_of_other_protocols_are_left_alone(scene: &mut Scene<'_>) {
    let served = Served::new(scene, Tcp);
    let arp = [&[0; 12][..], &[0x08, 0x06], &[0; 28]].concat();
    for hook in [Hook::Ingress, Hook::Egress] {
        scene.passes(hook, &Given::new(arp.clone())).expect("can be given").is_left_alone();
        for proto in [47, 50, 132, 255, 2] {
            let bytes = served.first.carried();
            let sent = Sent { carries: Carries::Other { proto, bytes }, ..served.first.clone() };
            scene.passes(hook, &Given::new(sent.bytes())).expect("can be given").is_left_alone();
        }
    }
}

super::scenarios! {
    options_and_extensions_are_stepped_over,
    too_many_extensions_are_nobodys,
    a_fragment_that_is_all_of_its_datagram_is_a_packet,
    tags_in_the_frame_are_stepped_over,
    frames_for_another_host_are_left_alone,
    ipv6_packets_with_mapped_addresses_are_nobodys,
    a_datagram_without_a_checksum_gets_none,
    a_checksum_that_comes_out_as_zero_is_written_as_all_ones,
    sums_that_hardware_took_stay_right,
    sums_that_hardware_is_to_take_are_prepared,
    packets_that_will_be_cut_into_segments_are_translated,
    frames_that_are_cut_short_are_never_half_changed,
    frames_of_other_protocols_are_left_alone,
}
