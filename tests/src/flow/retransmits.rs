//! The number of TCP segments that hosts may send again during a flow.

use anyhow::Result;

use crate::{
    case::{Action, Expectation, Flow},
    deadline::slowdown,
    world::World,
};

/// About the payload of a segment that fits into a frame, in bytes.
const SEGMENT: usize = 1400;
/// Where hosts segment for themselves, a transfer fills the queue of a veth link now and then, in
/// each mode. One of so many segments may then be sent again.
const ONE_OF: usize = 5;

/// The count before a flow, and how far it may rise.
pub(super) struct Retransmits {
    before: u64,
    max: u64,
}

impl Retransmits {
    /// Reads the count before a flow. Returns `None` if the flow has no limit.
    pub(super) fn of(world: &World, flow: &Flow) -> Result<Option<Self>> {
        let Expectation::Reach(answers) = &flow.expect else { return Ok(None) };
        let Some(max) = answers.retransmits else { return Ok(None) };
        let in_full_queues = if world.links_segment() { 0 } else { bytes(flow) / SEGMENT / ONE_OF };
        // On a slow machine, queues overflow and timers expire more often.
        let max = max.max(in_full_queues as u64).saturating_mul(slowdown().into());
        Ok(Some(Self { before: world.retransmits()?, max }))
    }

    /// Returns an inner error if more segments were sent again than the limit.
    pub(super) fn check(&self, world: &World) -> Result<Result<(), String>> {
        let segments = world.retransmits()?.saturating_sub(self.before);
        let text = || format!("{segments} segments were retransmitted, more than {}", self.max);
        Ok(if segments <= self.max { Ok(()) } else { Err(text()) })
    }
}

fn bytes(flow: &Flow) -> usize {
    match &flow.action {
        Action::Connect(connect) => connect.size + connect.answer,
        Action::Send(send) => send.request.size + send.request.answer,
        Action::Get(_) => 0,
    }
}
