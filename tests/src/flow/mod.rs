//! Carries a flow out on the hosts of the world and judges what came of it.

#[cfg(test)]
mod tests;
mod verdict;

use std::time::Duration;

use anyhow::Result;

pub use self::verdict::{Seen, describe, judge};
use crate::{
    agent::protocol::{Dial, Get, Protocol, Send},
    case::{self, Action, Expect, Flow},
    deadline::{Deadline, Stopwatch},
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
/// it shows.
pub fn run(world: &mut World, flow: &Flow, patience: Duration) -> Result<Verdict> {
    let (began, deadline) = (Stopwatch::start(), Deadline::after(patience));
    let mut late = None;
    loop {
        let seen = carry_out(world, flow)?;
        match judge_action(flow, &seen) {
            Ok(()) => return Ok(Verdict::Held { late }),
            Err(why) if deadline.passed() || !is_repeatable(flow) => {
                return Ok(Verdict::Failed {
                    why,
                    seen: describe(&seen),
                });
            }
            Err(_) => {}
        }
        Deadline::pause();
        late = Some(began.elapsed());
    }
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
            Ok(Seen::Tries(
                world.agent(flow.from)?.dial(request(dial, &flow.expect))?,
            ))
        }
        Action::Send(send) => send_until_it_holds(world, flow, send),
        Action::Get(url) => {
            let get = Get {
                url: url.clone(),
                timeout: timeout(&flow.expect),
            };
            Ok(Seen::Page(world.agent(flow.from)?.get(get)?))
        }
    }
}

/// Sends up to so many times; what is seen is the last.
fn send_until_it_holds(world: &mut World, flow: &Flow, send: &case::Send) -> Result<Seen> {
    let agent = world.agent(flow.from)?;
    let request = Send {
        id: send.id.clone(),
        size: send.size,
        timeout: SEND_WITHIN,
    };
    let mut seen = Seen::Tries(vec![agent.send(request.clone())?]);
    for _ in 1..send.tries {
        if judge_action(flow, &seen).is_ok() {
            break;
        }
        std::thread::sleep(BETWEEN_SENDS);
        seen = Seen::Tries(vec![agent.send(request.clone())?]);
    }
    Ok(seen)
}

fn request(dial: &case::Dial, expect: &Expect) -> Dial {
    let is_sticky = matches!(expect, Expect::Reach(answers) if answers.sticky);
    let answered = matches!(expect, Expect::Reach(_));
    // Tries at once when nothing says which comes first; a fixed source port serves one at a time.
    let in_sequence = is_sticky || dial.source_port.is_some() || !dial.pause.is_zero();
    Dial {
        to: dial.to,
        protocol: dial.protocol,
        unconnected: dial.unconnected,
        tries: dial.n,
        size: dial.size,
        source_port: dial.source_port,
        sources: dial.sources.clone(),
        pause: dial.pause,
        in_sequence,
        end_at_failure: answered,
        hold: dial.hold.clone(),
        send_again: dial.protocol == Protocol::Udp && !answered,
        timeout: timeout(expect),
    }
}

fn timeout(expect: &Expect) -> Duration {
    match expect {
        Expect::Reach(_) | Expect::Page(_) => ANSWER_WITHIN,
        Expect::Refused => REFUSED_WITHIN,
        Expect::Blocked => BLOCKED_WITHIN,
    }
}
