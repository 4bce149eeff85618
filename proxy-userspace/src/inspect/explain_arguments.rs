//! `shunt explain` on the command line.

use std::path::PathBuf;

use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};

use super::{
    Output,
    arguments::{EXIT, output_argument},
};
use crate::{
    explain::{ClientKind, ClientName, DEFAULT_NAMESPACE, DestinationName, NamedQuestion},
    mode::Mode,
};

/// `shunt explain`.
#[derive(Clone, Debug)]
pub struct ExplainArguments {
    /// The question.
    pub question: NamedQuestion,
    /// Ask the kernel, too.
    pub check: bool,
    /// The node to explain, instead of the one on which the command runs.
    pub offline: Option<OfflineNode>,
    /// How to print.
    pub output: Output,
}

/// A node of which only manifests are known.
#[derive(Clone, Debug)]
pub struct OfflineNode {
    /// `--manifests`.
    pub manifests: PathBuf,
    /// `--node`. `None` for the name of this host.
    pub name: Option<String>,
    /// `--mode`.
    pub mode: Mode,
    /// `--config`.
    pub config: Option<PathBuf>,
}

const EXAMPLES: &str = "Examples:
  shunt explain node 10.96.0.10:53/udp
  shunt explain 10.244.1.7 10.96.0.1:443
  shunt explain pod/web-0 dns.kube-system:53/udp --namespace shop
  shunt explain shop/web-0 shop/cart:http
  shunt explain 203.0.113.9 192.0.2.11:30080 -o json";

pub(super) fn command() -> Command {
    let about = "Explain what happens to a connection: which hook sees it, which Service and endpoints it gets, and why";
    let from_help = "Who connects: node, an address, or a pod: NAME, pod/NAME or NAMESPACE/NAME";
    let to_help = "Where to: an address, or a Service: NAME, svc/NAME, NAMESPACE/NAME or NAME.NAMESPACE[.svc...]. \
                   PORT is a number, or the name of a Service's port; a Service with one port needs none. \
                   PROTOCOL is tcp (the default), udp or sctp";
    Command::new("explain")
        .about(about)
        .after_help(format!(
            "A pod that is no endpoint of a Service is read from the API server, which shunt must be permitted to do. \
             {EXIT}\n\n{EXAMPLES}"
        ))
        .arg(
            Arg::new("from")
                .required(true)
                .value_name("FROM")
                .value_parser(|text: &str| text.parse::<ClientName>())
                .help(from_help),
        )
        .arg(
            Arg::new("to")
                .required(true)
                .value_name("TO[:PORT[/PROTOCOL]]")
                .value_parser(|text: &str| text.parse::<DestinationName>())
                .help(to_help),
        )
        .args(question_options())
        .arg(output_argument("Format: table, json, yaml, or jsonpath=TEMPLATE"))
        .args(offline())
}

/// Returns the options of a question.
fn question_options() -> [Arg; 4] {
    [
        Arg::new("namespace")
            .short('n')
            .long("namespace")
            .value_name("NAMESPACE")
            .default_value(DEFAULT_NAMESPACE)
            .help("The namespace of a pod or Service that is named without one"),
        Arg::new("client")
            .long("client")
            .value_name("WHERE")
            .value_parser(value_parser!(ClientKind))
            .default_value("auto")
            .help("Where FROM is: a pod of this node, or outside; auto finds out"),
        Arg::new("outside-cgroup")
            .long("outside-cgroup")
            .action(ArgAction::SetTrue)
            .help("The client is a process of this node outside --cgroup-root"),
        Arg::new("check")
            .long("check")
            .action(ArgAction::SetTrue)
            .conflicts_with("manifests")
            .help("Ask the kernel, and say where it differs from the model; then exit with status 3"),
    ]
}

/// Returns the arguments that explain another node.
fn offline() -> [Arg; 4] {
    let offline = |name: &'static str, value: &'static str, help: &'static str| {
        Arg::new(name).long(name).value_name(value).help(help).help_heading("Without a daemon")
    };
    let mode = |text: &str| {
        Mode::from_name(text).ok_or_else(|| "must be ebpf, nftables, iptables or ipvs".to_owned())
    };
    let manifests = "Explain a node with the Services, EndpointSlices and Nodes in this directory";
    [
        offline("manifests", "DIR", manifests).value_parser(value_parser!(PathBuf)),
        offline("node", "NAME", "Its name [default: that of this host]").requires("manifests"),
        offline("mode", "MODE", "Its mode [default: ebpf]").requires("manifests").value_parser(mode),
        offline("config", "FILE", "Its configuration (KubeProxyConfiguration)")
            .requires("manifests")
            .value_parser(value_parser!(PathBuf)),
    ]
}

fn read_offline(matches: &ArgMatches) -> Option<OfflineNode> {
    Some(OfflineNode {
        manifests: matches.get_one::<PathBuf>("manifests")?.clone(),
        name: matches.get_one::<String>("node").cloned(),
        mode: matches.get_one("mode").copied().unwrap_or(Mode::Ebpf),
        config: matches.get_one::<PathBuf>("config").cloned(),
    })
}

pub(super) fn read(matches: &ArgMatches) -> Option<ExplainArguments> {
    let namespace = matches.get_one::<String>("namespace")?;
    let question = NamedQuestion {
        from: matches.get_one::<ClientName>("from")?.clone().in_namespace(namespace),
        client: *matches.get_one("client")?,
        to: matches.get_one::<DestinationName>("to")?.clone().in_namespace(namespace),
        outside_cgroup: matches.get_flag("outside-cgroup"),
    };
    let offline = read_offline(matches);
    let check = matches.get_flag("check");
    Some(ExplainArguments { question, check, offline, output: matches.get_one::<Output>("output")?.clone() })
}
