//! What the benchmark asks of the agents, and what they answer.

use std::{net::SocketAddr, time::Duration};

use serde::{Deserialize, Serialize};

/// What an agent is to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum BenchRequest {
    /// Answer on these ports, from threads on the benchmark's CPU; [`BenchResponse::Done`].
    Serve(Vec<(Workload, u16)>),
    /// Put load on targets in turn, from the benchmark's CPU; [`BenchResponse::Rates`] or [`BenchResponse::NotServed`].
    Compare(Comparison),
    /// Run the proxy's own loop in the agent and time changes; [`BenchResponse::Changes`].
    Changes(ChangeRequest),
    /// Be an API server with a cluster of so many Services; [`BenchResponse::Api`].
    ServeApi(usize),
}

/// What one operation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
pub enum Workload {
    /// TCP: connect, one byte there and one back, closed by the server first and then by the client.
    ConnectRequestClose,
    /// TCP: one byte there and one back, on a connection that stays.
    RequestResponse,
    /// UDP: one byte there and one back with sendto and recvfrom, on a socket that stays and is not connected.
    UdpRequestResponse,
}

/// Targets to compare. In each round every target has its turn, in an order that moves on from round to round.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Comparison {
    /// The operation.
    pub workload: Workload,
    /// The addresses of each target, which connections use by chance, and those that stay in turn.
    pub targets: Vec<Vec<SocketAddr>>,
    /// How many rounds.
    pub rounds: usize,
    /// How long a target's turn lasts.
    pub turn: Duration,
}

/// ChangeRequest to time.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ChangeRequest {
    /// The proxy's flags: its manifests are the objects.
    pub arguments: Vec<String>,
    /// How many changes of each kind.
    pub changes: usize,
}

/// What an agent answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum BenchResponse {
    /// It is so.
    Done,
    /// Operations a second, by round and target.
    Rates(Vec<Vec<f64>>),
    /// A target does not answer: which one, and why.
    NotServed {
        /// Its place in [`Comparison::targets`].
        target: usize,
        /// What the operation met.
        why: String,
    },
    /// How long changes took.
    Changes(ChangeTimings),
    /// The API server's URL.
    Api(String),
    /// It could not be done.
    Failed(String),
}

/// Samples by what was changed.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ChangeTimings {
    /// Everything: the first sync.
    pub first: Sample,
    /// One endpoint of a Service was replaced by another.
    pub endpoint: Vec<Sample>,
    /// A Service got an endpoint more, or lost it again.
    pub scaled: Vec<Sample>,
    /// The port of a Service changed.
    pub service: Vec<Sample>,
}

/// One change, from the decoded event to the changed kernel.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Sample {
    /// Time.
    pub took: Duration,
    /// CPU time of the thread that does all of it, in the program and in the kernel, and of the commands it ran.
    pub cpu: Duration,
    /// ChangeRequest to the kernel: in the eBPF mode map updates or removals, each by one bpf(2); in the nftables mode elements, chains and
    /// rules, all in one transaction if they are few.
    pub operations: usize,
}

impl Workload {
    /// All, in the order of the report.
    pub const ALL: [Self; 3] = [Self::ConnectRequestClose, Self::RequestResponse, Self::UdpRequestResponse];

    /// The name in the report.
    pub fn name(self) -> &'static str {
        match self {
            Self::ConnectRequestClose => "connect-request-close",
            Self::RequestResponse => "request-response",
            Self::UdpRequestResponse => "UDP request-response",
        }
    }
}
