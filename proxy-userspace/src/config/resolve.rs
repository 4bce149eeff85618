//! From settings to [`Config`]: upstream's defaults, and the checks that look at several settings at once.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use ipnet::IpNet;
use proxy_common::layout::NodeValue;

use super::{
    Config, ConfigError, Environment, LogFormat, Mode, ObjectSource, settings::Settings,
    value::DEFAULT_BIND_ADDRESS,
};
use crate::{
    dataplane::{
        ebpf::{EbpfSettings, LinkAttachment, MapSizes, Marks},
        iptables::IptablesSettings,
        ipvs::IpvsSettings,
        nftables::NftablesSettings,
    },
    kernel::{command::SearchPath, ipvs::Timeouts},
    model::{DetectLocalMode, InterfaceGlobs, ModelSettings, NodePortAddresses},
};

/// Upstream's defaults (`pkg/proxy/apis/config/v1alpha1/defaults.go`).
const SYNC_PERIOD: Duration = Duration::from_secs(30);
const CONFIG_SYNC_PERIOD: Duration = Duration::from_mins(15);
const HEALTHZ_PORT: u16 = 10256;
const METRICS_PORT: u16 = 10249;
const PIN_DIR: &str = "/sys/fs/bpf/shunt";

pub(super) fn resolve(
    mut settings: Settings,
    environment: &Environment,
    auto: Mode,
) -> Result<Config, ConfigError> {
    let (mode, mode_is_auto) = mode(&mut settings, auto);
    let section = Section::of(mode);
    let (min_sync_period, sync_period) = sync_periods(&mut settings, section);
    let (healthz_bind_address, metrics_bind_address) = bind_addresses(&settings);
    let config = Config {
        mode,
        mode_is_auto,
        source: source(&mut settings),
        model: ModelSettings {
            node_name: node_name(&mut settings, environment),
            cluster_cidrs: cluster_cidrs(&mut settings),
            detect_local: detect_local(&mut settings),
            node_port_addresses: node_port_addresses(&settings, mode),
            masquerade_all: masquerade_all(&settings, section),
            interfaces: InterfaceGlobs {
                only: settings.globs("shunt.ebpf.interfaces"),
                except: settings.globs("shunt.ebpf.excludeInterfaces"),
            },
        },
        healthz_bind_address,
        metrics_bind_address,
        bind_address_hard_fail: settings.is_true("bindAddressHardFail"),
        sync_period,
        min_sync_period,
        config_sync_period: above_zero(settings.duration("configSyncPeriod")).unwrap_or(CONFIG_SYNC_PERIOD),
        ebpf: ebpf(&mut settings, environment, mode == Mode::Ebpf && !mode_is_auto),
        nftables: NftablesSettings { masquerade: marks(&settings, section).masquerade },
        iptables: IptablesSettings {
            masquerade_mark: marks(&settings, section).masquerade,
            localhost_node_ports: settings.flag("iptables.localhostNodePorts").unwrap_or(true),
            path: SearchPath::default(),
        },
        ipvs: ipvs(&mut settings, section),
        log_format: if settings.text("logging.format") == Some("json") {
            LogFormat::Json
        } else {
            LogFormat::Text
        },
        log_filter: log_filter(&mut settings, environment),
        unread_fields: Vec::new(),
    };
    section.others.iter().for_each(|other| settings.leave_unread(other));
    let (problems, unread_fields) = settings.finish();
    if problems.is_empty() {
        Ok(Config { unread_fields, ..config })
    } else {
        Err(ConfigError::Invalid { problems })
    }
}

/// The mode, and whether it is what `auto` stands for.
fn mode(settings: &mut Settings, auto: Mode) -> (Mode, bool) {
    let name = settings.text("mode").unwrap_or("auto");
    let is_auto = name == "auto";
    let mode = Mode::ALL.into_iter().find(|mode| mode.name() == name);
    if !is_auto && mode.is_none() {
        let names = Mode::ALL.map(Mode::name).join(" or ");
        settings.refuse("mode", format!("this build does not have this mode; must be auto or {names}"));
    }
    (mode.unwrap_or(auto), is_auto)
}

