//! `shunt trace` on the command line.

use std::{path::PathBuf, time::Duration};

use clap::{Arg, ArgMatches, Command, ValueEnum, error::ErrorKind, value_parser};

use super::filter::{FilterPort, TraceFilter, VerdictFilter};
use crate::{
    duration,
    explain::{DestinationName, HostName, PortName},
};

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
  shunt trace svc/web:http --namespace shop
  shunt trace 203.0.113.9 --verdict refused,dropped
  shunt trace shop/web --pcap web.pcapng --for 1m -o json";

/// Returns the definition of the command.
pub fn command() -> Command {
    Command::new("trace")
        .about("Print what happens to connections and packets to Services, as it happens")
        .after_help(format!(
            "Asks the shunt that runs in this network namespace, which traces only while a command asks it to. It \
             exits with status 1 if nothing answers, the named Service is not there or the trace breaks off, and with 2 if the command line is \
             wrong.\n\n{EXAMPLES}"
        ))
        .arg(
            Arg::new("what")
                .value_name("SERVICE|ADDRESS[:PORT]")
                .value_parser(what)
                .help(
                    "Only this Service: NAME, svc/NAME, NAMESPACE/NAME or NAME.NAMESPACE[.svc...], with the name or \
                     number of a port; or only connections from or to this address",
                ),
        )
        .arg(
            Arg::new("namespace")
                .short('n')
                .long("namespace")
                .value_name("NAMESPACE")
                .help("Only Services of this namespace [default: all], or the namespace of a Service that is named without one"),
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
    /// Returns how long it traces, in words.
    pub fn how_long(&self) -> String {
        self.limit.map_or("until interrupted".to_owned(), |limit| format!("for {}", duration::format(limit)))
    }

    /// Reads the arguments of the command. The error is for the person who wrote them.
    pub fn read(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let wrong = |text: String| command().bin_name("shunt trace").error(ErrorKind::ArgumentConflict, text);
        let capture = matches.get_one::<PathBuf>("pcap").cloned();
        let mut filter = matches.get_one::<TraceFilter>("what").cloned().unwrap_or_default();
        if let Some(namespace) = matches.get_one::<String>("namespace") {
            let of_name = filter.namespace.replace(namespace.clone());
            if let Some(other) = of_name.filter(|other| other != namespace) {
                let service = filter.name.unwrap_or_default();
                return Err(wrong(format!("--namespace {namespace} contradicts {other}/{service}")));
            }
        }
        filter.verdicts = matches.get_one::<VerdictFilter>("verdict").cloned().unwrap_or_default();
        filter.packets = capture.is_some();
        Ok(Self {
            filter,
            limit: matches.get_one::<Duration>("for").copied(),
            output: matches.get_one("output").copied().unwrap_or(TraceOutput::Text),
            capture,
        })
    }
}

/// Reads a Service, with or without a port, or an address with or without one.
fn what(text: &str) -> Result<TraceFilter, String> {
    let DestinationName { host, port, protocol } = text.parse().map_err(|error| {
        let host = text.rsplit_once(':').map_or(text, |(host, _)| host);
        if host != text && host.parse::<DestinationName>().is_ok() { error } else { WHAT.to_owned() }
    })?;
    if protocol.is_some() {
        return Err(format!("a trace has all protocols: {WHAT}"));
    }
    match (host, port) {
        (HostName::Address(address), None) => {
            Ok(TraceFilter { address: Some(address), ..TraceFilter::default() })
        }
        (HostName::Address(address), Some(PortName::Number(port))) => {
            let (address, port) = (Some(address), Some(port.get()));
            Ok(TraceFilter { address, port, ..TraceFilter::default() })
        }
        (HostName::Address(_), Some(PortName::Name(name))) => Err(format!("{name} is no number of a port")),
        (HostName::Service(service), port) => {
            let (namespace, name) = service.parts();
            let (namespace, name) = (namespace.map(ToOwned::to_owned), Some(name.to_owned()));
            let service_port = port.map(|port| match port {
                PortName::Number(number) => FilterPort::Number(number),
                PortName::Name(name) => FilterPort::Name(name),
            });
            Ok(TraceFilter { namespace, name, service_port, ..TraceFilter::default() })
        }
    }
}

const WHAT: &str = "must be the name of a Service, NAMESPACE/NAME, an address, or ADDRESS:PORT";

/// Reads a duration as kubectl writes it.
fn limit(text: &str) -> Result<Duration, String> {
    let invalid = || format!("{text} is no duration: must be like 10s, 1m30s or 500ms, and longer than 0");
    duration::parse(text).filter(|limit| !limit.is_zero()).ok_or_else(invalid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_has_the_names_that_explain_takes() {
        for (text, expected) in [
            ("web", "name=web"),
            ("svc/web", "name=web"),
            ("shop/web", "namespace=shop&name=web"),
            ("web.shop", "namespace=shop&name=web"),
            ("web.shop.svc.cluster.local", "namespace=shop&name=web"),
            ("shop/web:http", "namespace=shop&name=web&service_port=http"),
            ("web:80", "name=web&service_port=80"),
            ("192.0.2.1", "address=192.0.2.1"),
            ("192.0.2.1:80", "address=192.0.2.1&port=80"),
            ("[fd00::1]:80", "address=fd00%3A%3A1&port=80"),
        ] {
            let filter = what(text).expect(text);
            let query = serde_urlencoded::to_string(filter).expect("a query");
            assert_eq!(query, format!("{expected}&verdicts=&packets=false"));
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, expected) in [
            ("10.96.0.80:99999", "99999 is no port: must be 1 to 65535"),
            ("10.96.0.80:0", "no Service has port 0"),
            ("10.96.0.80:http", "http is no number of a port"),
            ("10.96.0", WHAT),
            ("a/b/c", WHAT),
        ] {
            assert_eq!(what(text), Err(expected.to_owned()), "{text}");
        }
        let read = |words: &[&str]| {
            let matches = command().try_get_matches_from(words).expect("arguments");
            TraceArguments::read(&matches).map_err(|error| error.to_string())
        };
        let error = read(&["trace", "shop/web", "-n", "default"]).expect_err("a contradiction");
        assert!(error.contains("--namespace default contradicts shop/web"), "{error}");
        assert!(error.contains("Usage: shunt trace "), "{error}");
        let filter = read(&["trace", "svc/web", "-n", "shop"]).expect("a filter").filter;
        assert_eq!((filter.namespace.as_deref(), filter.name.as_deref()), (Some("shop"), Some("web")));
        for (words, expected) in
            [(&["trace"][..], "until interrupted"), (&["trace", "--for", "8s"], "for 8s")]
        {
            assert_eq!(read(words).expect("arguments").how_long(), expected);
        }
    }
}
