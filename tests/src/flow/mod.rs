//! Carries a flow out on the hosts of the world and judges what came of it.

#[cfg(test)]
mod tests;
mod verdict;

use std::{thread, time::Duration};

use anyhow::Result;

pub use self::verdict::{Seen, describe, judge};
use crate::{
    agent::protocol::{Dial, Get, Order, Protocol, Send},
    case::{self, Action, Expect, Flow},
    deadline::{Deadline, Stopwatch, patient, slowness},
    world::World,
};

/// TCP sends its first packet again after 1 s and then after 2 s more.
const ANSWER_WITHIN: Duration = Duration::from_secs(3);
/// Long enough for the answer to the first retransmission.
const REFUSED_WITHIN: Duration = Duration::from_millis(2500);
/// Silence this long, retransmission included, counts as blocked.
const BLOCKED_WITHIN: Duration = Duration::from_millis(1500);
/// An error on an open connection is prompt if it comes in this time; so is an answer.
const SEND_WITHIN: Duration = Duration::from_secs(1);
/// Between the attempts at a flow that did not hold at first.
const BETWEEN_REPEATS: Duration = Duration::from_millis(250);
/// How often a flow that did not hold at first has to hold, then.
const HOLDS_IN_A_ROW: usize = 3;
/// How fast large transfers are at least.
const BYTES_A_MICROSECOND: u64 = 5;
/// Between the sends of a flow with `tries`.
const BETWEEN_SENDS: Duration = Duration::from_millis(100);

/// How a flow ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It held.
    Held {
        /// How long after the first attempt's start, if that did not hold.
        late: Option<Duration>,
    },
    /// It did not.
    Failed {
        /// How what was seen differs from what was wanted.
        why: String,
        /// What was seen.
        seen: String,
    },
}

/// Carries out a flow. One that does not hold is repeated for up to `patience`, unless repeating it would change what
/// it shows. It must then hold several times in a row: one that depends on chance comes out right now and then.
pub fn run(world: &mut World, flow: &Flow, patience: Duration) -> Result<Verdict> {
    let (began, deadline) = (Stopwatch::start(), Deadline::after(patience));
    let mut failed = match attempt(world, flow)? {
        Ok(()) => return Ok(Verdict::Held { late: None }),
        Err(failed) => failed,
    };
    while is_repeatable(flow) && !deadline.passed() {
        thread::sleep(BETWEEN_REPEATS);
        let late = Some(began.elapsed());
        match attempts(world, flow, HOLDS_IN_A_ROW)? {
            Ok(()) => return Ok(Verdict::Held { late }),
            Err(again) => failed = again,
        }
    }
    Ok(failed)
}

/// Carries the flow out so many times. The inner error is the verdict of the first that fails.
fn attempts(world: &mut World, flow: &Flow, count: usize) -> Result<Result<(), Verdict>> {
    for _ in 0..count {
        if let Err(failed) = attempt(world, flow)? {
            return Ok(Err(failed));
        }
    }
    Ok(Ok(()))
}

fn attempt(world: &mut World, flow: &Flow) -> Result<Result<(), Verdict>> {
    let most_again = match &flow.expect {
        Expect::Reach(answers) => answers.retransmits,
        _ => None,
    };
    let before = most_again.map_or(Ok(0), |_| world.retransmitted())?;
    let seen = carry_out(world, flow)?;
    let mut judged = judge_action(flow, &seen);
    if let Some(most) = most_again {
        let again = world.retransmitted()?.saturating_sub(before);
        // Where everything is slow, queues run over and timers run out more often.
        let most = most.saturating_mul(slowness().into());
        judged = judged.and_then(|()| verdict::sent_again(again, most));
    }
    Ok(judged.map_err(|why| Verdict::Failed { why, seen: describe(&seen) }))
}

/// Open connections are used up by a try, and a distribution tried often enough comes out right by chance.
fn is_repeatable(flow: &Flow) -> bool {
    let by_chance =
        matches!(&flow.expect, Expect::Reach(answers) if answers.share.is_some() || answers.sticky);
    let uses_connection = match &flow.action {
        Action::Dial(dial) => dial.hold.is_some(),
        Action::Send(_) => true,
        Action::Get(_) => false,
    };
    !by_chance && !uses_connection
}

fn judge_action(flow: &Flow, seen: &Seen) -> Result<(), String> {
    if let (Action::Send(case::Send { or_error: true, .. }), Seen::Tries(tries)) = (&flow.action, seen)
        && tries.last().is_some_and(verdict::is_prompt_error)
    {
        return Ok(());
    }
    judge(flow.from, &flow.expect, seen)
}

fn carry_out(world: &mut World, flow: &Flow) -> Result<Seen> {
    match &flow.action {
        Action::Dial(dial) => {
            if !dial.sources.is_empty() {
                world.add_addresses(flow.from, &dial.sources)?;
            }
            Ok(Seen::Tries(world.agent(flow.from)?.dial(request(dial, &flow.expect))?))
        }
        Action::Send(send) => send_until_it_holds(world, flow, send),
        Action::Get(url) => {
            let get = Get { url: url.clone(), timeout: timeout(&flow.expect) };
            Ok(Seen::Page(world.agent(flow.from)?.get(get)?))
        }
    }
}

/// Sends up to so many times; what is seen is the last.
fn send_until_it_holds(world: &mut World, flow: &Flow, send: &case::Send) -> Result<Seen> {
    let agent = world.agent(flow.from)?;
    let timeout = patient(SEND_WITHIN) + time_for(send.size + send.answer);
    let request = Send { id: send.id.clone(), size: send.size, answer: send.answer, timeout };
    let mut seen = Seen::Tries(vec![agent.send(request.clone())?]);
    for _ in 1..send.tries {
        if judge_action(flow, &seen).is_ok() {
            break;
        }
        thread::sleep(BETWEEN_SENDS);
        seen = Seen::Tries(vec![agent.send(request.clone())?]);
    }
    Ok(seen)
}

fn request(dial: &case::Dial, expect: &Expect) -> Dial {
    let is_sticky = matches!(expect, Expect::Reach(answers) if answers.sticky);
    let answered = matches!(expect, Expect::Reach(_));
    // A fixed source port serves one try at a time, and only the first of sticky tries chooses.
    let one_by_one = is_sticky || dial.source_port.is_some() || !dial.pause.is_zero();
    let order = match (one_by_one, answered) {
        (false, _) => Order::AtOnce,
        // One failure decides a flow all of whose tries must be answered.
        (true, true) => Order::UntilFailure,
        (true, false) => Order::InSequence,
    };
    Dial {
        unconnected: dial.unconnected,
        size: dial.size,
        answer: dial.answer,
        source_port: dial.source_port,
        sources: dial.sources.clone(),
        pause: dial.pause,
        order,
        hold: dial.hold.clone(),
        send_again: dial.protocol == Protocol::Udp && !answered,
        timeout: timeout(expect) + time_for(dial.size + dial.answer),
        ..Dial::new(dial.to, dial.protocol, dial.n)
    }
}

fn timeout(expect: &Expect) -> Duration {
    match expect {
        Expect::Reach(_) | Expect::Page(_) => patient(ANSWER_WITHIN),
        Expect::Refused | Expect::Reset | Expect::TooBig => patient(REFUSED_WITHIN),
        Expect::Blocked | Expect::Silent => BLOCKED_WITHIN,
    }
}

/// What so many bytes may take on top, on a slow and busy machine.
fn time_for(bytes: usize) -> Duration {
    Duration::from_micros(bytes as u64 / BYTES_A_MICROSECOND)
}
