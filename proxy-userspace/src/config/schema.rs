//! The fields of `KubeProxyConfiguration` v1alpha1 and of the `shunt` section: path, type, default,
//! modes.

use std::sync::LazyLock;

use proxy_common::layout::{COUNTED_SERVICES, SIZE_SETTINGS, SizeSetting};

use super::value::Kind;
use crate::{
    kernel::bpf,
    mode::{
        BackstopPolicy, DsrReturn, LinksDirect, LinksMasquerade, LinksPath, LinksXdp, Mode, SocketsScope,
    },
    net::ContentType,
};

/// One field of the configuration.
pub(super) struct Field {
    /// The path in the file, such as `iptables.syncPeriod`.
    pub(super) path: &'static str,
    /// The type of the value.
    pub(super) kind: Kind,
    /// The default as a flag would write it; empty if the field is unset by default.
    pub(super) default: &'static str,
    /// What uses the field.
    pub(super) used_by: UsedBy,
    /// Go's zero value in the file means "unset". This is so if upstream's type is no pointer and
    /// the default is not zero.
    pub(super) zero_is_unset: bool,
}

/// What uses a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UsedBy {
    /// Every mode.
    AllModes,
    /// These modes.
    Modes(&'static [Mode]),
    /// Nothing, for this reason. The value is checked, and a log line at start gives the reason.
    Nothing(&'static str),
}

impl Field {
    const fn default(self, default: &'static str) -> Self {
        Self { default, ..self }
    }

    const fn only_in(self, modes: &'static [Mode]) -> Self {
        Self { used_by: UsedBy::Modes(modes), ..self }
    }

    const fn zero_is_unset(self) -> Self {
        Self { zero_is_unset: true, ..self }
    }
}

const fn field_of(path: &'static str, kind: Kind) -> Field {
    Field { path, kind, default: "", used_by: UsedBy::AllModes, zero_is_unset: false }
}

const fn without_effect(path: &'static str, kind: Kind, why: &'static str) -> Field {
    Field { used_by: UsedBy::Nothing(why), ..field_of(path, kind) }
}

/// The values of `mode` and `--mode`. Empty means `auto`; for upstream it means its default.
const MODES: &[&str] = &["auto", "ebpf", "nftables", "iptables", "ipvs"];
/// Upstream's `LocalMode`s.
const DETECT_LOCAL_MODES: &[&str] = &["ClusterCIDR", "NodeCIDR", "BridgeInterface", "InterfaceNamePrefix"];
const EBPF_LOGS: &[&str] = &["off", "error", "info", "debug"];

/// Fields whose flags apply to every mode but ipvs, or to all modes, as in upstream's
/// `processV1Alpha1Flags`.
pub(super) const FLAGS_FOR_ALL_BUT_IPVS: [&str; 3] =
    ["iptables.syncPeriod", "iptables.minSyncPeriod", "iptables.masqueradeAll"];
/// The section of map sizes.
pub(super) const MAP_SIZES: &str = "shunt.ebpf.mapSizes.";

/// Modes that count connections and bytes of Services.
const COUNTING: &[Mode] = &[Mode::Ebpf, Mode::Ipvs];
const EBPF: &[Mode] = &[Mode::Ebpf];
const IPVS: &[Mode] = &[Mode::Ipvs];
const NFTABLES: &[Mode] = &[Mode::Nftables];
/// Modes without a section of their own use the section `iptables`, as in upstream's conversion.
const ALL_BUT_NFTABLES: &[Mode] = &[Mode::Ebpf, Mode::Iptables, Mode::Ipvs];
const EBPF_AND_IPTABLES: &[Mode] = &[Mode::Ebpf, Mode::Iptables];

const NOT_NEGATIVE: Kind = Kind::Integer { min: 0, max: i32::MAX as i64 };
const BIT: Kind = Kind::Integer { min: 0, max: 31 };
const PORT: Kind = Kind::Integer { min: 1, max: u16::MAX as i64 };
/// 2^26 entries need more memory than a node has.
const MAP_SIZE: Kind = Kind::Integer { min: 16, max: 1 << 26 };
/// The sizes of Maglev tables; not every number between them is one.
const TABLE_SIZE: Kind = Kind::Integer { min: 251, max: 262_139 };
/// One counter takes 80 bytes, so a CPU has at most 5 MiB of counters.
const COUNTED: Kind = Kind::Integer { min: 1, max: 65_535 };

const WINDOWS: &str = "it is for Windows";
const NOT_LIMITED: &str = "shunt opens a few watches and retries with backoff; it needs no request limit";
const SOURCE_FILES: &str = "it names source files of kube-proxy; use shunt.logFilter";
const WATCHING: &str = "shunt watches all objects and does not list them on a timer";
const UNBUFFERED: &str = "shunt writes logs to standard error at once";

/// All fields except map sizes, in the order of upstream's [types.go], with the defaults of its
/// `pkg/proxy/apis/config/v1alpha1/defaults.go`.
///
/// [types.go]: https://github.com/kubernetes/kubernetes/blob/v1.36.0/staging/src/k8s.io/kube-proxy/config/v1alpha1/types.go
const FIELDS: &[Field] = &[
    field_of("apiVersion", Kind::OneOf(&["kubeproxy.config.k8s.io/v1alpha1"])),
    field_of("kind", Kind::OneOf(&["KubeProxyConfiguration"])),
    field_of("featureGates", Kind::FeatureGates),
    field_of("clientConnection.kubeconfig", Kind::Text),
    field_of("clientConnection.acceptContentTypes", Kind::Text),
    field_of("clientConnection.contentType", Kind::OneOf(ContentType::NAMES))
        .default(ContentType::Protobuf.name()),
    without_effect("clientConnection.qps", Kind::Number, NOT_LIMITED).default("5").zero_is_unset(),
    without_effect("clientConnection.burst", NOT_NEGATIVE, NOT_LIMITED).default("10").zero_is_unset(),
    field_of("logging.format", Kind::OneOf(&["text", "json"])).default("text"),
    field_of("logging.verbosity", NOT_NEGATIVE).default("0"),
    without_effect("logging.flushFrequency", Kind::FlushFrequency, UNBUFFERED).default("5s").zero_is_unset(),
    without_effect("logging.vmodule", Kind::VModule, SOURCE_FILES),
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
    without_effect("showHiddenMetricsForVersion", Kind::Text, "shunt hides no metrics"),
    field_of("mode", Kind::OneOf(MODES)),
    field_of("iptables.masqueradeBit", BIT).default("14").only_in(ALL_BUT_NFTABLES),
    field_of("iptables.masqueradeAll", Kind::Bool).default("false").only_in(ALL_BUT_NFTABLES),
    field_of("iptables.localhostNodePorts", Kind::Bool).default("true").only_in(EBPF_AND_IPTABLES),
    field_of("iptables.syncPeriod", Kind::Period).default("30s").only_in(EBPF_AND_IPTABLES),
    field_of("iptables.minSyncPeriod", Kind::Duration).default("1s").only_in(EBPF_AND_IPTABLES),
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
    without_effect("configSyncPeriod", Kind::Period, WATCHING).default("15m0s"),
    without_effect("portRange", Kind::Text, "kube-proxy does not use it either"),
    without_effect("windowsRunAsService", Kind::Bool, WINDOWS).default("false"),
    // shunt's own fields.
    field_of("shunt.manifests", Kind::Text),
    field_of("shunt.master", Kind::Text),
    field_of("shunt.logFilter", Kind::Text),
    field_of("shunt.reload.jitter", Kind::Duration).default("0s"),
    field_of("shunt.ui", Kind::Bool).default("false"),
    field_of("shunt.serviceMetrics.enabled", Kind::Bool).default("true").only_in(COUNTING),
    field_of(COUNTED_SERVICES.path, COUNTED).default(COUNTED_SERVICES.default).only_in(COUNTING),
    field_of("shunt.backstop", Kind::OneOf(BackstopPolicy::NAMES)).default("auto").only_in(EBPF),
    field_of("shunt.links.path", Kind::OneOf(LinksPath::NAMES)).default("auto").only_in(EBPF),
    field_of("shunt.links.direct", Kind::OneOf(LinksDirect::NAMES)).default("learned").only_in(EBPF),
    field_of("shunt.links.xdp", Kind::OneOf(LinksXdp::NAMES)).default("off").only_in(EBPF),
    field_of("shunt.links.masquerade", Kind::OneOf(LinksMasquerade::NAMES)).default("auto").only_in(EBPF),
    field_of("shunt.links.masqueradePorts", Kind::Text).default("1024-29999").only_in(EBPF),
    field_of("shunt.links.maglev", Kind::Bool).default("false").only_in(EBPF),
    field_of("shunt.links.maglevTableSize", TABLE_SIZE).default("16381").only_in(EBPF),
    field_of("shunt.dsr.enabled", Kind::Bool).default("false").only_in(EBPF),
    field_of("shunt.dsr.port", PORT).default("4790").only_in(EBPF),
    field_of("shunt.dsr.return", Kind::OneOf(DsrReturn::NAMES)).default("direct").only_in(EBPF),
    field_of("shunt.sockets.scope", Kind::OneOf(SocketsScope::NAMES)).default("auto").only_in(EBPF),
    field_of("shunt.ebpf.cgroupRoot", Kind::Text),
    field_of("shunt.ebpf.pinDir", Kind::Text).default(bpf::DEFAULT_PIN_DIR),
    field_of("shunt.ebpf.interfaces", Kind::InterfaceGlobs),
    field_of("shunt.ebpf.excludeInterfaces", Kind::InterfaceGlobs),
    field_of("shunt.ebpf.log", Kind::OneOf(EBPF_LOGS)).default("off"),
];

/// `shunt.ebpf.mapSizes`.
static MAP_SIZE_FIELDS: LazyLock<Vec<Field>> = LazyLock::new(|| {
    let field = |setting: &SizeSetting| field_of(setting.path, MAP_SIZE).default(setting.default);
    SIZE_SETTINGS.iter().map(field).collect()
});

/// Returns all fields in the order in which they are written.
pub(super) fn fields() -> impl Iterator<Item = &'static Field> {
    FIELDS.iter().chain(MAP_SIZE_FIELDS.iter())
}

/// Returns the field at a path.
pub(super) fn field(path: &str) -> Option<&'static Field> {
    fields().find(|field| field.path == path)
}

/// Returns the sorted names that a section may hold. The empty section is the top level.
pub(super) fn names_in(section: &str) -> Vec<&'static str> {
    let rest = |path: &'static str| {
        if section.is_empty() { Some(path) } else { path.strip_prefix(section)?.strip_prefix('.') }
    };
    let rests = fields().filter_map(|field| rest(field.path));
    let mut names: Vec<_> = rests.filter_map(|rest| rest.split('.').next()).collect();
    names.sort_unstable();
    names.dedup();
    names
}
