//! One change to the kernel, as data.

use proxy_common::{
    Addr,
    layout::{BridgeAddress, Endpoint, EndpointKey, LocalDetection, MemberKey, ServiceKey, ServiceValue},
};

use super::{
    super::links::LinkHook,
    ranges::{Prefix, Range},
};
use crate::model::ServedLink;

/// One change to the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Serve node ports on an address.
    PutNodeAddress(Addr),
    /// Fill a slot.
    PutEndpoint(EndpointKey, Endpoint),
    /// Add an endpoint to a list's set.
    PutMember(MemberKey),
    /// Let a source range in.
    PutRange(Range),
    /// Switch a destination to what it shall lead to.
    PutService(ServiceKey, ServiceValue),
    /// Count sources in this range as local callers.
    PutLocalSource(Prefix),
    /// Count what comes in on the link of this index as local callers'.
    PutLocalLink(u32),
    /// Count packets that come in on the link of this index as the node's own if they are for this bridge.
    PutBridgePort(u32, BridgeAddress),
    /// Tell local callers from others in this way.
    SetLocalDetection(LocalDetection),
    /// Make the programs on sockets run.
    Attach,
    /// Put the netfilter rules that go with the programs on links where they belong.
    PutRules,
    /// Make a program run on a link.
    AttachLink(LinkHook, ServedLink),
    /// Take our program off a link.
    DetachLink(LinkHook),
    /// Stop serving a destination that belonged to this identifier.
    RemoveService(ServiceKey, u32),
    /// Empty a slot.
    RemoveEndpoint(EndpointKey),
    /// Take an endpoint out of a list's set.
    RemoveMember(MemberKey),
    /// No longer let a source range in.
    RemoveRange(Range),
    /// No longer serve node ports on an address.
    RemoveNodeAddress(Addr),
    /// No longer count sources in this range as local callers.
    RemoveLocalSource(Prefix),
    /// No longer count what comes in on the link of this index as local callers'.
    RemoveLocalLink(u32),
    /// The link of this index is no port of a bridge any more.
    RemoveBridgePort(u32),
    /// Destroy UDP sockets that are connected to endpoints which no longer serve.
    ReleaseSockets {
        /// The Service they connected to.
        service: u32,
        /// The endpoints.
        endpoints: Vec<Endpoint>,
    },
}

impl Step {
    /// The identifier of the service port it is for; none for the node's own.
    pub fn service(&self) -> Option<u32> {
        match self {
            Self::PutEndpoint(key, _) | Self::RemoveEndpoint(key) => Some(key.service),
            Self::PutMember(key) | Self::RemoveMember(key) => Some(key.service),
            Self::PutRange(range) | Self::RemoveRange(range) => Some(range.service),
            Self::PutService(_, value) => Some(value.service),
            Self::RemoveService(_, service) | Self::ReleaseSockets { service, .. } => Some(*service),
            Self::PutNodeAddress(_)
            | Self::RemoveNodeAddress(_)
            | Self::PutLocalSource(_)
            | Self::RemoveLocalSource(_)
            | Self::PutLocalLink(_)
            | Self::RemoveLocalLink(_)
            | Self::PutBridgePort(..)
            | Self::RemoveBridgePort(_)
            | Self::SetLocalDetection(_)
            | Self::Attach
            | Self::PutRules
            | Self::AttachLink(..)
            | Self::DetachLink(_) => None,
        }
    }

    /// The index of the link it is for; none for others.
    pub const fn link(&self) -> Option<u32> {
        match self {
            Self::AttachLink(at, _) | Self::DetachLink(at) => Some(at.index),
            _ => None,
        }
    }
}
