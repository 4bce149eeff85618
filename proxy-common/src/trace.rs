//! What programs tell of single connections and packets, where that is asked for, and how it stands in a record.
//!
//! A record is a line of numbers and addresses: [`Codes`], and of a connection or packet the Service's identifier, the source with
//! its port, the VIP and its port, and the endpoint and its port if it goes to one.

use crate::{
    Protocol,
    layout::{Counter, Direction, Endpoint, Flow, FlowKey, Program},
};

/// A connection or packet for a Service, and what became of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceEvent<'a> {
    /// What became of it, as it is counted; [`Counter::FlowsBegun`]: it goes to an endpoint.
    pub what: Counter,
    /// Its IP protocol number.
    pub proto: u8,
    /// [`ServiceValue::service`](crate::layout::ServiceValue::service); 0 if that is not known.
    pub service: u32,
    /// Where it comes from; [`Endpoint::NONE`] of a socket, which may have no address yet.
    pub source: &'a Endpoint,
    /// The VIP.
    pub vip: &'a Endpoint,
    /// Where it goes; [`Endpoint::NONE`] if nowhere.
    pub endpoint: &'a Endpoint,
}

impl<'a> TraceEvent<'a> {
    /// What became of a packet on a link, of a client's or of an endpoint's answer: the same three are told of both.
    #[inline(always)]
    pub const fn of_flow(what: Counter, key: &'a FlowKey, flow: &'a Flow) -> Self {
        let (source, vip, endpoint) = if key.direction == Direction::Original as u8 {
            (&key.source, &key.destination, &flow.destination)
        } else {
            (&flow.destination, &flow.source, &key.source)
        };
        Self { what, proto: key.proto, service: flow.service, source, vip, endpoint }
    }

    /// What became of a socket's connection or datagram.
    #[inline(always)]
    pub const fn of_socket(
        what: Counter,
        proto: Protocol,
        service: u32,
        vip: &'a Endpoint,
        endpoint: &'a Endpoint,
    ) -> Self {
        Self { what, proto: proto as u8, service, source: &Endpoint::NONE, vip, endpoint }
    }
}

/// Who tells of what, in one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Codes(pub u32);

impl Codes {
    /// `what` is a [`Counter`], or, without more in the record, a [`ProgramError`](crate::layout::ProgramError); `proto` an IP
    /// protocol number.
    #[inline(always)]
    pub const fn new(program: Program, what: u32, proto: u8) -> Self {
        Self(program as u32 | what << 8 | (proto as u32) << 16)
    }

    /// The program's number.
    pub const fn program(self) -> u32 {
        self.0 & 0xff
    }

    /// The number of what it tells.
    pub const fn what(self) -> u32 {
        self.0 >> 8 & 0xff
    }

    /// The IP protocol number.
    pub const fn proto(self) -> u32 {
        self.0 >> 16
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Addr, layout::flow_state, packet::Tuple};

    #[test]
    fn of_both_directions_of_a_flow_the_client_what_it_dialled_and_the_endpoint_are_told() {
        let [client, vip, endpoint] = [(1, 41_022), (2, 30_080), (3, 8080)]
            .map(|(host, port)| Endpoint::new(Addr::from_v4([10, 0, 0, host]), port));
        for (direction, packet, translated) in [
            (Direction::Original, [client, vip], [client, endpoint]),
            (Direction::Reply, [endpoint, client], [vip, client]),
        ] {
            let tuple = Tuple { source: packet[0], destination: packet[1] };
            let flow = Flow {
                source: translated[0],
                destination: translated[1],
                service: 7,
                generation: 1,
                state: flow_state::REPLIED,
                list: 0,
                used_ns: 0,
            };
            let key = FlowKey::new(direction, Protocol::Tcp, tuple);
            let event = TraceEvent::of_flow(Counter::NotRewritten, &key, &flow);
            assert_eq!((event.service, event.proto), (7, 6));
            assert_eq!([event.source, event.vip, event.endpoint], [&client, &vip, &endpoint]);
        }
    }
}
