//! How long silent flows are kept. The rules are tables that the compiler computes: the verifier
//! would follow each branch of a rule wherever a program asks, and an index has no branches.

use crate::{Protocol, layout::flow_state as state};

/// Of a TCP connection that closed, or that is not known to be open.
const CLOSED: u32 = 120;

/// Of a flow of datagrams with a reply.
pub(crate) const ANSWERED: u32 = 120;

/// Seconds, by [`index`].
#[derive(Debug)]
pub(crate) struct Lifetimes([u32; INDEXES]);

/// How long a silent flow is kept. The conntrack entry that masquerades the flow is not kept
/// longer: its lifetimes are the defaults of `nf_conntrack`, and for TCP those of kube-proxy
/// (`KubeProxyConntrackConfiguration`).
pub(crate) static OF_FLOWS: Lifetimes = Lifetimes::new(CLOSED, state::REPLIED | state::DSR);

/// How long no new flow takes the source port of a silent one. For a flow of datagrams, this is not
/// shorter than [`OF_FLOWS`]. For a closed connection, it is as long as its endpoint may have the
/// connection in TIME-WAIT (`TCP_TIMEWAIT_LEN` of the kernel).
pub(crate) static OF_PORTS: Lifetimes = Lifetimes::new(60, state::REPLIED | state::DSR | state::PASS);

/// The same if few ports are left. A new flow then takes the port of a closed connection at once.
pub(crate) static OF_SCARCE_PORTS: Lifetimes = Lifetimes::new(0, state::REPLIED | state::DSR | state::PASS);

impl Lifetimes {
    /// Returns the table with these seconds for closed connections. A flow of datagrams with one of
    /// the bits `answered` counts as answered.
    const fn new(of_closed: u32, answered: u32) -> Self {
        let mut table = [0; INDEXES];
        let mut bits = 0;
        loop {
            let is_tcp = bits & TCP != 0;
            table[index(bits)] = if is_tcp { of_tcp(bits, of_closed) } else { of_datagrams(bits, answered) };
            bits = next(bits);
            if bits == 0 {
                return Self(table);
            }
        }
    }

    /// Returns the seconds for a flow in this state.
    #[inline(always)]
    pub(crate) const fn seconds(&self, state: u32, protocol: Protocol) -> u64 {
        self.0[index(bits(state, protocol))] as u64
    }
}

/// See [`Flow::is_closed`](crate::layout::Flow::is_closed).
#[inline(always)]
pub(crate) const fn is_closed(state: u32) -> bool {
    const BOTH: u32 = state::CLIENT_CLOSED | state::ENDPOINT_CLOSED;
    const PASSED: u32 = state::CLIENT_CLOSED | state::PASS;
    state & BOTH == BOTH || state & PASSED == PASSED || state & state::RESET != 0
}

/// A FIN of the client alone does not shorten the lifetime, because anyone may have sent it, except
/// for a flow that goes through the tunnel: the node sees no FIN of its endpoint.
const fn of_tcp(state: u32, of_closed: u32) -> u32 {
    const HALF_CLOSED: u32 = 3_600;
    const OPEN: u32 = 86_400;
    let has_replied = state & state::REPLIED != 0;
    if state & state::DSR != 0 {
        let is_open = has_replied && state & state::CLIENT_CLOSED == 0;
        return if is_open { OPEN } else { CLOSED };
    }
    if is_closed(state) {
        of_closed
    } else if !has_replied || state & state::ASSURED == 0 {
        CLOSED
    } else if state & state::ENDPOINT_CLOSED != 0 {
        HALF_CLOSED
    } else {
        OPEN
    }
}

/// A flow that conntrack translates is not kept longer than its entry there. [`state::REPLIED`]
/// then says that the entry is assured.
const fn of_datagrams(state: u32, answered: u32) -> u32 {
    const UNANSWERED: u32 = 30;
    if state & answered != 0 { ANSWERED } else { UNANSWERED }
}

