//! Every field of `KubeProxyConfiguration` v1alpha1 and of the `shunt` section: its path, what it holds, its default, and where it
//! has an effect.

use std::sync::LazyLock;

use proxy_common::layout::{COUNTED_SERVICES, MAPS};

use super::value::Kind;

/// One field of the configuration.
pub(super) struct Field {
    /// Where it is, as in `iptables.syncPeriod`.
    pub(super) path: &'static str,
    /// What it holds.
    pub(super) kind: Kind,
    /// What it is where nobody sets it, as a flag would say it; empty for "unset".
    pub(super) default: &'static str,
    /// What depends on it.
    pub(super) effect: Effect,
    /// Go's zero value in the file means "unset". It does where upstream's type is no pointer and the default is not zero.
    pub(super) zero_is_unset: bool,
}

/// What depends on a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    /// This program, in every mode.
    Everywhere,
    /// Modes with these names.
    In(&'static [&'static str]),
    /// Nothing, and why. It is checked, and one line at start says so.
    Nowhere(&'static str),
}

impl Field {
    const fn default(self, default: &'static str) -> Self {
        Self { default, ..self }
    }

    const fn only_in(self, modes: &'static [&'static str]) -> Self {
        Self { effect: Effect::In(modes), ..self }
    }

    const fn zero_is_unset(self) -> Self {
        Self { zero_is_unset: true, ..self }
    }

    /// Whether anything in this program depends on it.
    pub(super) fn is_read(&self) -> bool {
        !matches!(self.effect, Effect::Nowhere(_))
    }
}

const fn field_of(path: &'static str, kind: Kind) -> Field {
    Field { path, kind, default: "", effect: Effect::Everywhere, zero_is_unset: false }
}

const fn without_effect(path: &'static str, kind: Kind, why: &'static str) -> Field {
    Field { path, kind, default: "", effect: Effect::Nowhere(why), zero_is_unset: false }
}

/// The modes that `mode` and `--mode` know. Empty is `auto`, as upstream takes it for its default.
pub(super) const MODES: &[&str] = &["auto", "ebpf", "nftables", "iptables", "ipvs"];
/// Upstream's `LocalMode`s.
pub(super) const DETECT_LOCAL_MODES: &[&str] =
    &["ClusterCIDR", "NodeCIDR", "BridgeInterface", "InterfaceNamePrefix"];

/// What programs may be asked to tell.
const EBPF_LOGS: &[&str] = &["off", "error", "info", "debug"];
/// Modes that count what Services get.
const COUNTING: &[&str] = &["ebpf", "ipvs"];
const IPTABLES: &[&str] = &["iptables"];
const IPVS: &[&str] = &["ipvs"];
const NFTABLES: &[&str] = &["nftables"];
/// Modes without a section of their own read that of iptables, as upstream's conversion does.
const MARKING: &[&str] = &["ebpf", "iptables", "ipvs"];
const TIMED_BY_IPTABLES: &[&str] = &["ebpf", "iptables"];

const NOT_NEGATIVE: Kind = Kind::Integer { min: 0, max: i32::MAX as i64 };
const BIT: Kind = Kind::Integer { min: 0, max: 31 };
/// A map holds at least something; 2^26 entries are beyond what a node has memory for.
const MAP_SIZE: Kind = Kind::Integer { min: 16, max: 1 << 26 };

/// At 80 bytes for each, a CPU has 5 MiB of them at most.
const COUNTED: Kind = Kind::Integer { min: 1, max: 65_535 };

const WINDOWS: &str = "it is for Windows";
const JSON_ONLY: &str = "objects are read from the API server as JSON";
const NOT_LIMITED: &str =
    "shunt opens a few watches and retries them with back-off; no other requests need a limit";
const UNBUFFERED: &str = "logs are written to standard error at once";

