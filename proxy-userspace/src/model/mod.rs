//! Resolves objects into this node's [`Snapshot`], without I/O and without a clock.
#![forbid(unsafe_code)]

mod endpoint_slice_cache;
mod events;
mod frontend_claims;
mod intern;
mod link_name;
mod local_detector;
mod lookup;
mod masquerade_addresses;
mod meanings;
mod name;
mod node_port_addresses;
mod node_view;
mod object_map;
mod objects;
mod pod_names;
mod pods;
mod resolve;
mod service_change_tracker;
mod service_port;
mod settings;
mod sloppy;
mod snapshot;
mod state;
#[cfg(test)]
pub mod testing;
#[cfg(test)]
mod tests;
mod topology;
mod tunnel;
mod unserved;
mod validated_text;

pub use events::*;
pub use frontend_claims::FrontendConflict;
pub(crate) use intern::{Interner, SharedValues};
pub use link_name::{InvalidLinkName, LinkName};
pub use lookup::{Conditions, Exclusion, KnownEndpoint, Owner};
pub use name::{InvalidName, Name};
pub use objects::*;
pub use pod_names::PodNames;
pub use pods::{KnownPod, PodPlace};
pub use resolve::HealthCheck;
pub use settings::*;
pub use sloppy::{parse_cidr_sloppy, parse_ip_sloppy};
pub use snapshot::*;
pub use state::{Applied, Model, TriggerTime};
pub use tunnel::{TunnelView, is_address_of_node, is_tunnel_address};
pub use unserved::UnservedReason;

pub use crate::net::{
    ChosenPath, Device, DirectScope, IpFamily, Link, LinkAddress, LinkHeader, LinkPath, MacAddress,
    NodeFacts, PortRange, Protocol, SocketScope, SourceAddress, Vlan, XdpFeatures, XdpMode,
};
