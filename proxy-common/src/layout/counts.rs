//! The counters of the programs, the counts of each service port, and the errors of programs.

named_enum! {
    /// The counters of the link programs. The number is the key in `counters`. They count packets
    /// unless the comment says otherwise.
    Counter {
        /// New flows on links.
        FlowsBegun = 0, "flow_begun";
        /// Refused: the Service has no endpoints.
        Refused = 1, "refused";
        /// Dropped: the traffic policy is Local, and no endpoint is on this node.
        NoLocalEndpoint = 2, "no_local_endpoint";
        /// Dropped: the source is not in the source ranges of the Service.
        SourceNotAllowed = 3, "source_not_allowed";
        /// Dropped: the entries of the flow could not be written.
        FlowNotRecorded = 4, "flow_not_recorded";
        /// Refused: a TCP segment of an unknown connection.
        UnknownConnection = 5, "unknown_connection";
        /// Dropped: the packet could not be rewritten.
        NotRewritten = 6, "not_rewritten";
        /// Dropped: no address or no port was free to masquerade the flow, or the flow is unknown.
        NotMasqueraded = 7, "not_masqueraded";
        /// Ports that were not taken for a masqueraded flow, because a socket of the node has them.
        PortOfSocket = 8, "port_of_socket";
        /// Sent on another link, or on the same one, before the stack (XDP).
        SentBeforeStack = 9, "sent_before_stack";
        /// Sent through the tunnel to the endpoint's node.
        SentThroughTunnel = 10, "sent_through_tunnel";
        /// Answered with an ICMP error: too long for the tunnel.
        TooLongForTunnel = 11, "too_long_for_tunnel";
        /// Dropped: the packet came through the tunnel from no known node, or for no Service.
        TunnelRefused = 12, "tunnel_refused";
        /// Sent on to the client: a reply that came back through the tunnel.
        ReplyForwarded = 13, "reply_forwarded";
    }
}

map_type! {
    /// Value of `service_counts`: the counts of a service port on one CPU. The slots
    /// ([`service_slot`]) of a CPU are adjacent, so that two CPUs never write to the same cache
    /// line. Unlike a per-CPU array, a plain array needs no helper call for a lookup. Userspace
    /// reads it in batches from kernel 5.6 on, and a per-CPU array only from 5.13 on.
    ServiceCounts, 40 {
        /// TCP connections and UDP flows.
        connections: u64,
        /// Refused connections and datagrams. Each attempt counts.
        refusals: u64,
        /// Dropped connections and datagrams. Each attempt counts.
        drops: u64,
        /// Bytes of IP packets to endpoints that link programs translated.
        bytes_to_endpoints: u64,
        /// Bytes of IP packets of the replies.
        bytes_to_clients: u64,
    }
}

/// Returns the number of slots of a CPU for this number of service ports that are counted one by
/// one. It is a power of two, and slot 0 is for all other service ports. 0 counts nothing.
pub const fn service_slots(most: u32) -> u32 {
    if most == 0 { 0 } else { most.saturating_add(1).next_power_of_two() }
}

/// Returns the slot of a service identifier. Userspace assigns identifiers such that service ports
/// which are counted one by one have different slots, and all others slot 0.
#[inline(always)]
pub const fn service_slot(service: u32, slots: u32) -> u32 {
    service & slots.wrapping_sub(1)
}

/// An event of a connection or datagram to a service port that is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServiceEvent {
    /// A connection or flow begins.
    Connection,
    /// A connection or datagram is refused.
    Refusal,
    /// A connection or datagram is dropped.
    Drop,
    /// A packet with this number of bytes goes to an endpoint.
    ToEndpoint(u32),
    /// A packet with this number of bytes goes to the client.
    ToClient(u32),
}

impl ServiceEvent {
    /// Returns the event of a packet with this number of bytes.
    #[inline(always)]
    pub const fn of_packet(is_to_endpoint: bool, bytes: u32) -> Self {
        if is_to_endpoint { Self::ToEndpoint(bytes) } else { Self::ToClient(bytes) }
    }
}

impl ServiceCounts {
    /// All counts are zero.
    pub const NONE: Self =
        Self { connections: 0, refusals: 0, drops: 0, bytes_to_endpoints: 0, bytes_to_clients: 0 };

    /// Counts an event.
    #[inline(always)]
    pub const fn add(&mut self, tally: ServiceEvent) {
        match tally {
            ServiceEvent::Connection => self.connections += 1,
            ServiceEvent::Refusal => self.refusals += 1,
            ServiceEvent::Drop => self.drops += 1,
            ServiceEvent::ToEndpoint(bytes) => self.bytes_to_endpoints += bytes as u64,
            ServiceEvent::ToClient(bytes) => self.bytes_to_clients += bytes as u64,
        }
    }

