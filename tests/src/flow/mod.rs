//! Runs a flow on the hosts of the world and checks the result.

mod check;
mod retransmits;
#[cfg(test)]
mod tests;

use std::{thread, time::Duration};

use anyhow::Result;
use serde::Serialize;

pub use self::check::{Observation, check, describe};
use self::retransmits::Retransmits;
use crate::{
    agent::{
        Agent,
        protocol::{ConnectRequest, GetRequest, Order, Protocol, SendRequest},
    },
    case::{self, Action, Expectation, Flow},
    deadline::{Deadline, Stopwatch, scaled},
    world::World,
};

/// TCP retransmits its first segment after 1 s, and again 2 s later.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);
/// The same for a flow that cannot be repeated: a machine may stand still for some seconds. It is
/// too short for the third retransmission of TCP, after 15 s, so that a loss does not stay hidden.
const ONLY_ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Long enough for the answer to the first retransmission.
const REFUSED_TIMEOUT: Duration = Duration::from_millis(2500);
/// A connection without an answer for this time, retransmission included, counts as blocked.
const BLOCKED_TIMEOUT: Duration = Duration::from_millis(1500);
/// On an open connection, an answer or a prompt error arrives within this time, unless the machine
/// has much other load. A case that expects no answer waits for all of it, and one with `tries`
/// sends again.
const SEND_TIMEOUT: Duration = Duration::from_secs(1);
/// The pause between the runs of a flow that failed at first.
const REPEAT_INTERVAL: Duration = Duration::from_millis(250);
/// The number of consecutive runs in which a flow that failed at first must hold.
const HOLDS_IN_A_ROW: usize = 3;
/// The minimum rate of large transfers.
const MIN_BYTES_PER_MICROSECOND: u64 = 5;
/// The pause between the sends of a flow with `tries`.
const SEND_INTERVAL: Duration = Duration::from_millis(100);

/// The result of a flow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "result", rename_all = "lowercase")]
pub enum FlowResult {
    /// The expectation held.
    Held {
        /// If the first run failed, the time from its start until the flow held.
        late: Option<Duration>,
    },
    /// The expectation did not hold.
    Failed {
        /// How the observation differs from the expectation.
        why: String,
        /// What was observed.
        seen: String,
    },
}

/// Runs a flow. A flow that does not hold is repeated for up to `patience`, unless a repetition
/// would change what it tests. It must then hold several times in a row, because a flow that
/// depends on chance may hold by accident.
pub fn run(world: &mut World, flow: &Flow, patience: Duration) -> Result<FlowResult> {
    let began = Stopwatch::start();
    let mut failed = match run_once(world, flow)? {
        Ok(()) => return Ok(FlowResult::Held { late: None }),
        Err(failed) => failed,
    };
    // A run that took long because the machine stood still leaves time for others.
    let deadline = Deadline::after(patience);
    while is_repeatable(flow) && !deadline.passed() {
        thread::sleep(REPEAT_INTERVAL);
        let late = Some(began.elapsed());
        match run_repeatedly(world, flow, HOLDS_IN_A_ROW)? {
            Ok(()) => return Ok(FlowResult::Held { late }),
            Err(again) => failed = again,
        }
    }
    Ok(failed)
}

/// Runs the flow `count` times. The inner error is the result of the first run that fails.
fn run_repeatedly(world: &mut World, flow: &Flow, count: usize) -> Result<Result<(), FlowResult>> {
    for _ in 0..count {
        if let Err(failed) = run_once(world, flow)? {
            return Ok(Err(failed));
        }
    }
    Ok(Ok(()))
}

fn run_once(world: &mut World, flow: &Flow) -> Result<Result<(), FlowResult>> {
    let retransmits = Retransmits::of(world, flow)?;
    let observed = execute(world, flow)?;
    let mut checked = check_action(flow, &observed);
    if let Some(retransmits) = retransmits {
        checked = checked.and(retransmits.check(world)?);
    }
    Ok(checked.map_err(|why| FlowResult::Failed { why, seen: describe(&observed) }))
}