/// The bits of a state on which a lifetime depends.
const STATE: u32 = state::REPLIED
    | state::CLIENT_CLOSED
    | state::ENDPOINT_CLOSED
    | state::RESET
    | state::PASS
    | state::ASSURED
    | state::DSR;

/// A bit beside them that says that the protocol is TCP.
const TCP: u32 = 1 << 4;

/// The number of combinations of these bits.
const INDEXES: usize = 1 << 8;

/// Returns the bits on which a lifetime depends.
#[inline(always)]
const fn bits(state: u32, protocol: Protocol) -> u32 {
    // Only the number of TCP has this bit.
    state & STATE | (protocol.number() as u32 & 2) << 3
}

/// Returns the index for such bits. Each combination has its own: the product has the bits close
/// together. The AND is last. The verifiers of older kernels (5.10, 6.1) know the limit of a number
/// after an AND, but not after an OR.
#[inline(always)]
const fn index(bits: u32) -> usize {
    ((bits * 0x8018) >> 13 & 0xff) as usize
}

/// Returns the next combination of bits after this one, and 0 after the last.
const fn next(bits: u32) -> u32 {
    bits.wrapping_sub(STATE | TCP) & (STATE | TCP)
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, vec::Vec};

    use super::*;

    #[test]
    fn each_combination_has_its_own_index() {
        let all: Vec<u32> =
            core::iter::successors(Some(0), |bits| Some(next(*bits)).filter(|next| *next != 0)).collect();
        let indexes: BTreeSet<usize> = all.iter().map(|bits| index(*bits)).collect();
        assert_eq!((all.len(), indexes.len()), (INDEXES, INDEXES));
    }

    /// The rules as one match, for a flow that the node did not begin.
    fn expected(state: u32, protocol: Protocol) -> u64 {
        let has = |bits| state & bits == bits;
        let is_dsr = has(state::DSR);
        let is_closed = has(state::CLIENT_CLOSED | state::ENDPOINT_CLOSED)
            || has(state::CLIENT_CLOSED | state::PASS)
            || has(state::RESET);
        match protocol {
            Protocol::Udp | Protocol::Sctp if has(state::REPLIED) || is_dsr => 120,
            Protocol::Udp | Protocol::Sctp => 30,
            Protocol::Tcp if is_dsr && has(state::REPLIED) && !has(state::CLIENT_CLOSED) => 86_400,
            Protocol::Tcp if is_dsr || is_closed || !has(state::REPLIED | state::ASSURED) => 120,
            Protocol::Tcp if has(state::ENDPOINT_CLOSED) => 3_600,
            Protocol::Tcp => 86_400,
        }
    }

    #[test]
    fn each_state_has_the_lifetime_of_its_rule() {
        for state in 0..1 << 12 {
            for protocol in Protocol::ALL {
                assert_eq!(
                    OF_FLOWS.seconds(state, protocol),
                    expected(state, protocol),
                    "{state:#x} {protocol}"
                );
            }
        }
    }

    #[test]
    fn closed_connections_keep_their_ports_for_a_minute_or_not_at_all() {
        for state in (0..1 << 12).filter(|state| state & state::DSR == 0) {
            let of_flow = OF_FLOWS.seconds(state, Protocol::Tcp);
            let [usual, scarce] =
                [&OF_PORTS, &OF_SCARCE_PORTS].map(|table| table.seconds(state, Protocol::Tcp));
            let expected = if is_closed(state) { (60, 0) } else { (of_flow, of_flow) };
            assert_eq!((usual, scarce), expected, "{state:#x}");
            for table in [&OF_PORTS, &OF_SCARCE_PORTS] {
                assert!(table.seconds(state, Protocol::Udp) >= OF_FLOWS.seconds(state, Protocol::Udp));
            }
        }
    }

    #[test]
    fn only_tcp_has_the_bit_of_tcp() {
        for protocol in Protocol::ALL {
            assert_eq!(bits(!0, protocol), if protocol == Protocol::Tcp { STATE | TCP } else { STATE });
        }
    }
}
