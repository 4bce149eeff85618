//! `shunt trace` on the command line.

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

use clap::{Arg, ArgMatches, Command, ValueEnum, value_parser};

use super::filter::{TraceFilter, VerdictFilter};
use crate::duration;

/// `shunt trace`.
#[derive(Clone, Debug)]
pub struct TraceArguments {
    /// What to trace.
    pub filter: TraceFilter,
    /// After which time it ends. `None` for an interrupt.
    pub limit: Option<Duration>,
    /// How to print.
    pub output: TraceOutput,
    /// Where packets are written: [`crate::output_file`].
    pub capture: Option<PathBuf>,
}

/// How to print.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TraceOutput {
    /// Lines for people.
    Text,
    /// A JSON document a line.
    Json,
}

const EXAMPLES: &str = "Examples:
  shunt trace
  shunt trace shop/web --for 10s
  shunt trace 203.0.113.9 --verdict refused,dropped
  shunt trace shop/web --pcap web.pcapng --for 1m -o json";

/// Returns the definition of the command.
pub fn command() -> Command {
    Command::new("trace")
        .about("Print what happens to connections and packets to Services, as it happens")
        .after_help(format!(
            "Asks the shunt that runs in this network namespace, which traces only while a command asks it to. It \
             exits with status 1 if nothing answers or the trace breaks off, and with 2 if the command line is \
             wrong.\n\n{EXAMPLES}"
        ))
        .arg(
            Arg::new("what")
                .value_name("SERVICE|ADDRESS[:PORT]")
                .value_parser(what)
                .help("Only this Service, NAME or NAMESPACE/NAME, or connections from or to this address"),
        )
        .arg(
            Arg::new("namespace")
                .short('n')
                .long("namespace")
                .value_name("NAMESPACE")
                .help("Only Services of this namespace [default: all]"),
        )
        .arg(
            Arg::new("verdict")
                .long("verdict")
                .value_name("VERDICTS")
                .value_parser(|text: &str| text.parse::<VerdictFilter>())
                .help("Only these, separated by commas: translated, passed, refused, dropped [default: all]"),
        )
        .arg(
            Arg::new("for")
                .long("for")
                .value_name("DURATION")
                .value_parser(limit)
                .help("Ends after this time, such as 10s or 1m30s [default: when interrupted]"),
        )
        .arg(
            Arg::new("output")
                .short('o')
                .long("output")
                .value_name("FORMAT")
                .value_parser(value_parser!(TraceOutput))
                .default_value("text")
                .help("Format: text, or json for a document a line"),
        )
        .arg(pcap_argument())
}

fn pcap_argument() -> Arg {
    Arg::new("pcap").long("pcap").value_name("FILE").value_parser(value_parser!(PathBuf)).help(
        "Write the packets that programs saw on links, before and after the translation (pcapng), to this \
         file, or with - to standard output",
    )
}

impl TraceArguments {
    /// Reads the arguments of the command.
    pub fn read(matches: &ArgMatches) -> Option<Self> {
        let capture = matches.get_one::<PathBuf>("pcap").cloned();
        let mut filter = matches.get_one::<TraceFilter>("what").cloned().unwrap_or_default();
        if let Some(namespace) = matches.get_one::<String>("namespace") {
            filter.namespace = Some(namespace.clone());
        }
        filter.verdicts = matches.get_one::<VerdictFilter>("verdict").cloned().unwrap_or_default();
        filter.packets = capture.is_some();
        Some(Self {
            filter,
            limit: matches.get_one::<Duration>("for").copied(),
            output: *matches.get_one("output")?,
            capture,
        })
    }
}

/// Reads a Service, or an address with or without a port.
fn what(text: &str) -> Result<TraceFilter, String> {
    if let Ok(address) = text.parse::<SocketAddr>() {
        let (address, port) = (Some(address.ip()), Some(address.port()));
        return Ok(TraceFilter { address, port, ..TraceFilter::default() });
    }
    if let Ok(address) = text.parse::<IpAddr>() {
        return Ok(TraceFilter { address: Some(address), ..TraceFilter::default() });
    }
    let (namespace, name) =
        text.split_once('/').map_or((None, text), |(namespace, name)| (Some(namespace), name));
    let is_name = |name: &str| {
        !name.is_empty() && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
    };
    if is_name(name) && namespace.is_none_or(is_name) {
        let (namespace, name) = (namespace.map(ToOwned::to_owned), Some(name.to_owned()));
        return Ok(TraceFilter { namespace, name, ..TraceFilter::default() });
    }
    Err("must be the name of a Service, NAMESPACE/NAME, an address, or ADDRESS:PORT".to_owned())
}

/// Reads a duration as kubectl writes it.
fn limit(text: &str) -> Result<Duration, String> {
    let invalid = || format!("{text} is no duration: must be like 10s, 1m30s or 500ms, and longer than 0");
    duration::parse(text).filter(|limit| !limit.is_zero()).ok_or_else(invalid)
}
