//! The records that programs write where tracing is on: trace events and captured packets.

use super::{Counter, Direction, Endpoint, Flow, FlowKey, Program};
use crate::Protocol;

map_type! {
    /// A record of `trace_events`: what a program did with a connection or packet to a Service.
    TraceEvent, 88 {
        /// The monotonic time in nanoseconds.
        time_ns: u64,
        /// The interface index of the link for a packet, and the cookie of the network namespace
        /// for a socket.
        place: u64,
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
        zero: [u8; 5],
    }
}

impl TraceEvent {
    /// Returns the event of a packet of either direction of a flow, on the link with this index.
    #[inline(always)]
    pub const fn of_flow(
        (program, verdict): (Program, Counter),
        time_ns: u64,
        link: u32,
        key: &FlowKey,
        flow: &Flow,
    ) -> Self {
        let (source, vip, endpoint) = if key.direction == Direction::Original as u8 {
            (key.source, key.destination, flow.destination)
        } else {
            (flow.destination, flow.source, key.source)
        };
        Self {
            time_ns,
            place: link as u64,
            source,
            vip,
            endpoint,
            service: flow.service,
            program: program as u8,
            verdict: verdict as u8,
            proto: key.proto,
            zero: [0; 5],
        }
    }

    /// Returns the event of a connection or datagram of a socket in the network namespace with this
    /// cookie.
    #[inline(always)]
    pub const fn of_socket(
        (program, verdict): (Program, Counter),
        time_ns: u64,
        (netns, protocol): (u64, Protocol),
        service: u32,
        [vip, endpoint]: [&Endpoint; 2],
    ) -> Self {
        Self {
            time_ns,
            place: netns,
            source: Endpoint::NONE,
            vip: *vip,
            endpoint: *endpoint,
            service,
            program: program as u8,
            verdict: verdict as u8,
            proto: protocol.number(),
            zero: [0; 5],
        }
    }
}

/// The bytes of a packet that are kept from before the translation. Translation changes only
/// headers, which are shorter: the longest are those of an ICMP error with the headers of its
/// packet.
pub const HEADERS_LENGTH: usize = 256;

/// The bytes of a packet that are captured at most.
pub const CAPTURE_LENGTH: usize = 2048;

map_type! {
    /// The value of `captured_headers`, a per-CPU array with one entry: the packet of which a
    /// program decides at the moment.
    CapturedHeaders, 520 {
        /// The first bytes of the packet as it came to the program.
        before: [u64; HEADERS_LENGTH / 8],
        /// The same after the program.
        after: [u64; HEADERS_LENGTH / 8],
        /// How many bytes are in `before`.
        length: u32,
        /// Zero.
        zero: u32,
    }
}

map_type! {
    /// A record of `captured_packets`: a packet on a link before and after the program.
    CapturedPacket, 2336 {
        /// The monotonic time in nanoseconds.
        time_ns: u64,
        /// The interface index of the link.
        link: u32,
        /// The bytes of the packet.
        length: u32,
        /// How many bytes are in `before`.
        before_length: u32,
        /// How many bytes are in `after`.
        after_length: u32,
        /// [`captured`].
        happened: u32,
        /// [`Program`].
        program: u32,
        /// The first bytes before the program.
        before: [u64; HEADERS_LENGTH / 8],
        /// The first bytes after the program.
        after: [u8; CAPTURE_LENGTH],
    }
}

named_enum! {
    /// A record for which there was no room in its ring buffer. The number is the key in
    /// `lost_records`.
    LostRecord {
        /// A [`TraceEvent`].
        Event = 0, "event";
        /// A [`CapturedPacket`].
        Packet = 1, "packet";
    }
}

/// What happened to a captured packet.
pub mod captured {
    /// The program changed it.
    pub const CHANGED: u32 = 1;
    /// It is refused: netfilter rejects it, or the program made it the answer.
    pub const REFUSED: u32 = 2;
    /// The program dropped it.
    pub const DROPPED: u32 = 4;
    /// It left on another link at once.
    pub const REDIRECTED: u32 = 8;
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
            let what = (Program::InEth, Counter::NotRewritten);
            let event = TraceEvent::of_flow(what, 5, 3, &key, &flow);
            assert_eq!((event.service, event.proto, event.time_ns, event.place), (7, 6, 5, 3));
            assert_eq!([event.source, event.vip, event.endpoint], [client, vip, endpoint]);
        }
    }
}
