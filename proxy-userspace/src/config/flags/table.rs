//! Every flag that sets something: kube-proxy's of 1.36 (`cmd/kube-proxy/app/options.go`, `component-base/logs`), and ours.

/// A flag.
pub(in crate::config) struct Flag {
    /// Without dashes.
    pub(in crate::config) name: &'static str,
    /// Other names of it.
    pub(super) aliases: &'static [&'static str],
    /// Its one letter.
    pub(super) short: Option<char>,
    /// What it sets.
    pub(in crate::config) sets: Sets,
    /// What its value is, in `--help`.
    pub(super) value: &'static str,
    /// The group it stands in.
    pub(super) heading: &'static str,
    /// What it is for; empty where the schema tells that it has no effect.
    pub(in crate::config) help: &'static str,
    /// Whether it counts beside `--config`. Most of kube-proxy's do not.
    pub(in crate::config) counts_beside_file: bool,
}

/// What a flag sets.
#[derive(Clone, Copy)]
pub(in crate::config) enum Sets {
    /// The field at this path.
    Field(&'static str),
    /// The port of the address that another flag sets; 0 turns it off.
    PortOf(&'static str),
    /// Nothing, and why.
    Nothing(&'static str),
}

/// One of kube-proxy's, which a file overrides as a whole.
const fn flag(
    heading: &'static str,
    name: &'static str,
    path: &'static str,
    value: &'static str,
    help: &'static str,
) -> Flag {
    let (sets, aliases) = (Sets::Field(path), &[] as &[&str]);
    Flag { name, aliases, short: None, sets, value, heading, help, counts_beside_file: false }
}

/// One that counts beside a file.
const fn always(
    heading: &'static str,
    name: &'static str,
    path: &'static str,
    value: &'static str,
    help: &'static str,
) -> Flag {
    Flag { counts_beside_file: true, ..flag(heading, name, path, value, help) }
}

impl Flag {
    const fn alias(self, aliases: &'static [&'static str]) -> Self {
        Self { aliases, ..self }
    }

    const fn short(self, short: char) -> Self {
        Self { short: Some(short), ..self }
    }

    const fn sets(self, sets: Sets) -> Self {
        Self { sets, ..self }
    }

    /// The path of the field it sets.
    pub(in crate::config) const fn path(&self) -> Option<&'static str> {
        match self.sets {
            Sets::Field(path) => Some(path),
            Sets::PortOf(_) | Sets::Nothing(_) => None,
        }
    }
}

const MODE: &str = "How the kernel is programmed";
const SOURCE: &str = "Where objects come from";
const NODE: &str = "This node and its traffic";
const EBPF: &str = "The ebpf mode";
const TABLES: &str = "The iptables and nftables modes";
const IPVS: &str = "The ipvs mode";
const SYSTEM: &str = "Kernel settings and the process";
const OBSERVE: &str = "Health and metrics";
const LOGS: &str = "Logs";
/// The group of what is accepted and does nothing.
pub(super) const VAIN: &str = "Accepted from kube-proxy, without an effect";

/// A flag that may stand alone for true.
pub(super) const SWITCH: &str = "true|false";
const SYNC: &str = "How often the kernel is compared with what it should hold";
const LEAST: &str = "Under load, the least time between two changes of the kernel; 0 for at once";

/// All of them, by group.
pub(in crate::config) const FLAGS: &[Flag] = &[
    always(MODE, "mode", "mode", "MODE", "auto, ebpf, nftables, iptables or ipvs; auto takes the first of these that works here and says why [default: auto]")
        .alias(&["proxy-mode"]),
    always(
        SOURCE,
        "master",
        "shunt.master",
        "URL",
        "The API server's address; overrides the kubeconfig's",
    ),
    flag(
        SOURCE,
        "kubeconfig",
        "clientConnection.kubeconfig",
        "FILE",
        "Reach the API server as this kubeconfig says; without it, --master and --manifests: as a pod of the cluster does",
    ),
    always(
        SOURCE,
        "manifests",
        "shunt.manifests",
        "DIR",
        "Read Services, EndpointSlices and Nodes from the manifests in this directory and follow their changes; no API server is asked",
    ),
    always(
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
        "The node's own address, if it is not the one in the Node object; its family decides the defaults of --healthz-bind-address and --metrics-bind-address",
    ),
    flag(
        NODE,
        "nodeport-addresses",
        "nodePortAddresses",
        "CIDR,...",
        "Serve node ports on node addresses in these ranges, or with 'primary' on those of the Node object [default: on all; in the nftables mode primary]",
    ),
    flag(NODE, "cluster-cidr", "clusterCIDR", "CIDR[,CIDR]", "The pods' range, at most one a family"),
    flag(
        NODE,
        "detect-local-mode",
        "detectLocalMode",
        "MODE",
        "How traffic of local pods is told: ClusterCIDR, NodeCIDR, BridgeInterface or InterfaceNamePrefix",
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
    flag(
        NODE,
        "masquerade-all",
        "iptables.masqueradeAll",
        SWITCH,
        "Masquerade all traffic to cluster IPs, in every mode",
    ),
    always(
        EBPF,
        "cgroup-root",
        "shunt.ebpf.cgroupRoot",
        "PATH",
        "The cgroup v2 directory whose processes are served [default: the first cgroup2 mount]",
    ),
    always(EBPF, "bpf-pin-dir", "shunt.ebpf.pinDir", "PATH", "Where eBPF maps and links are pinned"),
    always(
        EBPF,
        "interfaces",
        "shunt.ebpf.interfaces",
        "GLOB,...",
        "Serve traffic from outside the sockets on links with these names only [default: on all but loopback]",
    ),
    always(
        EBPF,
        "exclude-interfaces",
        "shunt.ebpf.excludeInterfaces",
        "GLOB,...",
        "Leave links with these names alone, also where --interfaces names them",
    ),
    flag(
        TABLES,
        "iptables-sync-period",
        "iptables.syncPeriod",
        "DURATION",
        "How often the kernel is compared with what it should hold, in every mode but ipvs",
    ),
    flag(
        TABLES,
        "iptables-min-sync-period",
        "iptables.minSyncPeriod",
        "DURATION",
        "Under load, the least time between two changes of the kernel, in every mode but ipvs; 0, as in the ebpf mode, for at once",
    ),
    flag(
        TABLES,
        "iptables-masquerade-bit",
        "iptables.masqueradeBit",
        "BIT",
        "The bit of a packet's mark that has it masqueraded, 0 to 31; not in the nftables mode, which has nftables.masqueradeBit in the file",
    ),
    flag(
        TABLES,
        "iptables-localhost-nodeports",
        "iptables.localhostNodePorts",
        SWITCH,
        "Serve node ports on 127.0.0.1 in iptables mode too",
    ),
    flag(IPVS, "ipvs-sync-period", "ipvs.syncPeriod", "DURATION", SYNC),
    flag(IPVS, "ipvs-min-sync-period", "ipvs.minSyncPeriod", "DURATION", LEAST),
    flag(IPVS, "ipvs-scheduler", "ipvs.scheduler", "NAME", "The scheduler of virtual servers [default: rr]"),
    flag(
        IPVS,
        "ipvs-exclude-cidrs",
        "ipvs.excludeCIDRs",
        "CIDR,...",
        "Virtual servers in these ranges are left alone when the mode clears up",
    ),
    flag(
        IPVS,
        "ipvs-strict-arp",
        "ipvs.strictARP",
        SWITCH,
        "Set arp_ignore to 1 and arp_announce to 2, so that the node does not answer for Service addresses",
    ),
    flag(IPVS, "ipvs-tcp-timeout", "ipvs.tcpTimeout", "DURATION", "Of idle TCP connections; 0 leaves the kernel's"),
    flag(
        IPVS,
        "ipvs-tcpfin-timeout",
        "ipvs.tcpFinTimeout",
        "DURATION",
        "Of TCP connections after a FIN; 0 leaves the kernel's",
    ),
    flag(IPVS, "ipvs-udp-timeout", "ipvs.udpTimeout", "DURATION", "Of UDP flows; 0 leaves the kernel's"),
    flag(
        SYSTEM,
        "conntrack-max-per-core",
        "conntrack.maxPerCore",
        "NUMBER",
        "Connections that conntrack may hold for each core; 0 leaves the kernel's limit",
    ),
    flag(
        SYSTEM,
        "conntrack-min",
        "conntrack.min",
        "NUMBER",
        "The least that conntrack may hold, however few cores there are",
    ),
    flag(
        SYSTEM,
        "conntrack-tcp-timeout-established",
        "conntrack.tcpEstablishedTimeout",
        "DURATION",
        "Of idle established connections in conntrack; 0 leaves the kernel's",
    ),
    flag(
        SYSTEM,
        "conntrack-tcp-timeout-close-wait",
        "conntrack.tcpCloseWaitTimeout",
        "DURATION",
        "Of connections in CLOSE_WAIT in conntrack; 0 leaves the kernel's",
    ),
    flag(
        SYSTEM,
        "conntrack-tcp-be-liberal",
        "conntrack.tcpBeLiberal",
        SWITCH,
        "Have conntrack take packets outside the TCP window for valid",
    ),
    flag(
        SYSTEM,
        "conntrack-udp-timeout",
        "conntrack.udpTimeout",
        "DURATION",
        "Of UDP flows without an answer in conntrack; 0 leaves the kernel's",
    ),
    flag(
        SYSTEM,
        "conntrack-udp-timeout-stream",
        "conntrack.udpStreamTimeout",
        "DURATION",
        "Of UDP flows with answers in conntrack; 0 leaves the kernel's",
    ),
    flag(
        SYSTEM,
        "oom-score-adj",
        "oomScoreAdj",
        "NUMBER",
        "How readily the kernel ends this process when memory runs out, -1000 (never) to 1000",
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
    always(
        OBSERVE,
        "service-metrics",
        "shunt.serviceMetrics.enabled",
        SWITCH,
        "Count connections and bytes for each Service, in the modes ebpf and ipvs; in ebpf refusals and drops too",
    ),
    flag(OBSERVE, "profiling", "enableProfiling", SWITCH, "Answer profiling requests where metrics are"),
    flag(
        OBSERVE,
        "healthz-port",
        "healthzBindAddress",
        "PORT",
        "Deprecated: the port of --healthz-bind-address where that has none; 0 for nowhere",
    )
    .sets(Sets::PortOf("healthz-bind-address")),
    flag(
        OBSERVE,
        "metrics-port",
        "metricsBindAddress",
        "PORT",
        "Deprecated: the port of --metrics-bind-address where that has none; 0 for nowhere",
    )
    .sets(Sets::PortOf("metrics-bind-address")),
    always(
        LOGS,
        "v",
        "logging.verbosity",
        "LEVEL",
        "Log verbosity: up to 3 info, up to 5 debug, then trace, from 8 on that of libraries too",
    )
    .alias(&["verbosity"])
    .short('v'),
    always(LOGS, "logging-format", "logging.format", "text|json", "Log format").alias(&["log-format"]),
    always(
        LOGS,
        "log-filter",
        "shunt.logFilter",
        "FILTER",
        "Log filter such as info,proxy_userspace=debug; overrides -v [default: $RUST_LOG]",
    ),
    always(
        LOGS,
        "ebpf-log",
        "shunt.ebpf.log",
        "off|error|info|debug",
        "In the ebpf mode, also log single connections and packets: what goes wrong, what is turned away, and what is translated",
    ),
    always(VAIN, "log-flush-frequency", "logging.flushFrequency", "DURATION", ""),
    always(VAIN, "vmodule", "logging.vmodule", "PATTERN=LEVEL,...", ""),
    always(VAIN, "log-text-split-stream", "logging.options.text.splitStream", SWITCH, ""),
    always(VAIN, "log-text-info-buffer-size", "logging.options.text.infoBufferSize", "BYTES", ""),
    always(VAIN, "log-json-split-stream", "logging.options.json.splitStream", SWITCH, ""),
    always(VAIN, "log-json-info-buffer-size", "logging.options.json.infoBufferSize", "BYTES", ""),
    flag(VAIN, "feature-gates", "featureGates", "NAME=true|false,...", ""),
    flag(VAIN, "kube-api-content-type", "clientConnection.contentType", "TYPE", ""),
    flag(VAIN, "kube-api-qps", "clientConnection.qps", "NUMBER", ""),
    flag(VAIN, "kube-api-burst", "clientConnection.burst", "NUMBER", ""),
    flag(VAIN, "config-sync-period", "configSyncPeriod", "DURATION", ""),
    flag(VAIN, "show-hidden-metrics-for-version", "showHiddenMetricsForVersion", "VERSION", ""),
    flag(VAIN, "boot-id-file", "", "FILE", "").sets(Sets::Nothing("a library reads it that is no part of shunt")),
    flag(VAIN, "machine-id-file", "", "FILE", "").sets(Sets::Nothing("a library reads it that is no part of shunt")),
];
