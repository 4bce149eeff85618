//! Programs that trace, and the log of trace events and error messages, on a thread of its own.

mod programs;

use std::{
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
        mpsc::{self, Receiver, RecvTimeoutError, SyncSender},
    },
    time::Duration,
};

use proxy_common::{
    Protocol,
    layout::{Counter, Endpoint, Program, TraceEvent},
};

pub use self::programs::{TraceRecords, TracingPrograms};
use crate::{
    dataplane::lock,
    kernel::{
        KernelError,
        bpf::{LogLevel, MessageReader, Object, RingReader},
        spawn,
    },
};

/// The time between two reads of the ring buffers. Events for which there is no room in the
/// meantime are lost.
const INTERVAL: Duration = Duration::from_millis(100);
/// Lines that are logged in an interval. Of the other events only their number is logged.
const LINES: usize = 100;
/// Events after which a read pauses: more than a ring buffer holds. While programs flood a ring
/// buffer, it never gets empty.
const MAX_EVENTS: usize = LINES + 2000;

/// The thread that logs. Dropping it ends the thread.
#[derive(Debug)]
pub(super) struct TraceLogger {
    _alive: SyncSender<()>,
}

impl TraceLogger {
    /// Starts the thread, unless the level is off.
    pub(super) fn start(object: &mut Object, level: LogLevel) -> Result<Option<Self>, KernelError> {
        if level == LogLevel::Off {
            return Ok(None);
        }
        let (alive, limit) = RateLimit::new();
        let events = RingReader::new(object, "trace_events")?;
        let errors = MessageReader::new(object, ErrorLogger(Arc::clone(&limit)))?;
        spawn("ebpf-log", move || run(events, errors, &limit))?;
        Ok(Some(Self { _alive: alive }))
    }
}

fn run(mut events: RingReader<TraceEvent>, mut errors: MessageReader<ErrorLogger>, limit: &RateLimit) {
    while limit.pause() {
        errors.read();
        events.read(|event| {
            if limit.admits() {
                Line::new(&event).write();
            }
        });
        limit.end_interval();
    }
}

/// Logs what programs that trace write, in place of the [`TraceLogger`] that reads nothing
/// meanwhile.
struct Log {
    level: LogLevel,
    errors: MessageReader<ErrorLogger>,
    limit: Arc<RateLimit>,
    /// The limit waits for nothing here.
    _alive: SyncSender<()>,
}

impl Log {
    /// Returns `None` if nothing is logged.
    fn new(object: &mut Object, level: LogLevel) -> Result<Option<Self>, KernelError> {
        if level == LogLevel::Off {
            return Ok(None);
        }
        let (alive, limit) = RateLimit::new();
        let errors = MessageReader::new(object, ErrorLogger(Arc::clone(&limit)))?;
        Ok(Some(Self { level, errors, limit, _alive: alive }))
    }

    /// Logs the first of these events and the errors meanwhile, as many lines as in an interval.
    fn write(&mut self, events: &[TraceEvent]) {
        self.errors.read();
        let is_logged = |line: &Line| {
            self.level >= if line.endpoint.is_some() { LogLevel::Debug } else { LogLevel::Info }
        };
        events.iter().map(Line::new).filter(is_logged).take(LINES).for_each(Line::write);
        self.limit.end_interval();
    }
}

/// Limits the lines that are logged, and counts the events that are not.
#[derive(Debug)]
struct RateLimit {
    /// Events in this interval.
    events: AtomicUsize,
    ended: Mutex<Receiver<()>>,
}

impl RateLimit {
    /// Returns a limit, and what ends its pauses if it is dropped.
    fn new() -> (SyncSender<()>, Arc<Self>) {
        let (alive, ended) = mpsc::sync_channel(1);
        (alive, Arc::new(Self { events: AtomicUsize::new(0), ended: Mutex::new(ended) }))
    }

    /// Waits for an interval while the ring buffers fill. Returns false, at once, if the logger was
    /// dropped.
    fn pause(&self) -> bool {
        lock(&self.ended).recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout)
    }

    /// Counts an event. Returns true if it is to be logged.
    fn admits(&self) -> bool {
        let before = self.events.fetch_add(1, Ordering::Relaxed);
        if before + 1 >= MAX_EVENTS {
            self.end_interval();
            self.pause();
        }
        before < LINES
    }

    /// Ends an interval. Logs and returns the number of events that were not logged.
    fn end_interval(&self) -> usize {
        let dropped = self.events.swap(0, Ordering::Relaxed).saturating_sub(LINES);
        if dropped > 0 {
            tracing::info!(target: "ebpf", dropped, "trace events dropped: more than 1,000 a second");
        }
        dropped
    }
}

/// Logs error messages. Their target is the name of the program, and their text is the name of the
/// error.
struct ErrorLogger(Arc<RateLimit>);