    /// Adds the counts of another CPU.
    pub const fn merge(&mut self, other: &Self) {
        self.connections += other.connections;
        self.refusals += other.refusals;
        self.drops += other.drops;
        self.bytes_to_endpoints += other.bytes_to_endpoints;
        self.bytes_to_clients += other.bytes_to_clients;
    }
}

named_enum! {
    /// The programs. The number is the key in `program_errors`.
    Program {
        /// `connect` of an IPv4 socket.
        Connect4 = 0, "shunt_connect4";
        /// `connect` of an IPv6 socket.
        Connect6 = 1, "shunt_connect6";
        /// `sendmsg` of an IPv4 socket.
        Sendmsg4 = 2, "shunt_sendmsg4";
        /// `sendmsg` of an IPv6 socket.
        Sendmsg6 = 3, "shunt_sendmsg6";
        /// `recvmsg` of an IPv4 socket.
        Recvmsg4 = 4, "shunt_recvmsg4";
        /// `recvmsg` of an IPv6 socket.
        Recvmsg6 = 5, "shunt_recvmsg6";
        /// `getpeername` of an IPv4 socket.
        Getpeer4 = 6, "shunt_getpeer4";
        /// `getpeername` of an IPv6 socket.
        Getpeer6 = 7, "shunt_getpeer6";
        /// The release of a socket.
        Release = 8, "shunt_release";
        /// Ingress of a link with Ethernet headers.
        InEth = 9, "shunt_in_eth";
        /// Ingress of a link with bare IP packets.
        InIp = 10, "shunt_in_ip";
        /// Egress of a link with Ethernet headers.
        OutEth = 11, "shunt_out_eth";
        /// Egress of a link with bare IP packets.
        OutIp = 12, "shunt_out_ip";
        /// XDP of a link with Ethernet headers.
        Xdp = 13, "shunt_xdp";
        /// Ingress of the tunnel to other nodes.
        InTunnel = 14, "shunt_in_tunnel";
    }
}

impl Program {
    /// Returns the errors that the program can have.
    pub const fn errors(self) -> &'static [ProgramError] {
        use ProgramError as E;
        match self {
            Self::Connect4 | Self::Connect6 => {
                &[E::EndpointMissing, E::Affinity, E::UdpSockets, E::UdpConnections, E::TcpConnections]
            }
            Self::Sendmsg4 | Self::Sendmsg6 => &[E::EndpointMissing, E::Affinity, E::UdpFlows, E::UdpReplies],
            Self::InEth | Self::InIp | Self::InTunnel => {
                &[E::EndpointMissing, E::Affinity, E::Flows, E::Fragments, E::NotRewritten, E::Malformed]
            }
            Self::OutEth | Self::OutIp => &[E::Flows, E::Fragments, E::NotRewritten, E::Malformed],
            Self::Xdp => &[E::NotRewritten],
            Self::Recvmsg4 | Self::Recvmsg6 | Self::Getpeer4 | Self::Getpeer6 | Self::Release => &[],
        }
    }
}

named_enum! {
    /// An error of a program. The number is the index in [`ProgramErrors::counts`].
    ProgramError {
        /// The chosen slot was empty at each attempt.
        EndpointMissing = 0, "endpoint_missing";
        /// `affinity` could not be written.
        Affinity = 1, "affinity_not_written";
        /// `udp_flows` could not be written.
        UdpFlows = 2, "udp_flows_not_written";
        /// `udp_replies` could not be written.
        UdpReplies = 3, "udp_replies_not_written";
        /// `udp_sockets` could not be written.
        UdpSockets = 4, "udp_sockets_not_written";
        /// `udp_connections` could not be written.
        UdpConnections = 5, "udp_connections_not_written";
        /// `tcp_connections` could not be written.
        TcpConnections = 6, "tcp_connections_not_written";
        /// `flows` could not be written.
        Flows = 7, "flows_not_written";
        /// `fragments` could not be written.
        Fragments = 8, "fragments_not_written";
        /// A packet could not be rewritten.
        NotRewritten = 9, "packet_not_rewritten";
        /// The header of a TCP segment to a possible VIP is truncated, so that the segment passes
        /// unchanged.
        Malformed = 10, "packet_malformed";
    }
}

map_type! {
    /// Value of `program_errors`, a per-CPU array: the errors of a program.
    ProgramErrors, 88 {
        /// The counts, by [`ProgramError`].
        counts: [u64; ProgramError::COUNT],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counted_services_have_slots_and_others_share_slot_0() {
        assert_eq!([0, 1, 3, 4, 4000].map(service_slots), [0, 2, 4, 8, 4096]);
        assert_eq!([1, 7, 8, 9, 4096].map(|service| service_slot(service, 8)), [1, 7, 0, 1, 0]);
    }
}
