//! Every flag that sets something: kube-proxy's of 1.36 (`cmd/kube-proxy/app/options.go`,
//! `component-base/logs`), and shunt's own.

/// A flag.
pub(in crate::config) struct Flag {
    /// The name without dashes. A flag with one letter also works with one dash.
    pub(in crate::config) name: &'static str,
    /// Other names.
    pub(super) aliases: &'static [&'static str],
    /// What the flag sets.
    pub(in crate::config) sets: Target,
    /// The placeholder of the value in `--help`.
    pub(super) value: &'static str,
    /// The group in `--help`.
    pub(super) heading: &'static str,
    /// The description; empty for a flag without an effect.
    pub(in crate::config) help: &'static str,
    /// The flag overrides the file of `--config`. Most flags of kube-proxy are ignored beside it.
    pub(in crate::config) overrides_file: bool,
}

/// What a flag sets.
#[derive(Clone, Copy)]
pub(in crate::config) enum Target {
    /// The field at this path.
    Field(&'static str),
    /// The port of the address that another flag sets; 0 turns the address off.
    PortOf(&'static str),
    /// Nothing, for this reason.
    Nothing(&'static str),
}

/// A flag that is ignored beside `--config`.
const fn flag(heading: &'static str, name: &'static str, path: &'static str, value: &'static str) -> Flag {
    let sets = Target::Field(path);
    Flag { name, aliases: &[], sets, value, heading, help: "", overrides_file: false }
}

/// A flag that overrides the file.
const fn always(heading: &'static str, name: &'static str, path: &'static str, value: &'static str) -> Flag {
    Flag { overrides_file: true, ..flag(heading, name, path, value) }
}

impl Flag {
    const fn help(self, help: &'static str) -> Self {
        Self { help, ..self }
    }

    const fn alias(self, aliases: &'static [&'static str]) -> Self {
        Self { aliases, ..self }
    }

    const fn sets(self, sets: Target) -> Self {
        Self { sets, ..self }
    }

    /// Returns the path of the field that the flag sets.
    pub(in crate::config) const fn path(&self) -> Option<&'static str> {
        match self.sets {
            Target::Field(path) => Some(path),
            Target::PortOf(_) | Target::Nothing(_) => None,
        }
    }
}

const MODE: &str = "Mode";
const SOURCE: &str = "Source of objects";
const NODE: &str = "This node and its traffic";
const EBPF: &str = "The ebpf mode";
const TABLES: &str = "The iptables and nftables modes";
const IPVS: &str = "The ipvs mode";
const SYSTEM: &str = "Kernel settings and the process";
const OBSERVE: &str = "Health and metrics";
const LOGS: &str = "Logs";
/// The group of flags that are accepted and do nothing.
pub(super) const NO_EFFECT: &str = "Flags of kube-proxy without an effect";

/// The value of a flag that means true if it stands alone.
pub(super) const SWITCH: &str = "true|false";
const OTHER_LIBRARY: Target = Target::Nothing("it is for a library that shunt does not use");

/// All flags, by group.
pub(in crate::config) const FLAGS: &[Flag] = &[
    always(MODE, "mode", "mode", "MODE").alias(&["proxy-mode"])
        .help("auto, ebpf, nftables, iptables or ipvs; auto chooses the first of ebpf, nftables and iptables that works on this node, and logs the reason [default: auto]"),
    always(SOURCE, "master", "shunt.master", "URL[,URL...]")
        .help("Addresses of the API server, of which shunt uses one that answers; they override the address in the kubeconfig"),
    flag(SOURCE, "kubeconfig", "clientConnection.kubeconfig", "FILE")
        .help("Kubeconfig for the API server; without it, --master and --manifests, shunt uses the service account of its pod"),
    flag(SOURCE, "kube-api-content-type", "clientConnection.contentType", "TYPE")
        .help("How the API server writes objects: application/vnd.kubernetes.protobuf, or JSON if it does not know that; or application/json"),
    always(SOURCE, "manifests", "shunt.manifests", "DIR")
        .help("Read Services, EndpointSlices and Nodes from the manifests in this directory, and watch them for changes, instead of using an API server"),
    always(NODE, "hostname-override", "hostnameOverride", "NAME")
        .help("Name of this node's Node object [default: $NODE_NAME, or the host name if that is not set]"),
    flag(NODE, "bind-address", "bindAddress", "IP")
        .help("Address of this node, if it differs from the Node object; its family sets the default family of --healthz-bind-address and --metrics-bind-address"),
    flag(NODE, "nodeport-addresses", "nodePortAddresses", "CIDR,...")
        .help("Serve node ports on the node addresses in these ranges; 'primary' means the addresses of the Node object, 'localhost' those of loopback, and 'all' all addresses [default: all addresses; in the nftables mode primary]"),
    flag(NODE, "cluster-cidr", "clusterCIDR", "CIDR[,CIDR]")
        .help("Address range of pods, at most one of each IP family"),
    flag(NODE, "detect-local-mode", "detectLocalMode", "MODE")
        .help("How to detect traffic of local pods: ClusterCIDR, NodeCIDR, BridgeInterface or InterfaceNamePrefix"),
    flag(NODE, "pod-bridge-interface", "detectLocal.bridgeInterface", "NAME")
        .help("Bridge of the local pods, for detect-local-mode BridgeInterface"),
    flag(NODE, "pod-interface-name-prefix", "detectLocal.interfaceNamePrefix", "PREFIX")
        .help("Name prefix of the local pods' links, for detect-local-mode InterfaceNamePrefix"),
    flag(NODE, "masquerade-all", "iptables.masqueradeAll", SWITCH)
        .help("Masquerade all traffic to cluster IPs, in every mode"),
    always(EBPF, "backstop", "shunt.backstop", "auto|always|never")
        .help("Keep the rules of the nftables mode (else of the iptables mode) beneath the programs, for what these cannot or must not translate; auto keeps them while something needs them, such as a Service with an SCTP port, or --links-path"),
    always(EBPF, "links-path", "shunt.links.path", "auto|programs|direct|netfilter")
        .help("What translates packets that come in on links: programs; programs that pass packets of learned flows directly to another link, without the stack (direct); or netfilter (the backstop). auto takes netfilter if a rule, filter or policy of another program depends on netfilter's translation. Otherwise it takes direct, or programs if a rule of others looks at forwarded packets or --links-masquerade is netfilter. The log names the reason"),
    always(EBPF, "links-direct", "shunt.links.direct", "learned|whole")
        .help("Which packets of a flow take the direct path, on a node that has it: those that match a packet which went through the stack shortly before (learned), or all of them (whole). With whole, no rule of netfilter sees a packet of the flow"),
    always(EBPF, "links-xdp", "shunt.links.xdp", "off|auto|generic|native")
        .help("Forward packets of learned flows to endpoints on other nodes before the stack (XDP), on links that lead out of the node: in the driver, where it says that it can (auto), in the driver of each (native), or in the kernel (generic)"),
    always(EBPF, "links-masquerade", "shunt.links.masquerade", "auto|netfilter|programs")
        .help("What masquerades packets that come in on links: netfilter, with conntrack, or the programs, without it; auto takes the programs on a node that has the direct path"),
    always(EBPF, "links-masquerade-ports", "shunt.links.masqueradePorts", "FIRST-LAST")
        .help("Source ports of the flows that the programs masquerade, for each endpoint; the node's own sockets and its node ports must not use them"),
    always(EBPF, "links-maglev", "shunt.links.maglev", SWITCH)
        .help("Clients from outside get the same endpoint at every node, by a Maglev table, for all Services without the annotation shunt.dev/balance"),
    always(EBPF, "links-maglev-table-size", "shunt.links.maglevTableSize", "PRIME")
        .help("Entries of a Maglev table; a Service with more endpoints than a hundredth of them gets a larger one"),
    always(EBPF, "dsr-enabled", "shunt.dsr.enabled", SWITCH)
        .help("Serve Services with the annotation shunt.dev/forwarding: dsr by direct server return: the node that a client reaches sends its packets through a tunnel to the endpoint's node, which answers the client itself. Each node that takes such packets announces it in the annotation shunt.dev/dsr of its Node object"),
    always(EBPF, "dsr-port", "shunt.dsr.port", "PORT")
        .help("UDP port of the tunnel between nodes for direct server return (VXLAN-GPE)"),
    always(EBPF, "dsr-return", "shunt.dsr.return", "direct|tunnel")
        .help("How answers of this node's endpoints reach clients: from this node, with the VIP as their source (direct); or back through the tunnel and from the node that the client reached, where the network drops such packets (tunnel)"),
    always(EBPF, "sockets-scope", "shunt.sockets.scope", "auto|all|node")
        .help("Whose sockets are served: all; those of the node's network namespace (node); or all but those of pods that redirect their own packets, such as pods of a service mesh (auto). All others are served on links"),
    always(EBPF, "cgroup-root", "shunt.ebpf.cgroupRoot", "PATH")
        .help("Cgroup v2 directory whose processes are served [default: the first cgroup2 mount]"),
    always(EBPF, "bpf-pin-dir", "shunt.ebpf.pinDir", "PATH")
        .help("Directory where eBPF maps and links are pinned"),
    always(EBPF, "interfaces", "shunt.ebpf.interfaces", "GLOB,...")
        .help("Attach programs to links with these names only [default: all links but loopback]"),
    always(EBPF, "exclude-interfaces", "shunt.ebpf.excludeInterfaces", "GLOB,...")
        .help("Attach no programs to links with these names, even if --interfaces includes them"),
    flag(TABLES, "iptables-sync-period", "iptables.syncPeriod", "DURATION")
        .help("How often the kernel is compared with what it should hold, in every mode but ipvs"),
    flag(TABLES, "iptables-min-sync-period", "iptables.minSyncPeriod", "DURATION")
        .help("Minimum time between two syncs under load, in every mode but ipvs; 0, the default in the ebpf mode, means at once"),
    flag(TABLES, "iptables-masquerade-bit", "iptables.masqueradeBit", "BIT")
        .help("Bit of a packet's mark that asks for masquerade, 0 to 31, in every mode but nftables; for nftables set nftables.masqueradeBit in the file"),
    flag(TABLES, "iptables-localhost-nodeports", "iptables.localhostNodePorts", SWITCH)
        .help("Serve node ports on 127.0.0.1 too, in the modes iptables and ebpf; in the ebpf mode also on ::1"),
    flag(IPVS, "ipvs-sync-period", "ipvs.syncPeriod", "DURATION")
        .help("How often the kernel is compared with what it should hold"),
    flag(IPVS, "ipvs-min-sync-period", "ipvs.minSyncPeriod", "DURATION")
        .help("Minimum time between two syncs under load; 0 means at once"),
    flag(IPVS, "ipvs-scheduler", "ipvs.scheduler", "NAME")
        .help("Scheduler of virtual servers [default: rr]"),
    flag(IPVS, "ipvs-exclude-cidrs", "ipvs.excludeCIDRs", "CIDR,...")
        .help("Ranges of virtual servers that shunt does not remove when it cleans up"),
    flag(IPVS, "ipvs-strict-arp", "ipvs.strictARP", SWITCH)
        .help("Set arp_ignore to 1 and arp_announce to 2, so that the node does not answer ARP requests for Service addresses"),
    flag(IPVS, "ipvs-tcp-timeout", "ipvs.tcpTimeout", "DURATION")
        .help("Timeout of idle TCP connections; 0 keeps the kernel's value"),
    flag(IPVS, "ipvs-tcpfin-timeout", "ipvs.tcpFinTimeout", "DURATION")
        .help("Timeout of TCP connections after a FIN; 0 keeps the kernel's value"),
    flag(IPVS, "ipvs-udp-timeout", "ipvs.udpTimeout", "DURATION")
        .help("Timeout of UDP flows; 0 keeps the kernel's value"),
    flag(SYSTEM, "conntrack-max-per-core", "conntrack.maxPerCore", "NUMBER")
        .help("Most conntrack entries for each CPU core; 0 keeps the kernel's limit"),
    flag(SYSTEM, "conntrack-min", "conntrack.min", "NUMBER")
        .help("Least number of conntrack entries to allow, whatever conntrack-max-per-core says"),
    flag(SYSTEM, "conntrack-tcp-timeout-established", "conntrack.tcpEstablishedTimeout", "DURATION")
        .help("Conntrack timeout of idle established TCP connections; 0 keeps the kernel's value"),
    flag(SYSTEM, "conntrack-tcp-timeout-close-wait", "conntrack.tcpCloseWaitTimeout", "DURATION")
        .help("Conntrack timeout of TCP connections in CLOSE_WAIT; 0 keeps the kernel's value"),
    flag(SYSTEM, "conntrack-tcp-be-liberal", "conntrack.tcpBeLiberal", SWITCH)
        .help("Let conntrack accept packets outside the TCP window as valid"),
    flag(SYSTEM, "conntrack-udp-timeout", "conntrack.udpTimeout", "DURATION")
        .help("Conntrack timeout of UDP flows without replies; 0 keeps the kernel's value"),
    flag(SYSTEM, "conntrack-udp-timeout-stream", "conntrack.udpStreamTimeout", "DURATION")
        .help("Conntrack timeout of UDP flows with replies; 0 keeps the kernel's value"),
    flag(SYSTEM, "feature-gates", "featureGates", "NAME=true|false,...")
        .help("Feature gates of Kubernetes. AllAlpha, AllBeta, AllowServiceExternalIPs, ComponentFlagz, ComponentStatusz, KubeProxyIPVS, LoggingAlphaOptions and NativeHistograms change something here; shunt names the others that are given, and refuses unknown ones"),
    flag(SYSTEM, "oom-score-adj", "oomScoreAdj", "NUMBER")
        .help("How likely the kernel is to kill this process when memory runs out, from -1000 (never) to 1000"),
    flag(OBSERVE, "healthz-bind-address", "healthzBindAddress", "IP:PORT")
        .help("Address of /healthz and /livez; empty turns them off [default: 0.0.0.0:10256]"),
    flag(OBSERVE, "metrics-bind-address", "metricsBindAddress", "IP:PORT")
        .help("Address of /metrics and /proxyMode; empty turns them off [default: 127.0.0.1:10249]"),
    flag(OBSERVE, "bind-address-hard-fail", "bindAddressHardFail", SWITCH)
        .help("Exit if an address to listen on is in use, instead of trying again"),
    always(OBSERVE, "service-metrics", "shunt.serviceMetrics.enabled", SWITCH)
        .help("Count connections and bytes for each Service, in the modes ebpf and ipvs; in the ebpf mode also refusals and drops"),
    always(OBSERVE, "ui", "shunt.ui", SWITCH)
        .help("Answer /ui/ at the metrics address: pages about this node, its Services and their endpoints, for browsers"),
    flag(OBSERVE, "profiling", "enableProfiling", SWITCH)
        .help("Answer profiling requests at the metrics address"),
    flag(OBSERVE, "healthz-port", "healthzBindAddress", "PORT").sets(Target::PortOf("healthz-bind-address"))
        .help("Deprecated: port of --healthz-bind-address if that has none; 0 turns the address off"),
    flag(OBSERVE, "metrics-port", "metricsBindAddress", "PORT").sets(Target::PortOf("metrics-bind-address"))
        .help("Deprecated: port of --metrics-bind-address if that has none; 0 turns the address off"),
    always(LOGS, "v", "logging.verbosity", "LEVEL").alias(&["verbosity"])
        .help("Log verbosity: 0 to 3 means info, 4 and 5 debug, 6 and 7 trace; 8 and more also traces libraries"),
    always(LOGS, "logging-format", "logging.format", "text|json").alias(&["log-format"])
        .help("Log format"),
    always(LOGS, "log-filter", "shunt.logFilter", "FILTER")
        .help("Log filter such as info,proxy_userspace=debug; overrides -v [default: $RUST_LOG]"),
    always(LOGS, "ebpf-log", "shunt.ebpf.log", "off|error|info|debug")
        .help("In the ebpf mode, also log single connections and packets: errors, then refused and dropped ones (info), then translated ones (debug)"),
    always(NO_EFFECT, "log-flush-frequency", "logging.flushFrequency", "DURATION"),
    always(NO_EFFECT, "vmodule", "logging.vmodule", "PATTERN=LEVEL,..."),
    always(NO_EFFECT, "log-text-split-stream", "logging.options.text.splitStream", SWITCH),
    always(NO_EFFECT, "log-text-info-buffer-size", "logging.options.text.infoBufferSize", "BYTES"),
    always(NO_EFFECT, "log-json-split-stream", "logging.options.json.splitStream", SWITCH),
    always(NO_EFFECT, "log-json-info-buffer-size", "logging.options.json.infoBufferSize", "BYTES"),
    flag(NO_EFFECT, "kube-api-qps", "clientConnection.qps", "NUMBER"),
    flag(NO_EFFECT, "kube-api-burst", "clientConnection.burst", "NUMBER"),
    flag(NO_EFFECT, "config-sync-period", "configSyncPeriod", "DURATION"),
    flag(NO_EFFECT, "show-hidden-metrics-for-version", "showHiddenMetricsForVersion", "VERSION"),
    flag(NO_EFFECT, "boot-id-file", "", "FILE").sets(OTHER_LIBRARY),
    flag(NO_EFFECT, "machine-id-file", "", "FILE").sets(OTHER_LIBRARY),
];
