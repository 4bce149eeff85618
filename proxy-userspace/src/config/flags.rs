//! The command line: each flag mirrors one field of the file, and says so in `--help`.

use std::path::PathBuf;

use clap::{Arg, ArgAction, ArgMatches, Command};

use super::{schema, settings::Settings};

/// A flag that sets the field at `path`.
struct Flag {
    name: &'static str,
    aliases: &'static [&'static str],
    short: Option<char>,
    path: &'static str,
    value: &'static str,
    heading: &'static str,
    help: &'static str,
}

const fn flag(
    heading: &'static str,
    name: &'static str,
    path: &'static str,
    value: &'static str,
    help: &'static str,
) -> Flag {
    Flag { name, aliases: &[], short: None, path, value, heading, help }
}

impl Flag {
    const fn alias(self, aliases: &'static [&'static str]) -> Self {
        Self { aliases, ..self }
    }

    const fn short(self, short: char) -> Self {
        Self { short: Some(short), ..self }
    }
}

const SOURCE: &str = "Where objects come from";
const NODE: &str = "This node";
const MODE: &str = "How it is programmed";
const OBSERVE: &str = "Health, metrics and logs";
/// A flag that may stand alone for true.
const SWITCH: &str = "true|false";

const FLAGS: &[Flag] = &[
    flag(
        SOURCE,
        "kubeconfig",
        "clientConnection.kubeconfig",
        "FILE",
        "Reach the API server as this kubeconfig says; without it, --master and --manifests: as a pod of the cluster does",
    ),
    flag(SOURCE, "master", "shunt.master", "URL", "The API server's address; overrides the kubeconfig's"),
    flag(
        SOURCE,
        "manifests",
        "shunt.manifests",
        "DIR",
        "Read Services, EndpointSlices and Nodes from the manifests in this directory and follow their changes; no API server is asked",
    ),
    flag(
        SOURCE,
        "config-sync-period",
        "configSyncPeriod",
        "DURATION",
        "How often objects are refreshed from the API server [default: 15m]",
    ),
    flag(
        NODE,
        "hostname-override",
        "hostnameOverride",
        "NAME",
        "The name of this node's Node object [default: $NODE_NAME, else the host name]",
    ),
    flag(
        NODE,
        "bind-address",
        "bindAddress",
        "IP",
        "The node's own address; its family decides the defaults of --healthz-bind-address and --metrics-bind-address [default: 0.0.0.0]",
    ),
    flag(
        NODE,
        "nodeport-addresses",
        "nodePortAddresses",
        "CIDR,...",
        "Serve node ports on node addresses in these ranges, or with 'primary' on those of the Node object [default: on all]",
    ),
    flag(NODE, "cluster-cidr", "clusterCIDR", "CIDR[,CIDR]", "The pods' range, at most one a family"),
    flag(
        NODE,
        "detect-local-mode",
        "detectLocalMode",
        "MODE",
        "How traffic of local pods is told: ClusterCIDR, NodeCIDR, BridgeInterface or InterfaceNamePrefix [default: ClusterCIDR]",
    ),
    flag(
        NODE,
        "pod-bridge-interface",
        "detectLocal.bridgeInterface",
        "NAME",
        "The bridge of local pods, for BridgeInterface",
    ),
    flag(
        NODE,
        "pod-interface-name-prefix",
        "detectLocal.interfaceNamePrefix",
        "PREFIX",
        "How links of local pods start, for InterfaceNamePrefix",
    ),
    flag(MODE, "mode", "mode", "MODE", "auto, ebpf, nftables, iptables or ipvs [default: auto]")
        .alias(&["proxy-mode"]),
    flag(
        MODE,
        "iptables-sync-period",
        "iptables.syncPeriod",
        "DURATION",
        "How often the kernel is compared with what it should hold; modes without a period of their own use it too [default: 30s]",
    ),
    flag(
        MODE,
        "iptables-min-sync-period",
        "iptables.minSyncPeriod",
        "DURATION",
        "Under load, the least time between two changes of the kernel; modes without a period of their own use it too [default: 1s]",
    ),
    flag(
        MODE,
        "iptables-masquerade-bit",
        "iptables.masqueradeBit",
        "BIT",
        "The bit of a packet's mark that has it masqueraded, 0 to 31 [default: 14]",
    ),
    flag(
        MODE,
        "iptables-localhost-nodeports",
        "iptables.localhostNodePorts",
        SWITCH,
        "Serve node ports on 127.0.0.1 in iptables mode too [default: true]",
    ),
    flag(MODE, "masquerade-all", "iptables.masqueradeAll", SWITCH, "Masquerade all traffic to cluster IPs"),
    flag(
        MODE,
        "ipvs-sync-period",
        "ipvs.syncPeriod",
        "DURATION",
        "How often the kernel is compared with what it should hold, in ipvs mode [default: 30s]",
    ),
    flag(
        MODE,
        "ipvs-min-sync-period",
        "ipvs.minSyncPeriod",
        "DURATION",
        "Under load, the least time between two changes of the kernel, in ipvs mode [default: 0s]",
    ),
    flag(MODE, "ipvs-scheduler", "ipvs.scheduler", "NAME", "The scheduler of virtual servers [default: rr]"),
    flag(
        MODE,
        "ipvs-exclude-cidrs",
        "ipvs.excludeCIDRs",
        "CIDR,...",
        "Leave virtual servers in these ranges alone that no Service has",
    ),
    flag(
        MODE,
        "ipvs-strict-arp",
        "ipvs.strictARP",
        SWITCH,
        "Do not answer ARP requests for addresses of Services (arp_ignore 1, arp_announce 2), in ipvs mode",
    ),
    flag(
        MODE,
        "ipvs-tcp-timeout",
        "ipvs.tcpTimeout",
        "DURATION",
        "How long IPVS remembers silent TCP connections; 0s leaves the kernel's own [default: 0s]",
    ),
    flag(
        MODE,
        "ipvs-tcpfin-timeout",
        "ipvs.tcpFinTimeout",
        "DURATION",
        "The same of TCP connections that one side closed [default: 0s]",
    ),
    flag(MODE, "ipvs-udp-timeout", "ipvs.udpTimeout", "DURATION", "The same of UDP flows [default: 0s]"),
    flag(
        MODE,
        "cgroup-root",
        "shunt.ebpf.cgroupRoot",
        "PATH",
        "The cgroup v2 directory whose processes are served [default: the first cgroup2 mount]",
    ),
    flag(
        MODE,
        "bpf-pin-dir",
        "shunt.ebpf.pinDir",
        "PATH",
        "Where eBPF maps and links are pinned [default: /sys/fs/bpf/shunt]",
    ),
    flag(
        MODE,
        "interfaces",
        "shunt.ebpf.interfaces",
        "GLOB,...",
        "Serve traffic from outside the sockets on links with these names only [default: on all but loopback]",
    ),
    flag(
        MODE,
        "exclude-interfaces",
        "shunt.ebpf.excludeInterfaces",
        "GLOB,...",
        "Leave links with these names alone, also where --interfaces names them",
    ),
    flag(
        OBSERVE,
        "healthz-bind-address",
        "healthzBindAddress",
        "IP:PORT",
        "Where /healthz and /livez answer; empty for nowhere [default: 0.0.0.0:10256]",
    ),
    flag(
        OBSERVE,
        "metrics-bind-address",
        "metricsBindAddress",
        "IP:PORT",
        "Where /metrics and /proxyMode answer; empty for nowhere [default: 127.0.0.1:10249]",
    ),
    flag(
        OBSERVE,
        "bind-address-hard-fail",
        "bindAddressHardFail",
        SWITCH,
        "Exit where an address to listen on is taken, instead of trying again",
    ),
    flag(
        OBSERVE,
        "v",
        "logging.verbosity",
        "LEVEL",
        "Log verbosity: up to 3 info, up to 5 debug, then trace, from 8 on that of libraries too",
    )
    .alias(&["verbosity"])
    .short('v'),
    flag(
        OBSERVE,
        "log-filter",
        "shunt.logFilter",
        "FILTER",
        "Log filter such as info,proxy_userspace=debug; overrides -v [default: $RUST_LOG]",
    ),
    flag(OBSERVE, "log-format", "logging.format", "text|json", "Log format [default: text]")
        .alias(&["logging-format"]),
];

