//! Logs what programs tell of single connections and packets, where that is asked for, from a thread of its own.

use std::{
    net::{IpAddr, SocketAddr},
    str::{FromStr, SplitWhitespace},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
        mpsc::{self, Receiver, RecvTimeoutError, SyncSender},
    },
    thread,
    time::Duration,
};

use proxy_common::{
    Protocol,
    layout::{Counter, Program},
    trace::Codes,
};

use crate::kernel::{
    KernelError,
    bpf::{LogLevel, LogReader, Object},
};

/// Between two looks. What does not fit the ring buffer meanwhile is lost.
const PAUSE: Duration = Duration::from_millis(100);
/// Lines that are written a look; of more than that, only the number is.
const LINES: usize = 100;
/// Records after which a look pauses: about what the ring buffer holds, and more. While packets flood it, it is never found empty.
const MOST: usize = LINES + 1000;

/// A thread that writes what programs tell. Ends when it is dropped.
#[derive(Debug)]
pub(super) struct LogWriter {
    _alive: SyncSender<()>,
}

impl LogWriter {
    /// Starts the thread, if anything is asked for.
    pub(super) fn start(object: &mut Object, level: LogLevel) -> Result<Option<Self>, KernelError> {
        if level == LogLevel::Off {
            return Ok(None);
        }
        let (alive, ended) = mpsc::sync_channel(1);
        let lines = Lines::new(ended);
        let reader = LogReader::new(object, lines.clone())?;
        thread::Builder::new()
            .name("ebpf-log".into())
            .spawn(move || run(reader, &lines))
            .map_err(KernelError::call("start", "thread ebpf-log"))?;
        Ok(Some(Self { _alive: alive }))
    }
}

fn run(mut reader: LogReader<Lines>, lines: &Lines) {
    while lines.pause() {
        reader.read();
        lines.end();
    }
}

/// Takes records, and counts them.
#[derive(Clone, Debug)]
struct Lines(Arc<Look>);

#[derive(Debug)]
struct Look {
    records: AtomicUsize,
    ended: Mutex<Receiver<()>>,
}

impl Lines {
    fn new(ended: Receiver<()>) -> Self {
        Self(Arc::new(Look { records: AtomicUsize::new(0), ended: Mutex::new(ended) }))
    }

    /// Lets the ring buffer fill; false, at once, when nobody wants more.
    fn pause(&self) -> bool {
        let ended = self.0.ended.lock().unwrap_or_else(PoisonError::into_inner);
        ended.recv_timeout(PAUSE) == Err(RecvTimeoutError::Timeout)
    }

    /// Ends a look, or a part of one: tells, and returns, of how many records nothing was written.
    fn end(&self) -> usize {
        let left_out = self.0.records.swap(0, Ordering::Relaxed).saturating_sub(LINES);
        if left_out > 0 {
            tracing::info!(target: "ebpf", left_out, "programs tell more than is written");
        }
        left_out
    }
}

impl log::Log for Lines {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        let before = self.0.records.fetch_add(1, Ordering::Relaxed);
        if before + 1 >= MOST {
            self.end();
            self.pause();
        }
        if before >= LINES {
            return;
        }
        let text = record.args().to_string();
        if let Some(line) = Line::parse(&text) {
            line.write();
        } else {
            tracing::warn!(target: "ebpf", text, "a program tells what cannot be understood");
        }
    }

    fn flush(&self) {}
}

/// A record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Line {
    /// Something went wrong.
    Failed { program: &'static str, error: &'static str },
    /// A connection or packet has another destination now, or was turned away.
    Told {
        program: &'static str,
        verdict: &'static str,
        protocol: &'static str,
        service: u32,
        source: Option<SocketAddr>,
        vip: SocketAddr,
        endpoint: Option<SocketAddr>,
    },
}

impl Line {
    /// Reads a record, as [`proxy_common::trace`] explains it.
    fn parse(text: &str) -> Option<Self> {
        let mut words = text.split_whitespace();
        let codes = Codes(number(&mut words)?);
        let (program, name) = *Program::ALL.iter().find(|(program, _)| *program as u32 == codes.program())?;
        let Some(service) = number(&mut words) else {
            let error = program.errors().iter().find(|error| **error as u32 == codes.what())?;
            return Some(Self::Failed { program: name, error: error.name() });
        };
        let (what, verdict) = *Counter::ALL.iter().find(|(counter, _)| *counter as u32 == codes.what())?;
        let source = address(&mut words)?;
        Some(Self::Told {
            program: name,
            verdict: if what == Counter::FlowsBegun { "translated" } else { verdict },
            protocol: protocol(codes.proto())?,
            service,
            source: (!is_nobody(source)).then_some(source),
            vip: address(&mut words)?,
            endpoint: address(&mut words),
        })
    }

