//! What the state and the age of a flow mean for its handover.

use std::{net::SocketAddr, time::Duration};

use proxy_common::{
    Addr,
    layout::{Direction, Flow, FlowKey, flow_state},
};

use crate::{kernel::clock, model::Protocol};

/// Returns true for the entries of flows that the programs masquerade with this address.
pub(crate) fn has_source(address: Addr, key: &FlowKey, flow: &Flow) -> bool {
    match key.direction() {
        Some(Direction::Masquerade) => flow.source.addr == address,
        Some(Direction::Original) if flow.has_twice_nat() => flow.source.addr == address,
        Some(Direction::MasqueradeReply) => key.destination.addr == address,
        _ => false,
    }
}

/// Returns true if the programs or netfilter masquerade a flow.
pub(super) const fn is_masqueraded(flow: &Flow) -> bool {
    flow.state & flow_state::MASQUERADE != 0
}

/// Returns the source that the endpoint of a flow sees. `of_programs` is the source with which the
/// programs masquerade flows with this client and endpoint. It may be that of an earlier flow: the
/// client may have used its port for another VIP.
///
/// Returns `None` if netfilter masquerades the flow: only conntrack knows the source. If conntrack
/// has forgotten it, the flow has ended. An entry without the source would let a new flow of the
/// same client port reach the endpoint without being masqueraded.
pub(super) fn source_at_endpoint(
    flow: &Flow,
    client: SocketAddr,
    of_programs: Option<SocketAddr>,
) -> Option<SocketAddr> {
    if is_masqueraded(flow) { of_programs } else { Some(client) }
}

/// Returns true if no packet of a flow goes through the stack.
pub(crate) const fn is_whole(flow: &Flow) -> bool {
    flow.state & flow_state::WHOLE != 0
}

/// Returns true if the programs pass the packets of a flow unchanged.
pub(crate) const fn passes(flow: &Flow) -> bool {
    flow.state & flow_state::PASS != 0
}

/// Returns true for a flow that netfilter has because it began before the programs took new flows.
pub(crate) const fn is_left(flow: &Flow) -> bool {
    flow.state & flow_state::LEFT != 0
}

/// Returns true if the programs translate the packets of a flow, and do not pass them or send them
/// to another node.
pub(super) const fn is_translated_here(flow: &Flow) -> bool {
    !passes(flow) && !flow.is_dsr()
}

/// Returns the time of the last packet of a flow that conntrack translates, in nanoseconds of the
/// monotonic clock. The list of conntrack's entries began at `listed`.
///
/// A packet may have passed since its entry was read. Conntrack then keeps the entry longer than it
/// said, and `entry`, which the programs have, knows the time.
pub(super) fn last_packet(
    listed: Duration,
    lifetime: Duration,
    expires_after: Option<Duration>,
    entry: Option<&Flow>,
) -> u64 {
    let silence = expires_after.map_or(Duration::ZERO, |left| lifetime.saturating_sub(left));
    clock::nanos(listed.saturating_sub(silence)).max(entry.map_or(0, |flow| flow.used_ns))
}

/// A closed connection that was silent for this long gets no packets any more. Its client port may
/// be in use again.
const CLOSED_FOR: Duration = Duration::from_secs(2);
/// A flow that is not assured and was silent for this long is neither a handshake nor a question
/// that waits for its answer. After a flood there are tens of thousands, and each takes about a
/// millisecond.
const UNASSURED_FOR: Duration = Duration::from_secs(3);
/// From this time on, flows that are not assured stay behind. A flood may begin them faster than
/// they are handed over.
const UNASSURED_WITHIN: Duration = Duration::from_secs(5);

/// Returns the state of a UDP flow that conntrack translates. Without packets, the programs pass it
/// for 30 seconds, or for 120 if it is replied. `stream_timeout` is how long conntrack keeps an
/// assured one. If that is shorter (`conntrack.udpStreamTimeout`), the flow counts as not replied:
/// once conntrack has forgotten it, nothing would translate its datagrams.
pub(super) fn state_of_conntrack(is_assured: bool, stream_timeout: Option<Duration>) -> u32 {
    let replied = flow_state::PASS | flow_state::ASSURED | flow_state::REPLIED;
    let lifetime = Flow { state: replied, ..Flow::NONE }.lifetime(Protocol::Udp);
    let is_kept = is_assured && stream_timeout.is_none_or(|timeout| timeout >= lifetime);
    if is_kept { replied } else { replied & !flow_state::REPLIED }
}

/// Returns the state of an entry that keeps the source port of a connection that conntrack
/// translates. One that is over does so for as long as conntrack has it.
pub(super) const fn state_of_reserved(is_over: bool) -> u32 {
    const OVER: u32 = flow_state::CLIENT_CLOSED | flow_state::ENDPOINT_CLOSED;
    if is_over { OVER } else { 0 }
}

/// After this silence conntrack forgets a conversation (`nf_conntrack_udp_timeout`). The client may
/// use its port for another one. Conntrack never had a flow that takes the direct path as a whole.
const CONVERSATION_FOR: Duration = Duration::from_secs(30);

