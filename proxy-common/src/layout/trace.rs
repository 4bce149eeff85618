//! The trace events that programs write where tracing is on.

use super::{Counter, Direction, Endpoint, Flow, FlowKey, Program};
use crate::Protocol;

map_type! {
    /// A record of `trace_events`: what a program did with a connection or packet to a Service.
    TraceEvent, 68 {
        /// Where it comes from. [`Endpoint::NONE`] for a socket, which may have no address yet.
        source: Endpoint,
        /// The VIP.
        vip: Endpoint,
        /// The endpoint, or [`Endpoint::NONE`] if none was chosen.
        endpoint: Endpoint,
        /// [`super::ServiceValue::service`], or 0 if it is unknown.
        service: u32,
        /// [`Program`].
        program: u8,
        /// [`Counter`]. [`Counter::FlowsBegun`] means that it goes to the endpoint.
        verdict: u8,
        /// IP protocol number.
        proto: u8,
        /// Zero.
        zero: u8,
    }
}

impl TraceEvent {
    /// Returns the event of a packet of either direction of a flow.
    #[inline(always)]
    pub const fn of_flow(program: Program, verdict: Counter, key: &FlowKey, flow: &Flow) -> Self {
        let (source, vip, endpoint) = if key.direction == Direction::Original as u8 {
            (key.source, key.destination, flow.destination)
        } else {
            (flow.destination, flow.source, key.source)
        };
        Self {
            source,
            vip,
            endpoint,
            service: flow.service,
            program: program as u8,
            verdict: verdict as u8,
            proto: key.proto,
            zero: 0,
        }
    }

    /// Returns the event of a connection or datagram of a socket.
    #[inline(always)]
    pub const fn of_socket(
        (program, verdict): (Program, Counter),
        protocol: Protocol,
        service: u32,
        vip: &Endpoint,
        endpoint: &Endpoint,
    ) -> Self {
        Self {
            source: Endpoint::NONE,
            vip: *vip,
            endpoint: *endpoint,
            service,
            program: program as u8,
            verdict: verdict as u8,
            proto: protocol.number(),
            zero: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Addr, packet::Tuple};

    #[test]
    fn events_of_both_directions_name_client_vip_and_endpoint() {
        let [client, vip, endpoint] = [(1, 41_022), (2, 30_080), (3, 8080)]
            .map(|(host, port)| Endpoint::new(Addr::from_v4([10, 0, 0, host]), port));
        for (direction, packet, translated) in [
            (Direction::Original, [client, vip], [client, endpoint]),
            (Direction::Reply, [endpoint, client], [vip, client]),
        ] {
            let tuple = Tuple { source: packet[0], destination: packet[1] };
            let flow = Flow { source: translated[0], destination: translated[1], service: 7, ..Flow::NONE };
            let key = FlowKey::new(direction, Protocol::Tcp, tuple);
            let event = TraceEvent::of_flow(Program::InEth, Counter::NotRewritten, &key, &flow);
            assert_eq!((event.service, event.proto), (7, 6));
            assert_eq!([event.source, event.vip, event.endpoint], [client, vip, endpoint]);
        }
    }
}