/// The section of the file that a mode reads. Those without one of their own read that of iptables, as upstream's conversion
/// does.
#[derive(Clone, Copy)]
struct Section {
    masquerade_all: &'static str,
    masquerade_bit: &'static str,
    sync_period: &'static str,
    min_sync_period: &'static str,
    /// The sections that go unread instead.
    others: &'static [&'static str],
}

impl Section {
    const fn of(mode: Mode) -> Self {
        match mode {
            Mode::Ebpf | Mode::Iptables => Self {
                masquerade_all: "iptables.masqueradeAll",
                masquerade_bit: "iptables.masqueradeBit",
                sync_period: "iptables.syncPeriod",
                min_sync_period: "iptables.minSyncPeriod",
                others: &["nftables", "ipvs"],
            },
            Mode::Nftables => Self {
                masquerade_all: "nftables.masqueradeAll",
                masquerade_bit: "nftables.masqueradeBit",
                sync_period: "nftables.syncPeriod",
                min_sync_period: "nftables.minSyncPeriod",
                others: &["iptables", "ipvs"],
            },
            Mode::Ipvs => Self {
                masquerade_all: "iptables.masqueradeAll",
                masquerade_bit: "iptables.masqueradeBit",
                sync_period: "ipvs.syncPeriod",
                min_sync_period: "ipvs.minSyncPeriod",
                others: &["nftables"],
            },
        }
    }
}

/// The flag is for all modes.
fn masquerade_all(settings: &Settings, section: Section) -> bool {
    const BY_FLAG: &str = "iptables.masqueradeAll";
    settings.is_true(if settings.is_by_flag(BY_FLAG) { BY_FLAG } else { section.masquerade_all })
}

fn source(settings: &mut Settings) -> ObjectSource {
    let kubeconfig = settings.text("clientConnection.kubeconfig").map(PathBuf::from);
    let master = settings.text("shunt.master").map(String::from);
    if let Some(directory) = settings.text("shunt.manifests").map(PathBuf::from) {
        if master.is_some() {
            settings.refuse("shunt.master", "cannot stand beside manifests; objects come from one place");
        }
        return ObjectSource::Manifests(directory);
    }
    if let Some(url) = &master
        && !is_http_url(url)
    {
        settings.refuse("shunt.master", "must be a URL such as https://192.168.0.1:6443");
    }
    ObjectSource::Api { kubeconfig, master }
}

fn is_http_url(text: &str) -> bool {
    text.parse::<http::Uri>()
        .is_ok_and(|uri| matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some())
}

/// Upstream's `GetHostname`: lower case, without spaces around. `NODE_NAME` comes before the host name, since it is there
/// only where a manifest took it from the Node.
fn node_name(settings: &mut Settings, environment: &Environment) -> Arc<str> {
    let clean = |name: &str| name.trim().to_lowercase();
    if let Some(name) = settings.text("hostnameOverride").map(clean) {
        if name.is_empty() {
            settings.refuse("hostnameOverride", "must be the name of a Node");
        }
        return name.into();
    }
    let from_environment = environment.node_name.as_deref().map(clean).filter(|name| !name.is_empty());
    let name = from_environment.unwrap_or_else(|| clean(&environment.host_name));
    if name.is_empty() {
        settings
            .refuse("hostnameOverride", "must be the name of a Node, because this machine has no host name");
    }
    name.into()
}

fn cluster_cidrs(settings: &mut Settings) -> Vec<IpNet> {
    let (cidrs, _) = settings.cidrs("clusterCIDR").unwrap_or_default();
    let is_pair = cidrs.len() == 2 && cidrs[0].network().is_ipv4() != cidrs[1].network().is_ipv4();
    if cidrs.len() > 1 && !is_pair {
        settings.refuse(
            "clusterCIDR",
            "must be one CIDR, or one of each family, such as 10.244.0.0/16,fd44::/16",
        );
    }
    cidrs
}

fn detect_local(settings: &mut Settings) -> DetectLocalMode {
    match settings.text("detectLocalMode") {
        Some("NodeCIDR") => DetectLocalMode::NodeCidr,
        Some("BridgeInterface") => DetectLocalMode::BridgeInterface(interface(
            settings,
            "detectLocal.bridgeInterface",
            "BridgeInterface",
        )),
        Some("InterfaceNamePrefix") => {
            let path = "detectLocal.interfaceNamePrefix";
            DetectLocalMode::InterfaceNamePrefix(interface(settings, path, "InterfaceNamePrefix"))
        }
        _ => DetectLocalMode::ClusterCidr,
    }
}

