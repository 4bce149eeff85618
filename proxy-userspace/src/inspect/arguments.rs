//! The verbs on the command line.

use std::{net::IpAddr, path::PathBuf};

use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};

use super::{ExplainArguments, FlowFilter, Output, Resource, explain_arguments};
use crate::{
    kernel::bpf::DEFAULT_PIN_DIR,
    trace::{self, TraceArguments},
};

pub(super) const EXIT: &str = "It exits with status 1 if nothing answers or the named Service is not there, and with 2 if the command \
                    line is wrong.";

/// A verb that asks the daemon of this node.
#[derive(Clone, Debug)]
pub enum Verb {
    /// `get`.
    Get(GetArguments),
    /// `explain`.
    Explain(ExplainArguments),
    /// `trace`.
    Trace(TraceArguments),
}

/// `shunt get`.
#[derive(Clone, Debug)]
pub struct GetArguments {
    /// What to list.
    pub resource: Resource,
    /// Only this Service.
    pub name: Option<String>,
    /// Only Services of this namespace.
    pub namespace: Option<String>,
    /// Compare the kernel with what was written.
    pub drift: bool,
    /// Which flows.
    pub flows: FlowFilter,
    /// How to print.
    pub output: Output,
    /// Where pins are, if no shunt runs that says it.
    pub pin_directory: PathBuf,
    /// Print rows that change, until a signal ends it.
    pub watch: bool,
}

impl GetArguments {
    /// Returns an argument that was given and selects nothing in this list.
    pub fn unused(&self) -> Option<&'static str> {
        let is_of_services = self.resource.has_services();
        let is_of_flows = self.resource == Resource::Flows;
        let has_clients = self.resource.has_clients();
        let has_vips = is_of_flows || self.resource == Resource::Connections;
        let given = [
            ("NAME", self.name.is_some(), is_of_services),
            ("--namespace", self.namespace.is_some(), is_of_services),
            ("--drift", self.drift, self.resource == Resource::Services),
            ("--client", self.flows.client.is_some(), has_clients),
            ("--vip", self.flows.vip.is_some(), has_vips),
            ("--endpoint", self.flows.endpoint.is_some(), has_clients),
            ("--state", self.flows.state.is_some(), has_vips),
            ("--min-idle", self.flows.min_idle.is_some(), is_of_flows),
            ("--max-idle", self.flows.max_idle.is_some(), is_of_flows),
            ("--min-age", self.flows.min_age.is_some(), is_of_flows),
            ("--max-age", self.flows.max_age.is_some(), is_of_flows),
        ];
        given.into_iter().find_map(|(name, is_given, is_used)| (is_given && !is_used).then_some(name))
    }
}

impl Verb {
    /// Returns the definitions of the verbs.
    pub fn commands() -> [Command; 3] {
        [get(), explain_arguments::command(), trace::command()]
    }

    /// Reads a verb from the command line. `None` if it has none. The error is for the person who
    /// wrote it.
    pub fn read(matches: &ArgMatches) -> Result<Option<Self>, clap::Error> {
        Ok(match matches.subcommand() {
            Some(("get", get)) => read_get(get).map(Self::Get),
            Some(("explain", explain)) => explain_arguments::read(explain).map(Self::Explain),
            Some(("trace", trace)) => Some(Self::Trace(TraceArguments::read(trace)?)),
            _ => None,
        })
    }
}