/// How `shunt probe` reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum ProbeOutput {
    /// A table for people.
    Table,
    /// One JSON document.
    Json,
}

/// The command line, read but not yet checked.
#[derive(Clone, Debug)]
pub struct Flags {
    /// `--config`.
    pub config: Option<PathBuf>,
    /// `--cleanup`.
    pub cleanup: bool,
    /// The subcommand `probe`, and how it reports.
    pub probe: Option<ProbeOutput>,
    given: Vec<(&'static str, &'static str, String)>,
}

impl Flags {
    /// Reads a command line whose first item is the program's name. `Err` also stands for `--help` and `--version`.
    pub fn parse(
        arguments: impl IntoIterator<Item = impl Into<std::ffi::OsString> + Clone>,
    ) -> Result<Self, clap::Error> {
        let matches = command().try_get_matches_from(arguments)?;
        let given =
            FLAGS.iter().filter_map(|flag| Some((flag.name, flag.path, joined(&matches, flag)?))).collect();
        Ok(Self {
            config: matches.get_one("config").cloned(),
            probe: matches.subcommand_matches("probe").and_then(|probe| probe.get_one("output").copied()),
            cleanup: matches.get_one("cleanup").copied().unwrap_or(false),
            given,
        })
    }

    /// Overlays the settings with the flags that were given.
    pub(super) fn add_to(&self, settings: &mut Settings) {
        for (name, path, text) in &self.given {
            settings.add_flag(name, path, text);
        }
    }
}

