//! The types that aya may copy to and from maps byte by byte.
#![expect(unsafe_code, reason = "aya::Pod is an unsafe trait")]

use crate::{
    Addr,
    layout::{
        AffinityKey, AffinityValue, CapturedPacket, Connection, DirectFlow, DirectFlowV4, DirectKey,
        DirectKeyV4, DirectWatch, DsrKey, Endpoint, EndpointKey, EndpointValue, Flow, FlowKey, FragmentKey,
        FragmentValue, HardwareAddress, KnownRoute, MaglevKey, MaglevPage, MasqueradeSubnet, MemberKey,
        NodeValue, ProgramErrors, ServiceCounts, ServiceKey, ServiceValue, SocketPeer, SourceRange,
        TraceEvent, UdpSocket, VlanKey, XdpLinkValue,
    },
};

macro_rules! pod {
    ($($type:ty),* $(,)?) => {
        $(
            // SAFETY: the type is repr(C) with integers and arrays of integers only. It has no
            // padding, because `layout` asserts that its size is the sum of the sizes of its
            // fields. Every bit pattern is a value.
            unsafe impl aya::Pod for $type {}
        )*
    };
}

pod!(
    Addr,
    AffinityKey,
    AffinityValue,
    HardwareAddress,
    CapturedPacket,
    Connection,
    DirectFlow,
    DirectFlowV4,
    DirectKey,
    DirectKeyV4,
    DirectWatch,
    DsrKey,
    Endpoint,
    EndpointKey,
    EndpointValue,
    Flow,
    FlowKey,
    FragmentKey,
    FragmentValue,
    KnownRoute,
    MaglevKey,
    MaglevPage,
    MemberKey,
    NodeValue,
    ProgramErrors,
    ServiceCounts,
    ServiceKey,
    ServiceValue,
    SocketPeer,
    SourceRange,
    XdpLinkValue,
    MasqueradeSubnet,
    TraceEvent,
    UdpSocket,
    VlanKey,
);