    fn write(self) {
        match self {
            Self::Failed { program, error } => {
                tracing::error!(target: "ebpf", program, error, "something went wrong in a program");
            }
            Self::Told { program, verdict, protocol, service, source, vip, endpoint: Some(endpoint) } => {
                let source = source.map(tracing::field::display);
                tracing::debug!(target: "ebpf", program, verdict, protocol, source, %vip, %endpoint, service, "to an endpoint");
            }
            Self::Told { program, verdict, protocol, service, source, vip, endpoint: None } => {
                let source = source.map(tracing::field::display);
                tracing::info!(target: "ebpf", program, verdict, protocol, source, %vip, service, "turned away");
            }
        }
    }
}

fn number<N: FromStr>(words: &mut SplitWhitespace<'_>) -> Option<N> {
    words.next()?.parse().ok()
}

fn address(words: &mut SplitWhitespace<'_>) -> Option<SocketAddr> {
    let address: IpAddr = number(words)?;
    Some(SocketAddr::new(address.to_canonical(), number(words)?))
}

/// [`proxy_common::layout::Endpoint::NONE`].
fn is_nobody(address: SocketAddr) -> bool {
    address.ip().is_unspecified() && address.port() == 0
}

fn protocol(number: u32) -> Option<&'static str> {
    Protocol::from_number(u8::try_from(number).ok()?).map(Protocol::name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::clock;

    fn codes(program: Program, what: u32, proto: Protocol) -> u32 {
        Codes::new(program, what, proto as u8).0
    }

    #[test]
    fn a_translated_connection_of_a_socket_has_no_source() {
        let codes = codes(Program::Connect4, Counter::FlowsBegun as u32, Protocol::Tcp);
        let text = format!("{codes} 7 :: 0 ::ffff:10.96.0.10 80 ::ffff:10.244.1.5 8080");
        let expected = Line::Told {
            program: "shunt_connect4",
            verdict: "translated",
            protocol: "TCP",
            service: 7,
            source: None,
            vip: "10.96.0.10:80".parse().unwrap(),
            endpoint: Some("10.244.1.5:8080".parse().unwrap()),
        };
        assert_eq!(Line::parse(&text), Some(expected));
    }

    #[test]
    fn a_packet_that_is_turned_away_says_where_it_came_from_and_why() {
        let codes = codes(Program::OutIp, Counter::SourceNotAllowed as u32, Protocol::Udp);
        let expected = Line::Told {
            program: "shunt_out_ip",
            verdict: "source_not_allowed",
            protocol: "UDP",
            service: 0,
            source: Some("[2001:db8::1]:4000".parse().unwrap()),
            vip: "[fd00::10]:53".parse().unwrap(),
            endpoint: None,
        };
        assert_eq!(Line::parse(&format!("{codes} 0 2001:db8::1 4000 fd00::10 53")), Some(expected));
    }

    #[test]
    fn every_error_that_a_program_can_meet_has_its_name() {
        for (program, name) in Program::ALL {
            for error in program.errors() {
                let codes = Codes::new(program, *error as u32, 0).0;
                let expected = Line::Failed { program: name, error: error.name() };
                assert_eq!(Line::parse(&codes.to_string()), Some(expected));
            }
        }
    }

    #[test]
    fn what_is_no_record_is_not_understood() {
        let known = codes(Program::InEth, Counter::Refused as u32, Protocol::Tcp);
        for text in ["", "x", "255", &format!("{known} 1 10.0.0.1"), &format!("{known} 1 :: 0 x 80")] {
            assert_eq!(Line::parse(text), None, "{text:?}");
        }
    }

    fn log(lines: &Lines, records: usize) {
        for _ in 0..records {
            log::Log::log(lines, &log::Record::builder().args(format_args!("x")).build());
        }
    }

    #[test]
    fn lines_beyond_those_of_a_look_are_counted_and_not_written() {
        let (_alive, ended) = mpsc::sync_channel(1);
        let lines = Lines::new(ended);
        log(&lines, LINES + 3);
        assert_eq!([lines.end(), lines.end()], [3, 0]);
    }

    #[test]
    fn a_flood_is_told_of_in_parts_with_a_pause_after_each_until_nobody_listens() {
        let (alive, ended) = mpsc::sync_channel(1);
        let lines = Lines::new(ended);
        let began = clock::monotonic().unwrap();
        log(&lines, 2 * MOST);
        assert!(clock::monotonic().unwrap() >= began + 2 * PAUSE);
        assert_eq!(lines.end(), 0, "both parts were ended");
        assert!(lines.pause());
        drop(alive);
        log(&lines, MOST + LINES + 1);
        assert_eq!(lines.end(), 1);
        assert!(!lines.pause(), "the thread ends");
    }
}