/// Returns true if a failed flow may run again. A use of an open connection cannot be repeated,
/// and an uneven distribution becomes even by chance if it is tried often enough.
fn is_repeatable(flow: &Flow) -> bool {
    let by_chance =
        matches!(&flow.expect, Expectation::Reach(answers) if answers.share.is_some() || answers.sticky);
    let uses_connection = match &flow.action {
        Action::Connect(connect) => connect.hold.is_some(),
        Action::Send(_) => true,
        Action::Get(_) => false,
    };
    !by_chance && !uses_connection
}

fn check_action(flow: &Flow, observed: &Observation) -> Result<(), String> {
    if let (Action::Send(case::Send { or_error: true, .. }), Observation::Attempts(attempts)) =
        (&flow.action, observed)
        && attempts.last().is_some_and(check::is_prompt_error)
    {
        return Ok(());
    }
    check(flow.from, &flow.expect, observed)
}

fn execute(world: &mut World, flow: &Flow) -> Result<Observation> {
    match &flow.action {
        Action::Connect(connect) => {
            if !connect.sources.is_empty() {
                world.add_addresses(flow.from, &connect.sources)?;
            }
            Ok(Observation::Attempts(world.agent(flow.from)?.connect(connect_request(connect, flow))?))
        }
        Action::Send(send) => send_until_expected(world, flow, send),
        Action::Get(url) => {
            let get = GetRequest { url: url.clone(), timeout: timeout(flow) };
            Ok(Observation::Page(world.agent(flow.from)?.get(get)?))
        }
    }
}

/// Sends until the expectation holds, at most `tries` times. Returns the last observation.
fn send_until_expected(world: &mut World, flow: &Flow, send: &case::Send) -> Result<Observation> {
    let agent = world.agent(flow.from)?;
    let least = match flow.expect {
        Expectation::Blocked | Expectation::Silent => SEND_TIMEOUT,
        _ if send.tries > 1 => SEND_TIMEOUT,
        _ => ONLY_ANSWER_TIMEOUT,
    };
    let timeout = scaled(least) + time_for(send.request.size + send.request.answer);
    let request = SendRequest { timeout, ..send.request.clone() };
    let mut observed = send_all(agent, &request, send)?;
    for _ in 1..send.tries {
        if check_action(flow, &observed).is_ok() {
            break;
        }
        thread::sleep(SEND_INTERVAL);
        observed = send_all(agent, &request, send)?;
    }
    Ok(observed)
}

fn send_all(agent: &mut Agent, request: &SendRequest, send: &case::Send) -> Result<Observation> {
    let mut attempts = vec![agent.send(request.clone())?];
    for _ in 1..send.sends {
        thread::sleep(send.pause);
        attempts.push(agent.send(request.clone())?);
    }
    Ok(Observation::Attempts(attempts))
}

/// Completes the request of a flow for its expectation.
fn connect_request(request: &ConnectRequest, flow: &Flow) -> ConnectRequest {
    let expect = &flow.expect;
    let is_sticky = matches!(expect, Expectation::Reach(answers) if answers.sticky);
    let expects_answer = matches!(expect, Expectation::Reach(_));
    // A fixed source port serves one attempt at a time, and only the first of several sticky
    // attempts chooses an endpoint.
    let is_sequential = is_sticky || request.source_port.is_some() || !request.pause.is_zero();
    let order = match (is_sequential, expects_answer) {
        (false, _) => Order::Concurrent,
        // If every attempt must be answered, one failure decides.
        (true, true) => Order::UntilFailure,
        (true, false) => Order::Sequential,
    };
    let retransmit = request.protocol == Protocol::Udp && !expects_answer;
    let timeout = timeout(flow) + time_for(request.size + request.answer);
    ConnectRequest { order, retransmit, timeout, ..request.clone() }
}

fn timeout(flow: &Flow) -> Duration {
    match flow.expect {
        Expectation::Blocked | Expectation::Silent => BLOCKED_TIMEOUT,
        _ if !is_repeatable(flow) => scaled(ONLY_ANSWER_TIMEOUT),
        Expectation::Reach(_) | Expectation::Page(_) => scaled(ANSWER_TIMEOUT),
        Expectation::Refused | Expectation::Reset | Expectation::TooBig => scaled(REFUSED_TIMEOUT),
    }
}

/// Returns the additional time that a transfer may take on a slow and busy machine.
fn time_for(bytes: usize) -> Duration {
    Duration::from_micros(bytes as u64 / MIN_BYTES_PER_MICROSECOND)
}