fn get() -> Command {
    let argument = |name: &'static str, value: &'static str, help: &'static str| {
        Arg::new(name).value_name(value).help(help)
    };
    Command::new("get")
        .about("List what shunt serves on this node: services, endpoints, flows, connections, affinity, links, exempt, left-out or drift")
        .after_help(format!("Asks the shunt that runs in this network namespace, in any mode. {EXIT}"))
        .arg(
            argument("resource", "RESOURCE", "What to list")
                .required(true)
                .value_parser(value_parser!(Resource)),
        )
        .arg(argument("name", "NAME", "Only this Service: NAME, or NAMESPACE/NAME"))
        .arg(
            argument("namespace", "NAMESPACE", "Only Services of this namespace [default: all]")
                .short('n')
                .long("namespace"),
        )
        .arg(
            Arg::new("drift")
                .long("drift")
                .action(ArgAction::SetTrue)
                .help("Compare the kernel with what was written for each of these services"),
        )
        .args(flow_filters())
        .arg(
            argument("bpf-pin-dir", "DIRECTORY", "Where pins are, if no shunt runs that says it")
                .long("bpf-pin-dir")
                .value_parser(value_parser!(PathBuf))
                .default_value(DEFAULT_PIN_DIR),
        )
        .arg(output_argument("Format: table, wide, json, yaml, or jsonpath=TEMPLATE"))
        .arg(
            Arg::new("watch")
                .short('w')
                .long("watch")
                .action(ArgAction::SetTrue)
                .help("Print rows again when they change, until interrupted"),
        )
}

/// The states of flows, and those of sockets.
const STATES: [&str; 12] = [
    "unanswered",
    "established",
    "closing",
    "closed",
    "syn-sent",
    "syn-recv",
    "fin-wait-1",
    "fin-wait-2",
    "close-wait",
    "last-ack",
    "new-syn-recv",
    "unconnected",
];

fn flow_filters() -> [Arg; 8] {
    let filter = |name: &'static str, value: &'static str, help: &'static str| {
        Arg::new(name).long(name).value_name(value).help(help).help_heading("Only these flows or clients")
    };
    let address = |name, help| filter(name, "ADDRESS", help).value_parser(ip_address);
    let time = |name, help| filter(name, "TIME", help).value_parser(seconds);
    [
        address("client", "Of this client"),
        address("vip", "To this address of a Service"),
        address("endpoint", "To this endpoint"),
        filter("state", "STATE", "In this state").value_parser(STATES),
        time(
            "min-idle",
            "Without a packet for at least this time, such as 90s, 5m or 2h (flows of programs)",
        ),
        time("max-idle", "With a packet in this time (flows of programs)"),
        time("min-age", "At least this old (flows of netfilter, with net.netfilter.nf_conntrack_timestamp)"),
        time("max-age", "At most this old (the same flows)"),
    ]
}

fn read_get(matches: &ArgMatches) -> Option<GetArguments> {
    let text = |name: &str| matches.get_one::<String>(name).cloned();
    let (mut name, mut namespace) = (text("name"), text("namespace"));
    if let Some((of, own)) = name.as_deref().and_then(|name| name.split_once('/')) {
        (namespace, name) = (Some(of.to_owned()), Some(own.to_owned()));
    }
    let resource = *matches.get_one("resource")?;
    let address = |name: &str| matches.get_one::<IpAddr>(name).copied();
    let time = |name: &str| matches.get_one::<u64>(name).copied();
    let flows = FlowFilter {
        client: address("client"),
        vip: address("vip"),
        endpoint: address("endpoint"),
        state: text("state"),
        namespace: namespace.clone(),
        name: name.clone(),
        min_idle: time("min-idle"),
        max_idle: time("max-idle"),
        min_age: time("min-age"),
        max_age: time("max-age"),
    };
    Some(GetArguments {
        resource,
        name,
        namespace,
        drift: matches.get_flag("drift"),
        flows,
        output: matches.get_one::<Output>("output")?.clone(),
        pin_directory: matches.get_one::<PathBuf>("bpf-pin-dir")?.clone(),
        watch: matches.get_flag("watch"),
    })
}

/// Returns the definition of `--output`.
pub fn output_argument(help: &'static str) -> Arg {
    Arg::new("output")
        .short('o')
        .long("output")
        .value_name("FORMAT")
        .value_parser(|text: &str| text.parse::<Output>())
        .default_value("table")
        .help(help)
}

fn ip_address(text: &str) -> Result<IpAddr, &'static str> {
    text.parse().map_err(|_| "must be an IP address, such as 10.244.1.7")
}

