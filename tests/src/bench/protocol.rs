//! The requests of the benchmark to the agents, and their responses.

use std::{net::SocketAddr, time::Duration};

use proxy_userspace::kernel::bpf::live_frames::Datagrams;
use serde::{Deserialize, Serialize};

/// A request to an agent.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum BenchRequest {
    /// Serve these ports, from threads on the benchmark's CPU; [`BenchResponse::Done`].
    Serve(Vec<(Workload, u16)>),
    /// Put load on targets in turn, from the benchmark's CPU; [`BenchResponse::Rates`] or
    /// [`BenchResponse::NotServed`].
    Compare(Comparison),
    /// Run the proxy's own sync loop in the agent and time changes; [`BenchResponse::Changes`].
    Changes(ChangeRequest),
    /// Let packets come in on the host's link, made by the kernel; [`BenchResponse::Sent`].
    Packets(PacketBurst),
}

/// Bursts of datagrams, each from the next client.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct PacketBurst {
    /// What they are.
    pub datagrams: Datagrams,
    /// The packets of a burst.
    pub packets: u32,
    /// The number of bursts.
    pub bursts: u32,
    /// The pause after each.
    pub pause: Duration,
    /// What gets them.
    pub receiver: FrameReceiver,
}

/// What gets the frames that the kernel makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FrameReceiver {
    /// The stack.
    Stack,
    /// The proxy's XDP program, as if the driver of the link ran it.
    Proxy,
    /// The same with an XDP program that translates by constants.
    Floor,
    /// The link on which they come in.
    Link,
}

/// The kind of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
pub enum Workload {
    /// TCP: connect, send one byte, receive one byte. The server closes first, then the client.
    ConnectRequestClose,
    /// TCP: send one byte and receive one byte, on a long-lived connection.
    RequestResponse,
    /// UDP: send one byte and receive one byte with sendto and recvfrom, on a long-lived
    /// unconnected socket.
    UdpRequestResponse,
    /// TCP: send 4 MiB and receive one byte, on a long-lived connection.
    Bulk,
}

/// Targets to compare. In each round every target has its turn, in an order that rotates from round
/// to round.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Comparison {
    /// The operation.
    pub workload: Workload,
    /// The addresses of each target. Connections use them at random, long-lived connections in
    /// turn.
    pub targets: Vec<Vec<SocketAddr>>,
    /// The number of rounds.
    pub rounds: usize,
    /// The duration of a target's turn.
    pub turn: Duration,
}

/// Changes to time.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ChangeRequest {
    /// The flags of the proxy. Its manifests are the objects.
    pub arguments: Vec<String>,
    /// The number of changes of each kind.
    pub changes: usize,
}

/// A response of an agent.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum BenchResponse {
    /// The request was executed.
    Done,
    /// Operations a second, by round and target.
    Rates(Vec<Vec<f64>>),
    /// A target does not answer.
    NotServed {
        /// Its index in [`Comparison::targets`].
        target: usize,
        /// The error of the operation.
        why: String,
    },
    /// The durations of changes, by kind.
    Changes(Vec<ChangeTimings>),
    /// Packets were sent.
    Sent {
        /// How many left the host in a second.
        per_second: f64,
        /// The share of the packets that left it.
        share: f64,
    },
    /// The request failed.
    Failed(String),
}

/// The kind of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ChangeKind {
    /// An endpoint of a Service is replaced by another one.
    Endpoint,
    /// A Service gets an additional endpoint, or loses it again.
    Scaled,
    /// The port of a Service changes.
    Service,
    /// An endpoint of the large Service is replaced by another one.
    LargeEndpoint,
    /// The large Service gets an additional endpoint, or loses it again.
    LargeScaled,
    /// The first sync, of everything.
    Everything,
}

/// The samples of a kind of change.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ChangeTimings {
    /// The kind.
    pub changed: ChangeKind,
    /// One sample for each change.
    pub samples: Vec<Sample>,
}

/// One change, from the decoded event to the changed kernel.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Sample {
    /// The elapsed time.
    pub took: Duration,
    /// The CPU time of the thread that does all the work, in user space and in the kernel, and of
    /// the commands that it ran.
    pub cpu: Duration,
    /// The number of kernel changes. In the ebpf mode, map updates and removals, each with one
    /// bpf(2) call. In the nftables mode, elements, chains and rules, all in one transaction if
    /// they are few.
    pub operations: usize,
}

impl ChangeKind {
    /// Changes of a Service with four endpoints.
    pub const OF_ORDINARY: [Self; 3] = [Self::Endpoint, Self::Scaled, Self::Service];
    /// Changes of the large Service.
    pub const OF_LARGE: [Self; 2] = [Self::LargeEndpoint, Self::LargeScaled];

    /// Returns true for a change of the large Service.
    pub fn is_of_large(self) -> bool {
        Self::OF_LARGE.contains(&self)
    }

    /// Returns the name for the report.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Endpoint => "one endpoint",
            Self::Scaled => "one endpoint more or less",
            Self::Service => "one Service",
            Self::LargeEndpoint => "one endpoint of 5,000",
            Self::LargeScaled => "one endpoint more or less of 5,000",
            Self::Everything => "first full sync",
        }
    }
}

impl Workload {
    /// All workloads, in the order of the report.
    pub const ALL: [Self; 4] =
        [Self::ConnectRequestClose, Self::RequestResponse, Self::UdpRequestResponse, Self::Bulk];

    /// Returns the name for the report.
    pub fn name(self) -> &'static str {
        match self {
            Self::ConnectRequestClose => "connect-request-close",
            Self::RequestResponse => "request-response",
            Self::UdpRequestResponse => "UDP request-response",
            Self::Bulk => "bulk",
        }
    }

    /// Returns the protocol as Kubernetes names it.
    pub(super) fn protocol(self) -> &'static str {
        if self == Self::UdpRequestResponse { "UDP" } else { "TCP" }
    }
}