fn interface(settings: &mut Settings, path: &'static str, mode: &str) -> Arc<str> {
    let name: Arc<str> = settings.text(path).unwrap_or_default().into();
    if name.is_empty() {
        settings.refuse(path, format!("must not be empty when detectLocalMode is {mode}"));
    }
    name
}

/// Upstream's default is every address, but for the nftables mode.
fn node_port_addresses(settings: &Settings, mode: Mode) -> NodePortAddresses {
    match settings.cidrs("nodePortAddresses") {
        None if mode == Mode::Nftables => NodePortAddresses::Primary { cidrs: Vec::new() },
        None => NodePortAddresses::All,
        Some((cidrs, true)) => NodePortAddresses::Primary { cidrs },
        Some((cidrs, false)) => NodePortAddresses::Cidrs(cidrs),
    }
}

/// A period of zero is Go's "unset" for `syncPeriod`; for `minSyncPeriod` it is taken at its word, which upstream documents as
/// "at once".
fn sync_periods(settings: &mut Settings, section: Section) -> (Duration, Duration) {
    let sync_period = above_zero(settings.duration(section.sync_period)).unwrap_or(SYNC_PERIOD);
    // Upstream's default is a second, because a change costs it that much. Here one costs a tenth of a millisecond at 10,000
    // Services, and what comes faster than that is taken together anyhow.
    let min_sync_period = settings.duration(section.min_sync_period).unwrap_or(Duration::ZERO);
    if min_sync_period > sync_period {
        let allowed = format!("must not be longer than {}, which is {sync_period:?}", section.sync_period);
        settings.refuse(section.min_sync_period, allowed);
    }
    (min_sync_period, sync_period)
}

fn above_zero(duration: Option<Duration>) -> Option<Duration> {
    duration.filter(|duration| !duration.is_zero())
}

/// Upstream's `getDefaultAddresses`: of the family of `bindAddress`, metrics on loopback only.
fn bind_addresses(settings: &Settings) -> (Option<SocketAddr>, Option<SocketAddr>) {
    let (everywhere, loopback): (IpAddr, IpAddr) =
        if settings.address("bindAddress").unwrap_or(DEFAULT_BIND_ADDRESS).is_ipv4() {
            (Ipv4Addr::UNSPECIFIED.into(), Ipv4Addr::LOCALHOST.into())
        } else {
            (Ipv6Addr::UNSPECIFIED.into(), Ipv6Addr::LOCALHOST.into())
        };
    let address = |path, ip, port| {
        if settings.is_emptied_by_flag(path) {
            return None;
        }
        Some(settings.bind_address(path).unwrap_or(SocketAddr::new(ip, port)))
    };
    (
        address("healthzBindAddress", everywhere, HEALTHZ_PORT),
        address("metricsBindAddress", loopback, METRICS_PORT),
    )
}

fn ebpf(settings: &mut Settings, environment: &Environment, is_needed: bool) -> EbpfSettings {
    let cgroup_root =
        settings.text("shunt.ebpf.cgroupRoot").map(PathBuf::from).or_else(|| environment.cgroup_root());
    if cgroup_root.is_none() && is_needed {
        let allowed = "must name a cgroup v2 directory, because none is mounted; mount one with: mount -t cgroup2 none /sys/fs/cgroup";
        settings.refuse("shunt.ebpf.cgroupRoot", allowed);
    }
    for path in ["shunt.ebpf.cgroupRoot", "shunt.ebpf.pinDir"] {
        if settings.text(path).is_some_and(|text| !text.starts_with('/')) {
            settings.refuse(path, "must be an absolute path");
        }
    }
    EbpfSettings {
        cgroup_root: cgroup_root.unwrap_or_default(),
        pin_dir: settings.text("shunt.ebpf.pinDir").unwrap_or(PIN_DIR).into(),
        map_sizes: map_sizes(settings),
        link_attachment: LinkAttachment::Probe,
        marks: marks(settings, Section::of(Mode::Ebpf)),
        netfilter: Some(SearchPath::default()),
    }
}