/// The flag's value; lists may also be given by repeating the flag. Of others the last one counts, as upstream.
fn joined(matches: &ArgMatches, flag: &Flag) -> Option<String> {
    let values: Vec<_> = matches.get_many::<String>(flag.name)?.map(String::as_str).collect();
    let is_list = schema::field(flag.path).is_some_and(|field| field.kind.is_list());
    if is_list { Some(values.join(",")) } else { values.last().map(ToString::to_string) }
}

fn command() -> Command {
    let mut command = Command::new("shunt")
        .version(env!("CARGO_PKG_VERSION"))
        .about("A Kubernetes Service proxy: makes the Services of a cluster work on this node.")
        .after_help(
            "Flags that are given override the same setting of the file; settings given nowhere have kube-proxy's defaults.",
        )
        .arg(
            Arg::new("config")
                .long("config")
                .value_name("FILE")
                .value_parser(clap::value_parser!(PathBuf))
                .help("A KubeProxyConfiguration (kubeproxy.config.k8s.io/v1alpha1), with shunt's own settings under 'shunt'"),
        )
        .arg(
            switch(Arg::new("cleanup").long("cleanup").value_name(SWITCH).hide_possible_values(true).value_parser(clap::value_parser!(bool)))
                .help("Remove everything this program ever put into the kernel, and exit"),
        );
    command = command.subcommand(probe());
    for flag in FLAGS {
        let mut arg = Arg::new(flag.name)
            .long(flag.name)
            .visible_aliases(flag.aliases)
            .value_name(flag.value)
            .help_heading(flag.heading)
            .help(flag.help)
            .action(ArgAction::Append);
        if let Some(short) = flag.short {
            arg = arg.short(short);
        }
        command = command.arg(if flag.value == SWITCH { switch(arg) } else { arg });
    }
    command
}

fn probe() -> Command {
    Command::new("probe")
        .about("Tell what this kernel offers, what each mode lacks and what to do about it, and which mode auto takes")
        .after_help("Everything is tried, in a network namespace of its own where it would change something, and nothing is left behind. Exits with 1 if no mode works.")
        .arg(
            Arg::new("output")
                .short('o')
                .long("output")
                .value_name("FORMAT")
                .value_parser(clap::value_parser!(ProbeOutput))
                .default_value("table")
                .help("How to report"),
        )
}

/// `--flag` alone for true, and `--flag=false`, as Go's flags are.
fn switch(arg: Arg) -> Arg {
    arg.num_args(0..=1).require_equals(true).default_missing_value("true")
}

/// Every flag and the field it sets.
#[cfg(test)]
pub(super) fn paths() -> impl Iterator<Item = (&'static str, &'static str)> {
    FLAGS.iter().map(|flag| (flag.name, flag.path))
}
