//! What holds for any frame at all.

use std::{
    net::{IpAddr, SocketAddr},
    vec::Vec,
};

use proptest::prelude::*;

use super::{
    Bed as _, Given, Hook, Memory, Noted, Places, Sent, checksums_are_right,
    generate::{self, Step},
};
use crate::{
    layout::{Direction, Endpoint, Flow, FlowKey, NodeValue, flow_state},
    link::Outcome,
    packet::TcpFlags,
};

const MARKS: u32 = NodeValue::MASQUERADE_MARK | NodeValue::REJECT_MARK;

proptest! {
    #[test]
    fn frames_are_left_alone_where_there_are_no_services(
        hook in generate::hook(),
        given in prop::sample::select(&Places::BOTH[..]).prop_flat_map(generate::given),
    ) {
        let ran = Memory::default().run(hook, &given).expect("memory takes everything");
        prop_assert_eq!(ran.outcome, Outcome::Proceed);
        prop_assert_eq!(&ran.bytes, &given.bytes);
        let is_ip = super::Bytes::new(&given).ip().is_some();
        let left = if hook == Hook::Egress && is_ip { given.mark & !MARKS } else { given.mark };
        prop_assert_eq!(ran.mark, left);
    }

    #[test]
    fn right_checksums_stay_right_and_nothing_else_changes(
        (world, steps) in generate::case(),
    ) {
        let mut memory = Memory { world, ..Memory::default() };
        for step in steps {
            match step {
                Step::Pass(hook, given) => passes(&mut memory, hook, &given)?,
                Step::Wait(seconds) => {
                    let noted = memory.noted().aged(seconds).expect("the clock began days ago");
                    memory.set_noted(&noted);
                }
                Step::Configure(world) => memory.world = world,
            }
        }
    }

    #[test]
    fn an_answer_to_a_translated_packet_is_one_to_the_packet_as_it_was(
        (sent, world) in prop::sample::select(&Places::BOTH[..])
            .prop_flat_map(|at| (generate::transport(at), generate::world(at))),
        others in prop::collection::vec(any::<prop::sample::Index>(), 0..3),
    ) {
        let mut memory = Memory { world, ..Memory::default() };
        // Another flow of the same client, so that ports run into each other.
        for other in others {
            let keys: Vec<_> = memory.world.services.keys().copied().collect();
            if let Some(key) = keys.get(other.index(keys.len().max(1))) {
                let to = SocketAddr::new(key.addr.into(), key.port);
                if !to.ip().is_unspecified() {
                    memory.run(Hook::Ingress, &Given::new(sent.clone().to(to).bytes()));
                }
            }
        }
        let ran = memory.run(Hook::Ingress, &Given::new(sent.bytes())).expect("memory takes everything");
        let is_translated = ran.outcome == Outcome::Proceed && ran.bytes != ran.given.bytes;
        if !is_translated {
            return Ok(());
        }
        let (key, flow) = flow_of(&memory.noted(), &sent);
        prop_assert_eq!(flow.state & flow_state::PASS, 0);
        let translated = Sent { checksum: None, ..sent.clone() }
            .from(socket(flow.source))
            .to(socket(flow.destination));
        let unsummed = Sent { checksum: sent.checksum, ..translated.clone() };
        ran.becomes(&unsummed);
        let answer = translated.reversed().flags(TcpFlags::ACK_ALONE);
        let back = memory.run(Hook::Egress, &Given::new(answer.bytes())).expect("memory takes everything");
        let wanted = Sent { checksum: None, ..sent }.reversed().flags(TcpFlags::ACK_ALONE);
        back.becomes(&wanted);
        prop_assert!(key.direction == Direction::Original as u8);
    }
}

fn passes(memory: &mut Memory, hook: Hook, given: &Given) -> Result<(), TestCaseError> {
    let were_right = checksums_are_right(&given.bytes) == Some(true);
    let ran = memory.run(hook, given).expect("memory takes everything");
    prop_assert_eq!(ran.bytes.len(), given.bytes.len());
    if were_right && ran.outcome == Outcome::Proceed {
        prop_assert_eq!(checksums_are_right(&ran.bytes), Some(true), "{:?}", ran);
    }
    Ok(())
}

fn socket(Endpoint { addr, port, .. }: Endpoint) -> SocketAddr {
    (IpAddr::from(addr), port).into()
}

fn flow_of(noted: &Noted, sent: &Sent) -> (FlowKey, Flow) {
    let is_of = |key: &FlowKey| {
        key.direction == Direction::Original as u8
            && key.proto == sent.proto()
            && (key.source, key.destination) == (super::scene::at(sent.from), super::scene::at(sent.to))
    };
    noted
        .flows
        .iter()
        .find(|(key, _)| is_of(key))
        .map(|(key, flow)| (*key, *flow))
        .expect("translated, so noted")
}
