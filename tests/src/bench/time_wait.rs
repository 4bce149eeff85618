//! Measures short connections to endpoints that keep closed connections in `TIME_WAIT`, as servers
//! do. A proxy that masquerades with the port of such a connection loses the new one: the endpoint
//! answers for the old one, and the client tries again after a second.

use std::time::Duration;

use anyhow::{Context as _, Result};
use serde::Serialize;

use super::{
    Effort,
    outside::{self, Length},
    protocol::Workload,
    ratio::Ratio,
    way::Way,
};
use crate::{
    runner::Proxy,
    world::{Host, World},
};

/// A turn lasts as long as so many usual rounds, two seconds, so that a second without a connection
/// counts in it. There are as many fewer turns.
const USUAL_ROUNDS_IN_A_TURN: u64 = 40;
const USUAL_PAIRS_IN_A_PAIR: usize = 10;

/// The result for one way.
#[derive(Clone, Debug, Serialize)]
pub(super) struct TimeWaitResult {
    pub(super) way: Way,
    pub(super) length: Length,
    /// The seconds in which the client connected through the node.
    pub(super) seconds: f64,
    /// Connections a second, relative to the clean connection.
    pub(super) ratio: Option<Ratio>,
    /// SYNs that the client sent again, each after at least a second.
    pub(super) repeated_syns: u64,
    /// Connections in `TIME_WAIT` at the endpoint at the end.
    pub(super) in_time_wait: u64,
}

/// Measures one way. The world must be new: connections of another way would be in `TIME_WAIT` too.
pub(super) fn measure(
    world: &mut World,
    proxy: &mut Proxy,
    way: Way,
    effort: Effort,
) -> Result<Vec<TimeWaitResult>> {
    let rounds = effort.pairs.div_ceil(USUAL_PAIRS_IN_A_PAIR);
    let effort = Effort { pairs: rounds, round_ms: effort.round_ms * USUAL_ROUNDS_IN_A_TURN, ..effort };
    outside::set_up(world)?;
    outside::turn_on(world, way, proxy)?;
    let mut results = Vec::new();
    for length in Length::ALL {
        let before = repeated_syns(world)?;
        let ratio = outside::compare(world, way, length, Workload::ConnectRequestClose, effort)?;
        results.push(TimeWaitResult {
            way,
            length,
            seconds: (Duration::from_millis(effort.round_ms) * u32::try_from(rounds)?).as_secs_f64(),
            ratio,
            repeated_syns: repeated_syns(world)? - before,
            in_time_wait: in_time_wait(world, length)?,
        });
    }
    outside::turn_off(world, way, proxy)?;
    Ok(results)
}

/// Returns how many SYNs the client has sent again since it exists.
fn repeated_syns(world: &World) -> Result<u64> {
    let counters = world.run(Host::Client, "nstat -asz TcpExtTCPSynRetrans | tail -n 1")?;
    let count = counters.split_whitespace().nth(1).with_context(|| format!("no count: {counters}"))?;
    count.parse().with_context(|| format!("not a count: {count}"))
}

/// Returns the number of connections that wait at the endpoint.
fn in_time_wait(world: &World, length: Length) -> Result<u64> {
    let pod = match length {
        Length::ThisNode => Host::A2,
        Length::OtherNode => Host::B1,
    };
    let count = world.run(pod, "grep -oP '^TCP:.* tw \\K[0-9]+' /proc/net/sockstat")?;
    count.trim().parse().with_context(|| format!("not a count: {count}"))
}