/// Upstream's bits, 14 and 15; whoever takes 15 for masquerading gets 14 for the other.
fn marks(settings: &Settings, section: Section) -> Marks {
    let masquerade =
        settings.integer(section.masquerade_bit).map_or(NodeValue::MASQUERADE_MARK, |bit| 1 << bit);
    let reject = match masquerade {
        NodeValue::REJECT_MARK => NodeValue::MASQUERADE_MARK,
        _ => NodeValue::REJECT_MARK,
    };
    Marks { masquerade, reject }
}

fn ipvs(settings: &mut Settings, section: Section) -> IpvsSettings {
    let default = IpvsSettings::default();
    let scheduler = settings.text("ipvs.scheduler").filter(|name| !name.is_empty());
    let scheduler: Arc<str> = scheduler.map_or(default.scheduler, Into::into);
    // `IP_VS_SCHEDNAME_MAXLEN`, with the zero that ends it.
    if scheduler.len() > 15 || !scheduler.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_') {
        settings.refuse("ipvs.scheduler", "must be the name of a scheduler, such as rr, wrr, lc, sh or mh");
    }
    let (exclude_cidrs, _) = settings.cidrs("ipvs.excludeCIDRs").unwrap_or_default();
    let timeouts = Timeouts {
        tcp: whole_seconds(settings, "ipvs.tcpTimeout"),
        tcp_fin: whole_seconds(settings, "ipvs.tcpFinTimeout"),
        udp: whole_seconds(settings, "ipvs.udpTimeout"),
    };
    IpvsSettings {
        scheduler,
        exclude_cidrs,
        strict_arp: settings.is_true("ipvs.strictARP"),
        timeouts,
        masquerade_mark: marks(settings, section).masquerade,
        path: SearchPath::default(),
    }
}

/// Parts of a second are dropped, as upstream does. The kernel counts in a number of its own that is shorter.
fn whole_seconds(settings: &mut Settings, path: &'static str) -> u32 {
    const MOST: u64 = i32::MAX as u64 / 1000;
    let seconds = settings.duration(path).map_or(0, |duration| duration.as_secs());
    if seconds > MOST {
        settings.refuse(path, format!("must not be longer than {MOST}s"));
    }
    u32::try_from(seconds).unwrap_or_default()
}

fn map_sizes(settings: &Settings) -> MapSizes {
    let default = MapSizes::default();
    let size = |path, default| settings.integer(path).unwrap_or(default);
    MapSizes {
        services: size("shunt.ebpf.mapSizes.services", default.services),
        endpoints: size("shunt.ebpf.mapSizes.endpoints", default.endpoints),
        members: size("shunt.ebpf.mapSizes.members", default.members),
        source_ranges: size("shunt.ebpf.mapSizes.sourceRanges", default.source_ranges),
        node_addresses: size("shunt.ebpf.mapSizes.nodeAddresses", default.node_addresses),
        affinity: size("shunt.ebpf.mapSizes.affinity", default.affinity),
        udp_flows: size("shunt.ebpf.mapSizes.udpFlows", default.udp_flows),
        tcp_connections: size("shunt.ebpf.mapSizes.tcpConnections", default.tcp_connections),
        udp_sockets: size("shunt.ebpf.mapSizes.udpSockets", default.udp_sockets),
        flows: size("shunt.ebpf.mapSizes.flows", default.flows),
        fragments: size("shunt.ebpf.mapSizes.fragments", default.fragments),
    }
}

/// A filter if one is set, else the level that the verbosity stands for; kube-proxy is commonly run at 2. What libraries
/// say comes only at the highest.
fn log_filter(settings: &mut Settings, environment: &Environment) -> String {
    if let Some(filter) = settings.text("shunt.logFilter") {
        let filter = filter.to_owned();
        if filter.parse::<tracing_subscriber::filter::Targets>().is_err() {
            settings.refuse(
                "shunt.logFilter",
                "must be a level or targets with levels, such as info,proxy_userspace=debug",
            );
        }
        return filter;
    }
    match settings.integer("logging.verbosity") {
        None => environment
            .log_filter
            .clone()
            .filter(|filter| !filter.is_empty())
            .unwrap_or_else(|| "info".into()),
        Some(0..=3) => "info".into(),
        Some(4..=5) => "info,shunt=debug,proxy_userspace=debug".into(),
        Some(6..=7) => "info,shunt=trace,proxy_userspace=trace".into(),
        Some(_) => "trace".into(),
    }
}
