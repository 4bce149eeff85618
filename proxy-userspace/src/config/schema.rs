//! Every field of `KubeProxyConfiguration` v1alpha1 and of the `shunt` section: its path, what it holds, and whether it is read.

use super::value::Kind;

/// One field of the configuration.
pub(super) struct Field {
    /// Where it is, as in `iptables.syncPeriod`.
    pub(super) path: &'static str,
    /// What it holds.
    pub(super) kind: Kind,
    /// Whether anything in this program depends on it. Fields that are not read are checked and then named in a warning.
    pub(super) read: bool,
}

const fn read(path: &'static str, kind: Kind) -> Field {
    Field { path, kind, read: true }
}

const fn unread(path: &'static str, kind: Kind) -> Field {
    Field { path, kind, read: false }
}

/// The modes that `mode` and `--mode` know. Empty is `auto`, as upstream takes it for its default.
pub(super) const MODES: &[&str] = &["auto", "ebpf", "nftables", "iptables", "ipvs"];
/// Upstream's `LocalMode`s.
pub(super) const DETECT_LOCAL_MODES: &[&str] =
    &["ClusterCIDR", "NodeCIDR", "BridgeInterface", "InterfaceNamePrefix"];

const NOT_NEGATIVE: Kind = Kind::Integer { min: 0, max: i32::MAX as i64 };
const BIT: Kind = Kind::Integer { min: 0, max: 31 };
/// A map holds at least something; 2^26 entries are beyond what a node has memory for.
const MAP_SIZE: Kind = Kind::Integer { min: 16, max: 1 << 26 };

/// All fields, in the order of upstream's
/// [types.go](https://github.com/kubernetes/kubernetes/blob/v1.36.0/staging/src/k8s.io/kube-proxy/config/v1alpha1/types.go).
pub(super) const FIELDS: &[Field] = &[
    read("apiVersion", Kind::OneOf(&["kubeproxy.config.k8s.io/v1alpha1"])),
    read("kind", Kind::OneOf(&["KubeProxyConfiguration"])),
    unread("featureGates", Kind::Anything),
    read("clientConnection.kubeconfig", Kind::Text),
    unread("clientConnection.acceptContentTypes", Kind::Text),
    unread("clientConnection.contentType", Kind::Text),
    unread("clientConnection.qps", Kind::Number),
    unread("clientConnection.burst", NOT_NEGATIVE),
    read("logging.format", Kind::OneOf(&["text", "json"])),
    read("logging.verbosity", NOT_NEGATIVE),
    unread("logging.flushFrequency", Kind::Anything),
    unread("logging.vmodule", Kind::Anything),
    unread("logging.options", Kind::Anything),
    read("hostnameOverride", Kind::Text),
    read("bindAddress", Kind::Address),
    read("healthzBindAddress", Kind::BindAddress { default_port: 10256 }),
    read("metricsBindAddress", Kind::BindAddress { default_port: 10249 }),
    read("bindAddressHardFail", Kind::Bool),
    unread("enableProfiling", Kind::Bool),
    unread("showHiddenMetricsForVersion", Kind::Text),
    read("mode", Kind::OneOf(MODES)),
    read("iptables.masqueradeBit", BIT),
    read("iptables.masqueradeAll", Kind::Bool),
    read("iptables.localhostNodePorts", Kind::BoolPointer),
    read("iptables.syncPeriod", Kind::Duration),
    read("iptables.minSyncPeriod", Kind::Duration),
    read("ipvs.syncPeriod", Kind::Duration),
    read("ipvs.minSyncPeriod", Kind::Duration),
    read("ipvs.scheduler", Kind::Text),
    read("ipvs.excludeCIDRs", Kind::Cidrs),
    read("ipvs.strictARP", Kind::Bool),
    read("ipvs.tcpTimeout", Kind::Duration),
    read("ipvs.tcpFinTimeout", Kind::Duration),
    read("ipvs.udpTimeout", Kind::Duration),
    read("nftables.masqueradeBit", BIT),
    read("nftables.masqueradeAll", Kind::Bool),
    read("nftables.syncPeriod", Kind::Duration),
    read("nftables.minSyncPeriod", Kind::Duration),
    unread("winkernel.networkName", Kind::Text),
    unread("winkernel.sourceVip", Kind::Text),
    unread("winkernel.enableDSR", Kind::Bool),
    unread("winkernel.rootHnsEndpointName", Kind::Text),
    unread("winkernel.forwardHealthCheckVip", Kind::Bool),
    read("detectLocalMode", Kind::OneOf(DETECT_LOCAL_MODES)),
    read("detectLocal.bridgeInterface", Kind::Text),
    read("detectLocal.interfaceNamePrefix", Kind::Text),
    read("clusterCIDR", Kind::CommaCidrs),
    read("nodePortAddresses", Kind::NodePortAddresses),
    unread("oomScoreAdj", Kind::Integer { min: -1000, max: 1000 }),
    unread("conntrack.maxPerCore", NOT_NEGATIVE),
    unread("conntrack.min", NOT_NEGATIVE),
    unread("conntrack.tcpEstablishedTimeout", Kind::Duration),
    unread("conntrack.tcpCloseWaitTimeout", Kind::Duration),
    unread("conntrack.tcpBeLiberal", Kind::Bool),
    unread("conntrack.udpTimeout", Kind::Duration),
    unread("conntrack.udpStreamTimeout", Kind::Duration),
    read("configSyncPeriod", Kind::Duration),
    unread("portRange", Kind::Text),
    unread("windowsRunAsService", Kind::Bool),
    // Ours.
    read("shunt.manifests", Kind::Text),
    read("shunt.master", Kind::Text),
    read("shunt.logFilter", Kind::Text),
    read("shunt.ebpf.cgroupRoot", Kind::Text),
    read("shunt.ebpf.pinDir", Kind::Text),
    read("shunt.ebpf.interfaces", Kind::InterfaceGlobs),
    read("shunt.ebpf.excludeInterfaces", Kind::InterfaceGlobs),
    read("shunt.ebpf.mapSizes.services", MAP_SIZE),
    read("shunt.ebpf.mapSizes.endpoints", MAP_SIZE),
    read("shunt.ebpf.mapSizes.members", MAP_SIZE),
    read("shunt.ebpf.mapSizes.sourceRanges", MAP_SIZE),
    read("shunt.ebpf.mapSizes.nodeAddresses", MAP_SIZE),
    read("shunt.ebpf.mapSizes.affinity", MAP_SIZE),
    read("shunt.ebpf.mapSizes.udpFlows", MAP_SIZE),
    read("shunt.ebpf.mapSizes.udpSockets", MAP_SIZE),
    read("shunt.ebpf.mapSizes.tcpConnections", MAP_SIZE),
    read("shunt.ebpf.mapSizes.flows", MAP_SIZE),
    read("shunt.ebpf.mapSizes.fragments", MAP_SIZE),
];

/// The field at a path.
pub(super) fn field(path: &str) -> Option<&'static Field> {
    FIELDS.iter().find(|field| field.path == path)
}

/// The names that may stand in a section (empty for the top level), sorted.
pub(super) fn names_in(section: &str) -> Vec<&'static str> {
    let mut names: Vec<_> = FIELDS
        .iter()
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