impl log::Log for ErrorLogger {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        if self.0.admits() {
            let (program, error) = (record.target(), record.args().to_string());
            tracing::error!(target: "ebpf", program, error, "an eBPF program reported an error");
        }
    }

    fn flush(&self) {}
}

/// The fields of a log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Line {
    program: &'static str,
    verdict: &'static str,
    protocol: &'static str,
    service: u32,
    /// `None` for a socket.
    source: Option<SocketAddr>,
    vip: SocketAddr,
    /// `None` for a connection or packet that is refused or dropped.
    endpoint: Option<SocketAddr>,
}

impl Line {
    fn new(event: &TraceEvent) -> Self {
        const UNKNOWN: &str = "unknown";
        let program = Program::ALL.get(usize::from(event.program)).map_or(UNKNOWN, |it| it.name());
        let verdict = Counter::ALL.get(usize::from(event.verdict)).map_or(UNKNOWN, |it| it.name());
        let is_translated = event.verdict == Counter::FlowsBegun as u8;
        Self {
            program,
            verdict: if is_translated { "translated" } else { verdict },
            protocol: Protocol::from_number(event.proto).map_or(UNKNOWN, Protocol::name),
            service: event.service,
            source: (event.source != Endpoint::NONE).then(|| event.source.into()),
            vip: event.vip.into(),
            endpoint: is_translated.then(|| event.endpoint.into()),
        }
    }

    fn write(self) {
        let Self { program, verdict, protocol, service, source, vip, endpoint } = self;
        let source = source.map(tracing::field::display);
        if let Some(endpoint) = endpoint {
            tracing::debug!(target: "ebpf", program, verdict, protocol, source, %vip, %endpoint, service, "translated");
        } else {
            tracing::info!(target: "ebpf", program, verdict, protocol, source, %vip, service, "refused or dropped");
        }
    }
}

#[cfg(test)]
mod tests {
    use proxy_common::{
        layout::{Direction, Flow, FlowKey},
        packet::Tuple,
    };

    use super::*;
    use crate::kernel::clock;

    fn endpoint(address: &str) -> Endpoint {
        let address: SocketAddr = address.parse().unwrap();
        Endpoint::new(address.ip().into(), address.port())
    }

    #[test]
    fn translated_connection_of_a_socket_has_no_source() {
        let [vip, to] = ["10.96.0.10:80", "10.244.1.5:8080"].map(endpoint);
        let what = (Program::Connect4, Counter::FlowsBegun);
        let expected = Line {
            program: "shunt_connect4",
            verdict: "translated",
            protocol: "TCP",
            service: 7,
            source: None,
            vip: "10.96.0.10:80".parse().unwrap(),
            endpoint: Some("10.244.1.5:8080".parse().unwrap()),
        };
        assert_eq!(Line::new(&TraceEvent::of_socket(what, 1, (2, Protocol::Tcp), 7, [&vip, &to])), expected);
    }

    #[test]
    fn dropped_packet_has_a_source_and_a_reason_but_no_endpoint() {
        let [source, destination] = ["[2001:db8::1]:4000", "[fd00::10]:53"].map(endpoint);
        let key = FlowKey::new(Direction::Original, Protocol::Udp, Tuple { source, destination });
        let event = TraceEvent::of_flow((Program::OutIp, Counter::SourceNotAllowed), 1, 2, &key, &Flow::NONE);
        let expected = Line {
            program: "shunt_out_ip",
            verdict: "source_not_allowed",
            protocol: "UDP",
            service: 0,
            source: Some("[2001:db8::1]:4000".parse().unwrap()),
            vip: "[fd00::10]:53".parse().unwrap(),
            endpoint: None,
        };
        assert_eq!(Line::new(&event), expected);
    }

    fn admitted(limit: &RateLimit, events: usize) -> usize {
        (0..events).filter(|_| limit.admits()).count()
    }

    #[test]
    fn events_beyond_the_limit_are_counted_and_not_logged() {
        let (_alive, limit) = RateLimit::new();
        assert_eq!(admitted(&limit, LINES + 3), LINES);
        assert_eq!([limit.end_interval(), limit.end_interval()], [3, 0]);
    }

    #[test]
    fn flood_is_read_in_parts_with_a_pause_after_each_until_the_logger_is_dropped() {
        let (alive, limit) = RateLimit::new();
        let began = clock::monotonic().unwrap();
        assert_eq!(admitted(&limit, 2 * MAX_EVENTS), 2 * LINES);
        assert!(clock::monotonic().unwrap() >= began + 2 * INTERVAL);
        assert_eq!(limit.end_interval(), 0, "both parts were ended");
        assert!(limit.pause());
        drop(alive);
        admitted(&limit, MAX_EVENTS + LINES + 1);
        assert_eq!(limit.end_interval(), 1);
        assert!(!limit.pause(), "the thread ends");
    }
}
