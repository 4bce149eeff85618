//! Properties that hold for every frame.

use std::{
    net::{IpAddr, SocketAddr},
    vec::Vec,
};

use proptest::prelude::*;

use super::{
    Addresses, FrameRunner as _, Hook, InputFrame, MemoryMaps, StateMaps, TestPacket,
    generate::{self, Step},
    has_correct_checksums,
};
use crate::{
    layout::{Direction, Endpoint, Flow, FlowKey, NodeValue, flow_state},
    link::Outcome,
    packet::TcpFlags,
};

const MARKS: u32 = NodeValue::MASQUERADE_MARK | NodeValue::REJECT_MARK;

proptest! {
    #[test]
    fn node_without_services_leaves_frames_alone(
        hook in generate::hook(),
        input in prop::sample::select(&Addresses::BOTH[..]).prop_flat_map(generate::input),
    ) {
        let result = MemoryMaps::default().run(hook, &input).expect("memory runs every frame");
        prop_assert_eq!(result.outcome, Outcome::Proceed);
        prop_assert_eq!(&result.bytes, &input.bytes);
        let is_ip = super::MemoryFrame::<false>::new(&input).ip().is_some();
        let left = if hook == Hook::Egress && is_ip { input.mark & !MARKS } else { input.mark };
        prop_assert_eq!(result.mark, left);
    }

    #[test]
    fn correct_checksums_stay_correct(
        (config, steps) in generate::case(),
    ) {
        let mut memory = MemoryMaps { config, ..MemoryMaps::default() };
        for step in steps {
            match step {
                Step::Pass(hook, input) => check_checksums(&mut memory, hook, &input)?,
                Step::Wait(seconds) => {
                    let state = memory.state().aged(seconds).expect("the clock began days ago");
                    memory.set_state(&state);
                }
                Step::Configure(config) => memory.config = *config,
            }
        }
    }

    #[test]
    fn reply_to_a_translated_packet_answers_the_original_packet(
        (packet, config) in prop::sample::select(&Addresses::BOTH[..])
            .prop_flat_map(|ip| (generate::transport(ip), generate::config(ip))),
        others in prop::collection::vec(any::<prop::sample::Index>(), 0..3),
    ) {
        let mut memory = MemoryMaps { config, ..MemoryMaps::default() };
        // Other flows of the same client, so that ports collide.
        for other in others {
            let keys: Vec<_> = memory.config.services.keys().copied().collect();
            if let Some(key) = keys.get(other.index(keys.len().max(1))) {
                let to = SocketAddr::new(key.addr.into(), key.port);
                if !to.ip().is_unspecified() {
                    memory.run(Hook::Ingress, &InputFrame::new(packet.clone().to(to).to_frame()));
                }
            }
        }
        let result = memory.run(Hook::Ingress, &InputFrame::new(packet.to_frame())).expect("memory runs every frame");
        let is_translated = result.outcome == Outcome::Proceed && result.bytes != result.input.bytes;
        if !is_translated {
            return Ok(());
        }
        let (key, flow) = flow_of(&memory.state(), &packet);
        prop_assert_eq!(flow.state & flow_state::PASS, 0);
        let translated = TestPacket { checksum: None, ..packet.clone() }
            .from(socket(flow.source))
            .to(socket(flow.destination));
        let unsummed = TestPacket { checksum: packet.checksum, ..translated.clone() };
        result.becomes(&unsummed);
        let reply = translated.reversed().flags(TcpFlags::ACK_ALONE);
        let back = memory.run(Hook::Egress, &InputFrame::new(reply.to_frame())).expect("memory runs every frame");
        let expected = TestPacket { checksum: None, ..packet }.reversed().flags(TcpFlags::ACK_ALONE);
        back.becomes(&expected);
        prop_assert!(key.direction == Direction::Original as u8);
    }
}

fn check_checksums(memory: &mut MemoryMaps, hook: Hook, input: &InputFrame) -> Result<(), TestCaseError> {
    let were_correct = has_correct_checksums(&input.bytes) == Some(true);
    let result = memory.run(hook, input).expect("memory runs every frame");
    let is_answer = result.outcome == Outcome::Redirect;
    prop_assert!(is_answer || result.bytes.len() == input.bytes.len());
    if were_correct && (is_answer || result.outcome == Outcome::Proceed) {
        prop_assert_eq!(has_correct_checksums(&result.bytes), Some(true), "{:?}", result);
    }
    Ok(())
}

fn socket(Endpoint { addr, port, .. }: Endpoint) -> SocketAddr {
    (IpAddr::from(addr), port).into()
}

fn flow_of(state: &StateMaps, packet: &TestPacket) -> (FlowKey, Flow) {
    let is_of = |key: &FlowKey| {
        key.direction == Direction::Original as u8
            && key.proto == packet.protocol()
            && (key.source, key.destination) == (packet.from.into(), packet.to.into())
    };
    state
        .all_flows()
        .find(|(key, _)| is_of(key))
        .map(|(key, flow)| (*key, *flow))
        .expect("a translated packet has a flow")
}