/// Returns true for a flow that is not handed over if conntrack has no entry for it. `after` is the
/// time since the handover began.
pub(super) fn has_ended(flow: &Flow, protocol: Protocol, now: Duration, after: Duration) -> bool {
    let silence = now.saturating_sub(Duration::from_nanos(flow.used_ns));
    stays_behind(flow, protocol, now, after)
        || !protocol.is_connection_oriented() && !is_whole(flow) && silence >= CONVERSATION_FOR
}

/// Returns true for a flow that is not handed over, even if conntrack still has an entry for it.
pub(super) fn stays_behind(flow: &Flow, protocol: Protocol, now: Duration, after: Duration) -> bool {
    let silence = now.saturating_sub(Duration::from_nanos(flow.used_ns));
    flow.is_expired(protocol, clock::nanos(now))
        || protocol.is_connection_oriented() && flow.is_closed() && silence >= CLOSED_FOR
        || !flow.is_assured() && (silence >= UNASSURED_FOR || after >= UNASSURED_WITHIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::from_secs(1_000);

    /// Returns true if a TCP flow in this state stays behind after this silence, at this time after
    /// the handover began.
    fn stays(state: u32, silent_seconds: u64, after_seconds: u64) -> bool {
        let [silence, after] = [silent_seconds, after_seconds].map(Duration::from_secs);
        let flow = Flow { state, used_ns: clock::nanos(NOW.saturating_sub(silence)), ..Flow::NONE };
        stays_behind(&flow, Protocol::Tcp, NOW, after)
    }

    #[test]
    fn packet_that_passed_after_conntrack_was_read_keeps_its_flow() {
        const LIFETIME: Duration = Duration::from_secs(30);
        let left = Some(Duration::from_secs(1));
        assert_eq!(last_packet(NOW, LIFETIME, left, None), clock::nanos(Duration::from_secs(971)));
        let answered = Flow { used_ns: clock::nanos(NOW), ..Flow::NONE };
        assert_eq!(last_packet(NOW, LIFETIME, left, Some(&answered)), clock::nanos(NOW));
    }

    #[test]
    fn flow_gets_the_source_that_its_endpoint_sees_or_no_entry() {
        let client = SocketAddr::from(([192, 0, 2, 1], 40_000));
        let node = SocketAddr::from(([192, 0, 2, 9], 20_000));
        let masqueraded = Flow { state: flow_state::MASQUERADE, ..Flow::NONE };
        assert_eq!(source_at_endpoint(&masqueraded, client, None), None);
        assert_eq!(source_at_endpoint(&masqueraded, client, Some(node)), Some(node));
        for of_earlier_flow in [None, Some(node)] {
            assert_eq!(source_at_endpoint(&Flow::NONE, client, of_earlier_flow), Some(client));
        }
    }

    #[test]
    fn handshakes_are_handed_over_and_the_flows_of_a_flood_stay_behind() {
        for state in [0, flow_state::REPLIED] {
            assert!(!stays(state, 1, 1), "a handshake");
            assert!(stays(state, 3, 1), "a forged SYN some time ago");
            assert!(stays(state, 1, 5), "a flood that goes on");
        }
    }

    #[test]
    fn conversation_that_conntrack_did_not_see_is_handed_over_as_long_as_the_programs_keep_it() {
        let ended = |state: u32, silent_seconds: u64| {
            let used_ns = clock::nanos(NOW.saturating_sub(Duration::from_secs(silent_seconds)));
            let flow =
                Flow { state: state | flow_state::REPLIED | flow_state::ASSURED, used_ns, ..Flow::NONE };
            has_ended(&flow, Protocol::Udp, NOW, Duration::ZERO)
        };
        assert!(!ended(0, 29) && ended(0, 30), "conntrack has forgotten it");
        assert!(!ended(flow_state::WHOLE, 119) && ended(flow_state::WHOLE, 120));
    }

    #[test]
    fn flow_of_conntrack_is_not_passed_for_longer_than_conntrack_keeps_it() {
        let lifetime = |is_assured, stream_seconds: Option<u64>| {
            let state = state_of_conntrack(is_assured, stream_seconds.map(Duration::from_secs));
            Flow { state, service: 1, ..Flow::NONE }.lifetime(Protocol::Udp).as_secs()
        };
        assert_eq!(lifetime(true, None), 120);
        assert_eq!(lifetime(true, Some(120)), 120);
        assert_eq!(lifetime(true, Some(60)), 30, "conntrack.udpStreamTimeout");
        assert_eq!(lifetime(false, Some(300)), 30);
    }

    #[test]
    fn reserved_source_of_a_connection_that_is_over_expires_with_it() {
        let flow = |is_over| Flow { state: flow_state::PASS | state_of_reserved(is_over), ..Flow::NONE };
        assert!(flow(true).is_finished() && !flow(false).is_finished());
        assert_eq!(flow(true).lifetime(Protocol::Tcp).as_secs(), 120, "as long as conntrack in TIME_WAIT");
    }

    #[test]
    fn assured_connections_are_handed_over_until_they_have_closed() {
        const OPEN: u32 = flow_state::REPLIED | flow_state::ASSURED;
        assert!(!stays(OPEN, 900, 60));
        assert!(!stays(OPEN | flow_state::RESET, 1, 60), "its last segments");
        assert!(stays(OPEN | flow_state::RESET, 2, 0));
    }
}
