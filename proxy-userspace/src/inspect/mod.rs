//! What `shunt get` and `shunt explain` show: the daemon answers on a local socket, and the command
//! prints the answer.
//!
//! The socket is an abstract one (unix(7)) with a fixed name. Its names belong to a network
//! namespace, as nodes do: the command finds the daemon of its node, also from a container, and two
//! nodes in containers do not meet. Only processes with the user ID 0, or that of the daemon, get
//! an answer.
#![forbid(unsafe_code)]

mod affinity;
mod arguments;
mod browse;
mod client;
mod connections;
mod drift;
mod explain_arguments;
mod explained;
mod flows;
mod gather;
mod kernel_rows;
mod load;
mod namespaces;
mod output;
mod pods;
mod rows;
mod server;
mod unserved;
mod without_daemon;

pub use self::{
    affinity::AffinityFilter,
    arguments::{GetArguments, Verb, output_argument},
    browse::{FoundServices, MOST_ENDPOINTS, NodeDetails, ROWS_A_PAGE, Search, ServiceDetails},
    client::{Client, ClientError, Lines},
    explain_arguments::{ExplainArguments, OfflineNode},
    explained::NotExplained,
    flows::FlowFilter,
    gather::{Filter, counts_of_unused, counts_protocol},
    kernel_rows::{AffinityRow, ConnectionRow, DriftRow, FlowRow},
    load::{CountedPort, EndpointFlows, ServiceName},
    output::{InvalidOutput, Output, print, print_one, table},
    pods::PodFinder,
    rows::{Counts, EndpointRow, ExemptRow, LeftOutRow, LinkRow, NamedPort, Row, ServiceRow},
    server::{NodeInspector, routes},
    unserved::ServiceFinder,
    without_daemon::read_without_daemon,
};

/// The name of the socket.
pub const SOCKET: &[u8] = b"shunt/inspect";

/// The version of the answers. It changes with every field that goes or means something else; a
/// field that comes does not change it.
pub const API_VERSION: &str = "shunt.dev/v1alpha1";

/// What `shunt get` lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Resource {
    /// Service ports.
    #[value(alias = "service", alias = "svc")]
    Services,
    /// Endpoints of service ports, used or not.
    #[value(alias = "endpoint", alias = "ep")]
    Endpoints,
    /// Flows that are translated on links.
    #[value(alias = "flow")]
    Flows,
    /// Connections that were translated at their sockets.
    #[value(alias = "connection")]
    Connections,
    /// Clients with affinity.
    Affinity,
    /// Links on which packets are translated.
    #[value(alias = "link")]
    Links,
    /// Pods whose sockets are left alone.
    Exempt,
    /// Service ports that are left out.
    LeftOut,
    /// What the kernel holds otherwise than it was written.
    Drift,
}

impl Resource {
    /// All resources.
    const ALL: [Self; 9] = [
        Self::Services,
        Self::Endpoints,
        Self::Flows,
        Self::Connections,
        Self::Affinity,
        Self::Links,
        Self::Exempt,
        Self::LeftOut,
        Self::Drift,
    ];

    /// Returns true if a list can be of one Service or namespace.
    pub(super) const fn has_services(self) -> bool {
        !matches!(self, Self::Links | Self::Exempt)
    }

    /// Returns true if the items have clients and endpoints.
    pub(super) const fn has_clients(self) -> bool {
        matches!(self, Self::Flows | Self::Connections | Self::Affinity)
    }

    fn of_path(path: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|resource| resource.path() == path)
    }

    /// Returns the last segment of the path on the socket.
    pub const fn path(self) -> &'static str {
        match self {
            Self::Services => "services",
            Self::Endpoints => "endpoints",
            Self::Flows => "flows",
            Self::Connections => "connections",
            Self::Affinity => "affinity",
            Self::Links => "links",
            Self::Exempt => "exempt",
            Self::LeftOut => "left-out",
            Self::Drift => "drift",
        }
    }

    /// Returns the kind of a list in JSON and YAML.
    pub const fn kind(self) -> &'static str {
        match self {
            Self::Services => "ServicePortList",
            Self::Endpoints => "EndpointList",
            Self::Flows => "FlowList",
            Self::Connections => "ConnectionList",
            Self::Affinity => "AffinityList",
            Self::Links => "LinkList",
            Self::Exempt => "ExemptNamespaceList",
            Self::LeftOut => "LeftOutServicePortList",
            Self::Drift => "DifferenceList",
        }
    }
}
