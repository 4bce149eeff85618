//! Load: connections and conversations that an agent keeps going while something else happens.

use std::cell::{Cell, RefCell};

use futures::future::join_all;
use tokio::time::sleep;

use super::{
    connection::{self, Connection, MessageSizes},
    protocol::{Answer, ConnectRequest, Failure, FailureKind, LoadReport, LoadRequest, Protocol},
};
use crate::deadline::Stopwatch;

/// The number of unanswered datagrams of one agent that are described. All are counted.
const MAX_DESCRIBED_DATAGRAMS: usize = 10;
/// The number of other failures that are described.
const MAX_DESCRIBED: usize = 60;

/// The load while it runs.
pub(super) struct Load {
    started: Stopwatch,
    is_stopped: Cell<bool>,
    report: RefCell<LoadReport>,
}

impl Load {
    pub(super) fn start() -> Self {
        Self { started: Stopwatch::start(), is_stopped: Cell::new(false), report: RefCell::default() }
    }

    /// Lets each connection end after its current exchange.
    pub(super) fn stop(&self) {
        self.is_stopped.set(true);
    }

    /// Makes the load until [`Self::stop`].
    pub(super) async fn run(&self, request: &LoadRequest) {
        let workers = request.streams.iter().flat_map(|stream| (0..stream.attempts).map(move |_| stream));
        join_all(workers.map(|stream| self.repeat(stream))).await;
    }

    pub(super) fn into_report(self) -> LoadReport {
        self.report.into_inner()
    }

    /// Makes one connection after the other.
    async fn repeat(&self, stream: &ConnectRequest) {
        while !self.is_stopped.get() {
            match connection::open_connection(stream).await {
                Ok(mut connection) => {
                    self.count(|report| match stream.protocol {
                        Protocol::Udp => report.conversations += 1,
                        Protocol::Tcp | Protocol::Sctp => report.connections += 1,
                    });
                    self.use_connection(&mut connection, stream).await;
                }
                Err(failure) => self.fail(stream, &failure, "opening"),
            }
            sleep(stream.pause).await;
        }
    }

    /// Uses a connection until it fails, was used often enough, or the load stops.
    async fn use_connection(&self, connection: &mut Connection, stream: &ConnectRequest) {
        let sizes = MessageSizes::of_connect(stream);
        let mut first: Option<Answer> = None;
        for used in 0..=stream.repeats {
            if used > 0 {
                sleep(stream.repeat_interval).await;
            }
            // A connection is used at least once.
            if used > 0 && self.is_stopped.get() {
                return;
            }
            match connection.exchange(sizes, stream.timeout).await {
                Ok(answer) => {
                    self.count(|report| report.exchanges += 1);
                    let first = first.get_or_insert_with(|| answer.clone());
                    if let Some(what) = self.inconsistency(first, &answer) {
                        let next = match connection.exchange(sizes, stream.timeout).await {
                            Ok(Answer { host, client, .. }) => format!("{host} saw {client}"),
                            Err(failure) => failure.to_string(),
                        };
                        return self.add_failure(stream, &format!("exchange {used}: {what}, then {next}"));
                    }
                }
                Err(failure) if is_unanswered_datagram(stream, &failure) => {
                    let from = from_port(connection);
                    let what = self.describe(stream, &format!("exchange {used}{from} is not answered"));
                    self.count(|report| {
                        report.unanswered += 1;
                        if report.unanswered <= MAX_DESCRIBED_DATAGRAMS {
                            report.unanswered_datagrams.push(what);
                        }
                    });
                }
                Err(failure) => {
                    let during = format!("exchange {used}{}", from_port(connection));
                    return self.fail(stream, &failure, &during);
                }
            }
        }
        if first.is_none() {
            self.count(|report| report.lost += 1);
            let from = from_port(connection);
            self.add_failure(stream, &format!("no datagram of the conversation{from} was answered"));
        }
    }

    /// Counts and describes an answer that does not belong to the conversation. `None` if it does.
    fn inconsistency(&self, first: &Answer, now: &Answer) -> Option<String> {
        if now.peer != now.destination {
            self.count(|report| report.wrong_peer += 1);
            return Some(format!("the peer is {}", now.peer));
        }
        if now != first {
            self.count(|report| report.moved += 1);
            let Answer { host, client, .. } = first;
            return Some(format!("{host} saw {client}, then {} saw {}", now.host, now.client));
        }
        None
    }

    fn fail(&self, stream: &ConnectRequest, failure: &Failure, during: &str) {
        self.count(|report| match failure.kind {
            FailureKind::Refused => report.refused += 1,
            _ if stream.repeats == usize::MAX => report.broken += 1,
            _ => report.lost += 1,
        });
        self.add_failure(stream, &format!("{during}: {failure}"));
    }

    fn count(&self, change: impl FnOnce(&mut LoadReport)) {
        change(&mut self.report.borrow_mut());
    }

    fn add_failure(&self, stream: &ConnectRequest, what: &str) {
        let what = self.describe(stream, what);
        self.count(|report| {
            if report.failures.len() < MAX_DESCRIBED {
                report.failures.push(what);
            }
        });
    }

    fn describe(&self, stream: &ConnectRequest, what: &str) -> String {
        let at = self.started.elapsed().as_secs_f32();
        format!("{at:.2} s: {} to {}: {what}", stream.protocol, stream.to)
    }
}

/// Returns the local port of a connection for a description.
fn from_port(connection: &Connection) -> String {
    connection.local_port().map_or_else(String::new, |port| format!(" from port {port}"))
}

/// Returns true if a datagram or its answer was lost. The conversation goes on.
fn is_unanswered_datagram(stream: &ConnectRequest, failure: &Failure) -> bool {
    stream.protocol == Protocol::Udp && failure.kind == FailureKind::TimedOut
}