/// Reads a time with one of the units s, m, h and d, in seconds.
fn seconds(text: &str) -> Result<u64, String> {
    let (number, unit) = match text.char_indices().last() {
        Some((at, 's')) => (&text[..at], 1),
        Some((at, 'm')) => (&text[..at], 60),
        Some((at, 'h')) => (&text[..at], 3600),
        Some((at, 'd')) => (&text[..at], 86_400),
        _ => ("", 0),
    };
    let seconds = number.parse::<u64>().ok().and_then(|number| number.checked_mul(unit));
    seconds.ok_or_else(|| format!("{text} is no time: must be a whole number with s, m, h or d, such as 90s"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{config::Flags, explain::NamedQuestion};

    fn verb(words: &[&str]) -> Result<Option<Verb>, String> {
        let words = std::iter::once("shunt").chain(words.iter().copied());
        Flags::parse(words).map(|flags| flags.verb).map_err(|error| error.to_string())
    }

    #[test]
    fn a_service_is_named_with_or_without_its_namespace() {
        for words in [&["get", "services", "web", "-n", "shop"][..], &["get", "svc", "shop/web"]] {
            let Ok(Some(Verb::Get(get))) = verb(words) else { panic!("{words:?}") };
            assert_eq!((get.namespace.as_deref(), get.name.as_deref()), (Some("shop"), Some("web")));
            assert_eq!(get.resource, Resource::Services);
        }
    }

    #[test]
    fn a_time_has_a_unit() {
        for (text, expected) in [("90s", 90), ("5m", 300), ("2h", 7200), ("1d", 86_400)] {
            let Ok(Some(Verb::Get(get))) = verb(&["get", "flows", "--min-idle", text]) else {
                panic!("{text}")
            };
            assert_eq!(get.flows.min_idle, Some(expected));
        }
    }

    #[test]
    fn names_without_a_namespace_get_the_one_of_the_option() {
        let words = &["explain", "pod/web-0", "cart:http", "-n", "shop"];
        let Ok(Some(Verb::Explain(explain))) = verb(words) else { panic!("{words:?}") };
        let NamedQuestion { from, to, .. } = explain.question;
        assert_eq!(
            (from.to_string(), to.to_string()),
            ("shop/web-0".to_owned(), "shop/cart:http".to_owned())
        );
    }

    #[test]
    fn what_is_wrong_on_the_command_line_is_named() {
        for (words, expected) in [
            (&["explain", "10.0.0", "10.0.0.1:53"][..], "must be node, the address of the client, or a pod"),
            (&["explain", "node", "10.0.0:53"], "10.0.0 is neither an address nor a Service"),
            (&["explain", "node", "10.0.0.1:53/icmp"], "icmp is no protocol of Services"),
            (&["get", "pods"], "invalid value 'pods'"),
            (&["trace", "Web"], "must be the name of a Service, NAMESPACE/NAME, an address, or ADDRESS:PORT"),
            (
                &["trace", "--verdict", "lost"],
                "lost is no verdict: must be translated, passed, refused or dropped",
            ),
            (&["trace", "--for", "0s"], "0s is no duration: must be like 10s"),
            (&["get", "flows", "--min-idle", "soon"], "soon is no time"),
            (&["get", "flows", "--min-idle", "5"], "5 is no time: must be a whole number with s, m, h or d"),
            (&["trace", "--for", "5"], "5 is no duration: must be like 10s"),
            (&["get", "flows", "--client", "n1"], "must be an IP address, such as 10.244.1.7"),
            (&["get", "services", "-o", "xml"], "must be table, wide, json, yaml or jsonpath"),
            (&["get", "services", "-o", "jsonpath={.items"], "a brace is not closed"),
            (&["get", "services", "-o", "jsonpath={range .items}"], "is not a JSONPath expression"),
        ] {
            let error = verb(words).expect_err("wrong");
            assert!(error.contains(expected), "{words:?}: {error}");
        }
    }
}