/// All fields, in the order of upstream's
/// [types.go](https://github.com/kubernetes/kubernetes/blob/v1.36.0/staging/src/k8s.io/kube-proxy/config/v1alpha1/types.go), with the
/// defaults of its `pkg/proxy/apis/config/v1alpha1/defaults.go`.
const FIELDS: &[Field] = &[
    field_of("apiVersion", Kind::OneOf(&["kubeproxy.config.k8s.io/v1alpha1"])),
    field_of("kind", Kind::OneOf(&["KubeProxyConfiguration"])),
    without_effect("featureGates", Kind::FeatureGates, "shunt has no feature gates"),
    field_of("clientConnection.kubeconfig", Kind::Text),
    without_effect("clientConnection.acceptContentTypes", Kind::Text, JSON_ONLY),
    without_effect("clientConnection.contentType", Kind::Text, JSON_ONLY)
        .default("application/vnd.kubernetes.protobuf"),
    without_effect("clientConnection.qps", Kind::Number, NOT_LIMITED).default("5").zero_is_unset(),
    without_effect("clientConnection.burst", NOT_NEGATIVE, NOT_LIMITED).default("10").zero_is_unset(),
    field_of("logging.format", Kind::OneOf(&["text", "json"])).default("text"),
    field_of("logging.verbosity", NOT_NEGATIVE).default("0"),
    without_effect("logging.flushFrequency", Kind::FlushFrequency, UNBUFFERED).default("5s").zero_is_unset(),
    without_effect(
        "logging.vmodule",
        Kind::VModule,
        "it names kube-proxy's source files; see shunt.logFilter",
    ),
    without_effect("logging.options.text.splitStream", Kind::Bool, UNBUFFERED).default("false"),
    without_effect("logging.options.text.infoBufferSize", Kind::Quantity, UNBUFFERED).default("0"),
    without_effect("logging.options.json.splitStream", Kind::Bool, UNBUFFERED).default("false"),
    without_effect("logging.options.json.infoBufferSize", Kind::Quantity, UNBUFFERED).default("0"),
    field_of("hostnameOverride", Kind::Text),
    field_of("bindAddress", Kind::Address).default("0.0.0.0"),
    field_of("healthzBindAddress", Kind::BindAddress { default_port: 10256 }),
    field_of("metricsBindAddress", Kind::BindAddress { default_port: 10249 }),
    field_of("bindAddressHardFail", Kind::Bool).default("false"),
    field_of("enableProfiling", Kind::Bool).default("false"),
    without_effect(
        "showHiddenMetricsForVersion",
        Kind::OneOf(&["1.35"]),
        "no metric was hidden between two versions",
    ),
    field_of("mode", Kind::OneOf(MODES)),
    field_of("iptables.masqueradeBit", BIT).default("14").only_in(MARKING),
    field_of("iptables.masqueradeAll", Kind::Bool).default("false").only_in(MARKING),
    field_of("iptables.localhostNodePorts", Kind::Bool).default("true").only_in(IPTABLES),
    field_of("iptables.syncPeriod", Kind::Period).default("30s").only_in(TIMED_BY_IPTABLES),
    field_of("iptables.minSyncPeriod", Kind::Duration).default("1s").only_in(TIMED_BY_IPTABLES),
    field_of("ipvs.syncPeriod", Kind::Period).default("30s").only_in(IPVS),
    field_of("ipvs.minSyncPeriod", Kind::Duration).default("0s").only_in(IPVS),
    field_of("ipvs.scheduler", Kind::Text).only_in(IPVS),
    field_of("ipvs.excludeCIDRs", Kind::Cidrs).only_in(IPVS),
    field_of("ipvs.strictARP", Kind::Bool).default("false").only_in(IPVS),
    field_of("ipvs.tcpTimeout", Kind::Duration).default("0s").only_in(IPVS),
    field_of("ipvs.tcpFinTimeout", Kind::Duration).default("0s").only_in(IPVS),
    field_of("ipvs.udpTimeout", Kind::Duration).default("0s").only_in(IPVS),
    field_of("nftables.masqueradeBit", BIT).default("14").only_in(NFTABLES),
    field_of("nftables.masqueradeAll", Kind::Bool).default("false").only_in(NFTABLES),
    field_of("nftables.syncPeriod", Kind::Period).default("30s").only_in(NFTABLES),
    field_of("nftables.minSyncPeriod", Kind::Duration).default("1s").only_in(NFTABLES),
    without_effect("winkernel.networkName", Kind::Text, WINDOWS),
    without_effect("winkernel.sourceVip", Kind::Text, WINDOWS),
    without_effect("winkernel.enableDSR", Kind::Bool, WINDOWS).default("false"),
    without_effect("winkernel.rootHnsEndpointName", Kind::Text, WINDOWS),
    without_effect("winkernel.forwardHealthCheckVip", Kind::Bool, WINDOWS).default("false"),
    field_of("detectLocalMode", Kind::OneOf(DETECT_LOCAL_MODES)).default("ClusterCIDR"),
    field_of("detectLocal.bridgeInterface", Kind::Text),
    field_of("detectLocal.interfaceNamePrefix", Kind::Text),
    field_of("clusterCIDR", Kind::Text),
    field_of("nodePortAddresses", Kind::NodePortAddresses),
    field_of("oomScoreAdj", Kind::Integer { min: -1000, max: 1000 }).default("-999"),
    field_of("conntrack.maxPerCore", NOT_NEGATIVE).default("32768"),
    field_of("conntrack.min", NOT_NEGATIVE).default("131072"),
    field_of("conntrack.tcpEstablishedTimeout", Kind::Duration).default("24h0m0s"),
    field_of("conntrack.tcpCloseWaitTimeout", Kind::Duration).default("1h0m0s"),
    field_of("conntrack.tcpBeLiberal", Kind::Bool).default("false"),
    field_of("conntrack.udpTimeout", Kind::Duration).default("0s"),
    field_of("conntrack.udpStreamTimeout", Kind::Duration).default("0s"),
    without_effect(
        "configSyncPeriod",
        Kind::Period,
        "watches tell of every change; nothing is read again on a timer",
    )
    .default("15m0s"),
    without_effect("portRange", Kind::Text, "kube-proxy does not use it either"),
    without_effect("windowsRunAsService", Kind::Bool, WINDOWS).default("false"),
    // Ours.
    field_of("shunt.manifests", Kind::Text),
    field_of("shunt.master", Kind::Text),
    field_of("shunt.logFilter", Kind::Text),
    field_of("shunt.serviceMetrics.enabled", Kind::Bool).default("true").only_in(COUNTING),
    field_of(COUNTED_SERVICES.path, COUNTED).default(COUNTED_SERVICES.default).only_in(COUNTING),
    field_of("shunt.ebpf.cgroupRoot", Kind::Text),
    field_of("shunt.ebpf.pinDir", Kind::Text).default("/sys/fs/bpf/shunt"),
    field_of("shunt.ebpf.interfaces", Kind::InterfaceGlobs),
    field_of("shunt.ebpf.excludeInterfaces", Kind::InterfaceGlobs),
    field_of("shunt.ebpf.log", Kind::OneOf(EBPF_LOGS)).default("off"),
];

/// `shunt.ebpf.mapSizes`.
static MAP_SIZES: LazyLock<Vec<Field>> = LazyLock::new(|| {
    let settings = MAPS.iter().filter_map(|map| map.setting);
    settings.map(|setting| field_of(setting.path, MAP_SIZE).default(setting.default)).collect()
});

/// Returns all fields in the order in which they are written.
pub(super) fn fields() -> impl Iterator<Item = &'static Field> {
    FIELDS.iter().chain(MAP_SIZES.iter())
}

/// The field at a path.
pub(super) fn field(path: &str) -> Option<&'static Field> {
    fields().find(|field| field.path == path)
}

/// The names that may stand in a section (empty for the top level), sorted.
pub(super) fn names_in(section: &str) -> Vec<&'static str> {
    let mut names: Vec<_> = fields()
        .filter_map(|field| {
            let rest = if section.is_empty() {
                field.path
            } else {
                field.path.strip_prefix(section)?.strip_prefix('.')?
            };
            rest.split('.').next()
        })
        .collect();
    names.sort_unstable();
    names.dedup();
    names
}
