//! Turns the records of programs into lines of a trace.

use std::net::SocketAddr;

use jiff::Timestamp;
use proxy_common::layout::{Counter, Endpoint, Program, TraceEvent};

use super::{
    names::{Names, Vip},
    record::{TracedEvent, TracedVerdict},
};
use crate::{model::Protocol, net::NetnsCookie};

/// The difference between the clock of programs and the time since 1970.
#[derive(Clone, Copy, Debug)]
pub(super) struct ClockOffset(i128);

impl ClockOffset {
    /// Returns the difference at this moment. `monotonic_ns` is the time of the programs' clock.
    pub(super) fn new(now: Timestamp, monotonic_ns: u64) -> Self {
        Self(now.as_nanosecond() - i128::from(monotonic_ns))
    }

    /// Returns the time since 1970 in nanoseconds.
    pub(super) fn unix_ns(self, monotonic_ns: u64) -> u64 {
        u64::try_from(i128::from(monotonic_ns) + self.0).unwrap_or_default()
    }

    /// Returns the time as RFC 3339 with microseconds.
    pub(super) fn rfc3339(self, monotonic_ns: u64) -> String {
        let time = Timestamp::from_nanosecond(self.unix_ns(monotonic_ns).into());
        time.map(|time| format!("{time:.6}")).unwrap_or_default()
    }
}

/// Returns the address of the Service of an event. `None` for a protocol that Services do not have.
pub(super) fn vip(event: &TraceEvent) -> Option<Vip> {
    Some((event.vip.into(), Protocol::from_number(event.proto)?))
}

/// Returns the network namespace of an event of a socket.
pub(super) fn netns(event: &TraceEvent) -> Option<NetnsCookie> {
    (!is_on_link(event)).then_some(NetnsCookie(event.place))
}

/// Returns client and endpoint of an event.
pub(super) fn ends(event: &TraceEvent) -> impl Iterator<Item = SocketAddr> {
    [event.source, event.endpoint].into_iter().filter(|end| *end != Endpoint::NONE).map(SocketAddr::from)
}

/// Returns the line of an event. `None` for a record of another version.
pub(super) fn event(event: &TraceEvent, names: &mut Names, clock: ClockOffset) -> Option<TracedEvent> {
    let program = Program::ALL.get(usize::from(event.program))?;
    let (verdict, reason) = verdict(*Counter::ALL.get(usize::from(event.verdict))?);
    let (vip, protocol) = vip(event)?;
    let address = |end: Endpoint| (end != Endpoint::NONE).then(|| SocketAddr::from(end));
    let (client, endpoint) = (address(event.source), address(event.endpoint));
    let endpoint = endpoint.filter(|_| verdict == TracedVerdict::Translated);
    let (from, link) = if let Some(netns) = netns(event) {
        (names.place(netns), None)
    } else {
        let index = u32::try_from(event.place).unwrap_or_default();
        (client.and_then(|client| names.pod(client.ip())), Some(names.link(index)))
    };
    Some(TracedEvent {
        time: clock.rfc3339(event.time_ns),
        verdict,
        reason: reason.map(ToOwned::to_owned),
        protocol: protocol.name().to_owned(),
        client,
        from,
        vip,
        service: names.service((vip, protocol)),
        endpoint,
        pod: endpoint.and_then(|endpoint| names.pod(endpoint.ip())),
        by: program.name().to_owned(),
        link,
    })
}

fn is_on_link(event: &TraceEvent) -> bool {
    const LINK_PROGRAMS: [Program; 4] = [Program::InEth, Program::InIp, Program::OutEth, Program::OutIp];
    LINK_PROGRAMS.iter().any(|program| *program as u8 == event.program)
}

/// Returns what a counter means, and its name if it is the reason for a failure.
fn verdict(counter: Counter) -> (TracedVerdict, Option<&'static str>) {
    match counter {
        Counter::FlowsBegun => (TracedVerdict::Translated, None),
        Counter::Refused | Counter::UnknownConnection => (TracedVerdict::Refused, Some(counter.name())),
        _ => (TracedVerdict::Dropped, Some(counter.name())),
    }
}

#[cfg(test)]
mod tests {
    use proxy_common::{
        layout::{Direction, Flow, FlowKey},
        packet::Tuple,
    };

    use super::*;

    fn end(address: &str) -> Endpoint {
        let address: SocketAddr = address.parse().expect("an address");
        Endpoint::new(address.ip().into(), address.port())
    }

    fn line(record: &TraceEvent) -> TracedEvent {
        let clock = ClockOffset::new(Timestamp::from_second(100).expect("a time"), 40_000_000_000);
        event(record, &mut Names::default(), clock).expect("an event of this version")
    }

    #[test]
    fn an_event_of_a_socket_has_no_client_and_no_link() {
        let [vip, to] = ["10.96.0.10:80", "10.244.1.5:8080"].map(end);
        let what = (Program::Connect4, Counter::FlowsBegun);
        let record = TraceEvent::of_socket(what, 41_000_001_000, (9, Protocol::Tcp), 7, [&vip, &to]);
        let line = line(&record);
        assert_eq!(line.time, "1970-01-01T00:01:41.000001Z");
        assert_eq!((line.client, line.link, line.reason), (None, None, None));
        assert_eq!((line.verdict, line.endpoint), (TracedVerdict::Translated, Some(to.into())));
        assert_eq!(netns(&record), Some(NetnsCookie(9)));
    }

    #[test]
    fn a_dropped_packet_has_a_reason_and_no_endpoint() {
        let [source, destination] = ["[2001:db8::1]:4000", "[fd00::10]:53"].map(end);
        let key = FlowKey::new(Direction::Original, Protocol::Udp, Tuple { source, destination });
        let what = (Program::InIp, Counter::SourceNotAllowed);
        let flow = Flow { destination, ..Flow::NONE };
        let record = TraceEvent::of_flow(what, 0, u32::MAX, &key, &flow);
        let line = line(&record);
        assert_eq!((line.client, line.vip, line.endpoint), (Some(source.into()), destination.into(), None));
        assert_eq!(line.reason.as_deref(), Some("source_not_allowed"));
        assert_eq!(line.verdict, TracedVerdict::Dropped);
        assert_eq!(line.link.as_deref(), Some("link 4294967295"));
        assert_eq!(netns(&record), None);
    }
}
