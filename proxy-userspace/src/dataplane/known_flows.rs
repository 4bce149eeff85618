//! Lists the flows that this node translates: those of the link programs, and those of conntrack.

use std::{net::SocketAddr, path::Path, time::Duration};

use proxy_common::layout::{Direction, Flow, FlowKey, flow_state as bits};

use crate::{
    kernel::{
        KernelError, bpf, clock,
        conntrack::{self, Connection},
    },
    net::{IpFamily, Protocol},
};

/// A flow from a client to an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KnownFlow {
    /// The protocol.
    pub protocol: Protocol,
    /// The client.
    pub client: SocketAddr,
    /// Where the client sends to.
    pub destination: SocketAddr,
    /// The endpoint.
    pub endpoint: SocketAddr,
    /// The state of the flow.
    pub state: FlowStage,
    /// What translates it.
    pub by: Translator,
    /// How long it is kept without packets. `None` if it does not expire.
    pub expires_after: Option<Duration>,
    /// How long no packet passed, exact to about a second. `None` for flows of netfilter.
    pub idle: Option<Duration>,
    /// How long it exists. `None` for flows of programs, and unless conntrack has timestamps
    /// (`net.netfilter.nf_conntrack_timestamp`).
    pub age: Option<Duration>,
}

/// The state of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlowStage {
    /// The endpoint has not answered yet.
    Unanswered,
    /// It goes on.
    Established,
    /// One side closed it.
    Closing,
    /// Both sides closed it, or it was reset.
    Closed,
}

impl FlowStage {
    /// Returns the name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Unanswered => "unanswered",
            Self::Established => "established",
            Self::Closing => "closing",
            Self::Closed => "closed",
        }
    }

    fn of_programs(flow: &Flow) -> Self {
        if flow.is_closed() {
            Self::Closed
        } else if flow.state & (bits::CLIENT_CLOSED | bits::ENDPOINT_CLOSED) != 0 {
            Self::Closing
        } else if flow.state & bits::REPLIED == 0 {
            Self::Unanswered
        } else {
            Self::Established
        }
    }
}

/// What translates a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Translator {
    /// The programs on links.
    Programs,
    /// Netfilter or IPVS.
    Netfilter,
}

/// The maps of flows.
const MAPS: [&str; 2] = ["flows", "unassured_flows"];

/// Calls `each` for the flows of the programs whose maps are pinned in this directory, if there are
/// any, and for those that conntrack translates. Flows that come or end meanwhile may be missing or
/// present.
///
/// A connection that was translated at its socket is no flow: its packets carry the endpoint.
pub fn for_each_flow(pins: Option<&Path>, each: &mut dyn FnMut(KnownFlow)) -> Result<(), KernelError> {
    if let Some(pins) = pins {
        let now_ns = clock::nanos(clock::monotonic()?);
        for map in MAPS {
            let mut reader = bpf::pinned_reader::<FlowKey, Flow>(pins, map)?;
            let visit = |key, flow| of_programs(&key, &flow, now_ns).into_iter().for_each(&mut *each);
            reader.read_all(visit).map_err(KernelError::call("read map", map))?;
        }
    }
    let now = clock::since_1970()?;
    for family in IpFamily::ALL {
        for protocol in Protocol::ALL {
            let visit =
                &mut |connection: &Connection| of_conntrack(connection, now).into_iter().for_each(&mut *each);
            conntrack::for_each_connection(family, protocol, visit)?;
        }
    }
    Ok(())
}

/// Returns the flow of an entry of the original direction that the programs translate.
fn of_programs(key: &FlowKey, flow: &Flow, now_ns: u64) -> Option<KnownFlow> {
    let is_original = key.direction() == Some(Direction::Original);
    let protocol = key.protocol().filter(|_| is_original && flow.state & bits::PASS == 0)?;
    let silent = Duration::from_nanos(now_ns.saturating_sub(flow.used_ns));
    let left = flow.lifetime(protocol).checked_sub(silent)?;
    Some(KnownFlow {
        protocol,
        client: key.source.into(),
        destination: key.destination.into(),
        endpoint: flow.destination.into(),
        state: FlowStage::of_programs(flow),
        by: Translator::Programs,
        expires_after: Some(left),
        idle: Some(silent),
        age: None,
    })
}

/// Returns the flow of an entry whose destination conntrack or IPVS translates.
fn of_conntrack(connection: &Connection, now: Duration) -> Option<KnownFlow> {
    let conntrack::TrackedConnection { protocol, original, reply, .. } = connection.tracked;
    if reply.source == original.destination {
        return None;
    }
    let state = match (connection.is_half_open(), connection.is_ending()) {
        (true, _) => FlowStage::Unanswered,
        (_, true) => FlowStage::Closing,
        _ if !connection.is_answered() => FlowStage::Unanswered,
        _ => FlowStage::Established,
    };
    Some(KnownFlow {
        protocol,
        client: original.source,
        destination: original.destination,
        endpoint: reply.source,
        state,
        by: Translator::Netfilter,
        expires_after: connection.expires_after(),
        idle: None,
        age: connection.age(now),
    })
}

#[cfg(test)]
mod tests {
    use proxy_common::layout::Endpoint;

    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn entry(direction: Direction, state: u32, used_ns: u64) -> (FlowKey, Flow) {
        let endpoint = |text: &str| Endpoint::from(text.parse::<SocketAddr>().expect("an address"));
        let [client, vip, pod] = ["192.0.2.1:1000", "10.0.0.1:80", "10.1.0.1:8080"].map(endpoint);
        let tuple = proxy_common::packet::Tuple { source: client, destination: vip };
        let flow = Flow { source: client, destination: pod, state, used_ns, ..Flow::NONE };
        (FlowKey::new(direction, Protocol::Tcp, tuple), flow)
    }

    #[test]
    fn an_entry_of_the_original_direction_is_a_flow() {
        let (key, flow) = entry(Direction::Original, bits::REPLIED | bits::ASSURED, SECOND);
        let known = of_programs(&key, &flow, 11 * SECOND).expect("a flow");
        assert_eq!(known.endpoint, "10.1.0.1:8080".parse().expect("an address"));
        assert_eq!((known.state, known.by), (FlowStage::Established, Translator::Programs));
        assert_eq!(known.expires_after, Some(Duration::from_secs(86_400 - 10)));
    }

    #[test]
    fn other_entries_are_not() {
        for (direction, state, now) in [
            (Direction::Reply, bits::REPLIED, 2),
            (Direction::MasqueradeReply, bits::REPLIED, 2),
            (Direction::Original, bits::REPLIED | bits::PASS, 2),
            (Direction::Original, 0, 1000),
        ] {
            let (key, flow) = entry(direction, state, SECOND);
            assert_eq!(of_programs(&key, &flow, now * SECOND), None, "{direction:?} {state}");
        }
    }

    #[test]
    fn the_stage_is_told_by_the_segments_that_passed() {
        for (state, stage) in [
            (0, FlowStage::Unanswered),
            (bits::REPLIED, FlowStage::Established),
            (bits::REPLIED | bits::CLIENT_CLOSED, FlowStage::Closing),
            (bits::REPLIED | bits::CLIENT_CLOSED | bits::ENDPOINT_CLOSED, FlowStage::Closed),
            (bits::REPLIED | bits::RESET, FlowStage::Closed),
        ] {
            assert_eq!(FlowStage::of_programs(&entry(Direction::Original, state, SECOND).1), stage);
        }
    }
}
