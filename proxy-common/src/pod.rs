//! Tells aya which types may be copied to and from maps byte by byte.
#![expect(unsafe_code, reason = "aya::Pod is an unsafe trait")]

use crate::{
    Addr,
    layout::{
        AffinityKey, AffinityValue, BridgeAddress, Connection, Endpoint, EndpointKey, Flow, FlowKey,
        FragmentKey, FragmentValue, MemberKey, NodeValue, ProgramErrors, ServiceCounts, ServiceKey,
        ServiceValue, SocketPeer, SourceRange, TraceEvent, UdpSocket,
    },
};

macro_rules! pod {
    ($($type:ty),* $(,)?) => {
        $(
            // SAFETY: repr(C), made of integers and arrays of them only, and without padding: `layout` asserts that each
            // size is the sum of its fields' sizes. Every bit pattern is a value.
            unsafe impl aya::Pod for $type {}
        )*
    };
}

pod!(
    Addr,
    AffinityKey,
    AffinityValue,
    BridgeAddress,
    Connection,
    Endpoint,
    EndpointKey,
    Flow,
    FlowKey,
    FragmentKey,
    FragmentValue,
    MemberKey,
    NodeValue,
    ProgramErrors,
    ServiceCounts,
    ServiceKey,
    ServiceValue,
    SocketPeer,
    SourceRange,
    TraceEvent,
    UdpSocket,
);
