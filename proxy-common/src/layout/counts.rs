//! What programs count of each Service port, and of what went wrong in themselves.

map_type! {
    /// Value of `service_counts`: what a CPU counted of a Service port. The entries of a CPU stand together, a slot each
    /// ([`service_slot`]), so that no two CPUs write to one line of cache: an array like this, unlike one that the kernel keeps a
    /// copy of for each CPU, is looked up without a call and read by userspace in large pieces (kernel 5.6; the other 5.13).
    ServiceCounts, 40 {
        /// TCP connections, and flows of UDP.
        connections: u64,
        /// Connections and datagrams that were refused, each try of them.
        refusals: u64,
        /// Connections and datagrams that were dropped, each try of them.
        drops: u64,
        /// Bytes of IP packets to endpoints that were translated on links.
        bytes_to_endpoints: u64,
        /// Bytes of their answers.
        bytes_to_clients: u64,
    }
}

/// How many slots a CPU has where so many Service ports are to have one of their own: a power of two, as slot 0 is that of all
/// others together. 0 counts nothing.
pub const fn service_slots(most: u32) -> u32 {
    if most == 0 { 0 } else { most.saturating_add(1).next_power_of_two() }
}

/// The slot of an identifier ([`super::ServiceValue::service`]) among so many: userspace gives identifiers such that Service ports
/// to be counted apart have slots apart, and all others slot 0.
#[inline(always)]
pub const fn service_slot(service: u32, slots: u32) -> u32 {
    service & slots.wrapping_sub(1)
}

/// What is counted of a connection or datagram to a Service port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServiceEvent {
    /// It begins.
    Connection,
    /// It is refused.
    Refusal,
    /// It is dropped.
    Drop,
    /// A packet of it goes to an endpoint, of so many bytes.
    ToEndpoint(u32),
    /// A packet of it goes to the client, of so many bytes.
    ToClient(u32),
}

impl ServiceCounts {
    /// Nothing.
    pub const NONE: Self =
        Self { connections: 0, refusals: 0, drops: 0, bytes_to_endpoints: 0, bytes_to_clients: 0 };

    /// Counts it.
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

    /// Adds what another CPU counted.
    pub const fn merge(&mut self, other: &Self) {
        self.connections += other.connections;
        self.refusals += other.refusals;
        self.drops += other.drops;
        self.bytes_to_endpoints += other.bytes_to_endpoints;
        self.bytes_to_clients += other.bytes_to_clients;
    }
}

/// The programs, by their numbers: keys of `program_errors`.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Program {
    /// An IPv4 socket connects.
    Connect4 = 0,
    /// An IPv6 socket connects.
    Connect6 = 1,
    /// An IPv4 socket sends to an address.
    Sendmsg4 = 2,
    /// An IPv6 socket does.
    Sendmsg6 = 3,
    /// An IPv4 socket receives.
    Recvmsg4 = 4,
    /// An IPv6 socket does.
    Recvmsg6 = 5,
    /// An IPv4 socket is asked for its peer.
    Getpeer4 = 6,
    /// An IPv6 socket is.
    Getpeer6 = 7,
    /// A socket is closed.
    Release = 8,
    /// A frame comes in on a link.
    InEth = 9,
    /// A bare IP packet does.
    InIp = 10,
    /// A frame leaves on a link.
    OutEth = 11,
    /// A bare IP packet does.
    OutIp = 12,
}

impl Program {
    /// Those that can meet errors, with their names in the kernel.
    pub const ALL: [(Self, &str); 8] = [
        (Self::Connect4, "shunt_connect4"),
        (Self::Connect6, "shunt_connect6"),
        (Self::Sendmsg4, "shunt_sendmsg4"),
        (Self::Sendmsg6, "shunt_sendmsg6"),
        (Self::InEth, "shunt_in_eth"),
        (Self::InIp, "shunt_in_ip"),
        (Self::OutEth, "shunt_out_eth"),
        (Self::OutIp, "shunt_out_ip"),
    ];
    /// The number of programs.
    pub const COUNT: usize = Self::OutIp as usize + 1;

    /// The errors it can meet.
    pub const fn errors(self) -> &'static [ProgramError] {
        use ProgramError as E;
        match self {
            Self::Connect4 | Self::Connect6 => {
                &[E::EndpointMissing, E::Affinity, E::UdpSockets, E::UdpConnections, E::TcpConnections]
            }
            Self::Sendmsg4 | Self::Sendmsg6 => &[E::EndpointMissing, E::Affinity, E::UdpFlows, E::UdpReplies],
            Self::InEth | Self::InIp => {
                &[E::EndpointMissing, E::Affinity, E::Flows, E::Fragments, E::NotRewritten, E::Malformed]
            }
            Self::OutEth | Self::OutIp => &[E::Flows, E::Fragments, E::NotRewritten, E::Malformed],
            Self::Recvmsg4 | Self::Recvmsg6 | Self::Getpeer4 | Self::Getpeer6 | Self::Release => &[],
        }
    }
}

/// What goes wrong in a program: where it counts in [`ProgramErrors::counts`].
#[repr(usize)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ProgramError {
    /// The slot that was chosen was empty, and so were those chosen after it.
    EndpointMissing = 0,
    /// `affinity` could not be written.
    Affinity = 1,
    /// `udp_flows` could not be written.
    UdpFlows = 2,
    /// `udp_replies` could not be written.
    UdpReplies = 3,
    /// `udp_sockets` could not be written.
    UdpSockets = 4,
    /// `udp_connections` could not be written.
    UdpConnections = 5,
    /// `tcp_connections` could not be written.
    TcpConnections = 6,
    /// `flows` could not be written.
    Flows = 7,
    /// `fragments` could not be written.
    Fragments = 8,
    /// A packet could not be changed.
    NotRewritten = 9,
    /// The header of a TCP segment that may be a Service's is cut short, so that it is left alone.
    Malformed = 10,
}

impl ProgramError {
    /// All errors, in the order of their numbers.
    pub const ALL: [Self; 11] = [
        Self::EndpointMissing,
        Self::Affinity,
        Self::UdpFlows,
        Self::UdpReplies,
        Self::UdpSockets,
        Self::UdpConnections,
        Self::TcpConnections,
        Self::Flows,
        Self::Fragments,
        Self::NotRewritten,
        Self::Malformed,
    ];
    /// The number of errors.
    pub const COUNT: usize = Self::ALL.len();

    /// The name that people see.
    pub const fn name(self) -> &'static str {
        match self {
            Self::EndpointMissing => "endpoint_missing",
            Self::Affinity => "affinity_not_written",
            Self::UdpFlows => "udp_flows_not_written",
            Self::UdpReplies => "udp_replies_not_written",
            Self::UdpSockets => "udp_sockets_not_written",
            Self::UdpConnections => "udp_connections_not_written",
            Self::TcpConnections => "tcp_connections_not_written",
            Self::Flows => "flows_not_written",
            Self::Fragments => "fragments_not_written",
            Self::NotRewritten => "packet_not_rewritten",
            Self::Malformed => "packet_malformed",
        }
    }
}

map_type! {
    /// Value of `program_errors`, a copy for each CPU: what went wrong in a program.
    ProgramErrors, 88 {
        /// How often, by [`ProgramError`].
        counts: [u64; ProgramError::COUNT],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_as_asked_for_have_a_slot_and_one_is_left_for_all_others() {
        assert_eq!([0, 1, 3, 4, 4000].map(service_slots), [0, 2, 4, 8, 4096]);
        assert_eq!([1, 7, 8, 9, 4096].map(|service| service_slot(service, 8)), [1, 7, 0, 1, 0]);
    }
}
