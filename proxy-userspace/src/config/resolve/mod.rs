//! From settings to [`Config`]: upstream's defaults, and the checks that look at several settings at once.

mod logging;

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use ipnet::IpNet;
use proxy_common::layout::NodeValue;

use super::{
    Config, ConfigError, Environment, LogFormat, Mode, ObjectSource, settings::Settings, written::Effective,
};
use crate::{
    dataplane::{
        ebpf::{EbpfSettings, LinkAttachment, MapSizes, Marks},
        iptables::IptablesSettings,
        ipvs::IpvsSettings,
        nftables::NftablesSettings,
    },
    kernel::{command::SearchPath, ipvs::Timeouts},
    model::{DetectLocalMode, InterfaceGlobs, ModelSettings, NodePortAddresses, sloppy_cidr},
};

const HEALTHZ_PORT: u16 = 10256;
const METRICS_PORT: u16 = 10249;

/// Fields whose flags count in every mode but ipvs, as upstream's `processV1Alpha1Flags` has it, or in all.
pub(super) const FLAGS_FOR_ALL_BUT_IPVS: [&str; 3] =
    ["iptables.syncPeriod", "iptables.minSyncPeriod", "iptables.masqueradeAll"];

pub(super) fn resolve(
    mut settings: Settings,
    environment: &Environment,
    auto: Mode,
) -> Result<Config, ConfigError> {
    let (mode, mode_is_auto) = mode(&mut settings, auto);
    let section = Section::of(mode);
    let (min_sync_period, sync_period) = sync_periods(&mut settings, mode, section);
    let (healthz_bind_address, metrics_bind_address) = bind_addresses(&settings);
    logging::check_options(&mut settings);
    let mut config = Config {
        mode,
        mode_is_auto,
        source: source(&mut settings),
        model: model(&mut settings, environment, mode, section),
        node: super::node::node_settings(&settings),
        healthz_bind_address,
        metrics_bind_address,
        bind_address_hard_fail: settings.is_true("bindAddressHardFail"),
        profiling: settings.is_true("enableProfiling"),
        sync_period,
        min_sync_period,
        ebpf: ebpf(&mut settings, environment, mode == Mode::Ebpf && !mode_is_auto),
        nftables: NftablesSettings { masquerade: marks(&settings, section).masquerade },
        iptables: IptablesSettings {
            masquerade_mark: marks(&settings, section).masquerade,
            localhost_node_ports: settings.is_true("iptables.localhostNodePorts"),
            path: SearchPath::default(),
        },
        ipvs: ipvs(&mut settings, section),
        log_format: logging::format(&settings),
        log_filter: logging::filter(&mut settings, environment),
        notes: Vec::new(),
        effective: Effective::default(),
        file: None,
    };
    settings.note_what_has_no_effect(mode.name());
    config.effective = Effective::of(&settings, mode, healthz_bind_address, metrics_bind_address);
    let (problems, notes) = settings.finish();
    if problems.is_empty() { Ok(Config { notes, ..config }) } else { Err(ConfigError::Invalid { problems }) }
}

/// The mode, and whether it is what `auto` stands for.
fn mode(settings: &mut Settings, auto: Mode) -> (Mode, bool) {
    let name = settings.text("mode").unwrap_or("auto");
    // What is neither was refused as it was read.
    let mode = Mode::ALL.into_iter().find(|mode| mode.name() == name);
    (mode.unwrap_or(auto), name == "auto")
}

/// The section of the file that a mode reads. Those without one of their own read that of iptables, as upstream's conversion
/// does.
#[derive(Clone, Copy)]
struct Section {
    masquerade_all: &'static str,
    masquerade_bit: &'static str,
    sync_period: &'static str,
    min_sync_period: &'static str,
}

impl Section {
    fn of(mode: Mode) -> Self {
        let iptables = Self {
            masquerade_all: "iptables.masqueradeAll",
            masquerade_bit: "iptables.masqueradeBit",
            sync_period: "iptables.syncPeriod",
            min_sync_period: "iptables.minSyncPeriod",
        };
        match mode.name() {
            "nftables" => Self {
                masquerade_all: "nftables.masqueradeAll",
                masquerade_bit: "nftables.masqueradeBit",
                sync_period: "nftables.syncPeriod",
                min_sync_period: "nftables.minSyncPeriod",
            },
            "ipvs" => {
                Self { sync_period: "ipvs.syncPeriod", min_sync_period: "ipvs.minSyncPeriod", ..iptables }
            }
            _ => iptables,
        }
    }
}

fn model(settings: &mut Settings, environment: &Environment, mode: Mode, section: Section) -> ModelSettings {
    ModelSettings {
        node_name: node_name(settings, environment),
        bind_address: settings.address("bindAddress").filter(|address| !address.is_unspecified()),
        cluster_cidrs: cluster_cidrs(settings),
        detect_local: detect_local(settings),
        node_port_addresses: node_port_addresses(settings, mode),
        masquerade_all: settings.is_true(either(settings, "iptables.masqueradeAll", section.masquerade_all)),
        interfaces: InterfaceGlobs {
            only: settings.globs("shunt.ebpf.interfaces"),
            except: settings.globs("shunt.ebpf.excludeInterfaces"),
        },
    }
}

/// The first path if it was given by flag, which is for all modes.
fn either(settings: &Settings, by_flag: &'static str, otherwise: &'static str) -> &'static str {
    if settings.is_by_flag(by_flag) { by_flag } else { otherwise }
}

fn ipvs(settings: &mut Settings, section: Section) -> IpvsSettings {
    let scheduler: Arc<str> =
        settings.text("ipvs.scheduler").filter(|name| !name.is_empty()).unwrap_or("rr").into();
    // `IP_VS_SCHEDNAME_MAXLEN`, with the zero that ends it.
    if scheduler.len() > 15 || !scheduler.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_') {
        settings.refuse("ipvs.scheduler", "must be the name of a scheduler, such as rr, wrr, lc, sh or mh");
    }
    let timeouts = Timeouts {
        tcp: whole_seconds(settings, "ipvs.tcpTimeout"),
        tcp_fin: whole_seconds(settings, "ipvs.tcpFinTimeout"),
        udp: whole_seconds(settings, "ipvs.udpTimeout"),
    };
    IpvsSettings {
        scheduler,
        exclude_cidrs: settings.cidrs("ipvs.excludeCIDRs").unwrap_or_default().0,
        strict_arp: settings.is_true("ipvs.strictARP"),
        timeouts,
        masquerade_mark: marks(settings, section).masquerade,
        counted_services: counted_services(settings),
        path: SearchPath::default(),
    }
}

/// Parts of a second are dropped, as upstream does. The kernel counts in a number of its own that is shorter.
fn whole_seconds(settings: &mut Settings, path: &'static str) -> u32 {
    const MOST: u64 = i32::MAX as u64 / 1000;
    let seconds = settings.duration(path).as_secs();
    if seconds > MOST {
        settings.refuse(path, format!("must not be longer than {MOST}s"));
    }
    u32::try_from(seconds).unwrap_or_default()
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

/// Upstream looks at them only if local traffic is told by them.
fn cluster_cidrs(settings: &mut Settings) -> Vec<IpNet> {
    const PATH: &str = "clusterCIDR";
    let Some(text) = settings.text(PATH) else { return Vec::new() };
    let cidrs: Option<Vec<_>> = text.split(',').map(|cidr| sloppy_cidr(cidr.trim())).collect();
    let cidrs = cidrs.filter(|cidrs| match cidrs[..] {
        [_] => true,
        [one, other] => one.addr().is_ipv4() != other.addr().is_ipv4(),
        _ => false,
    });
    let Some(cidrs) = cidrs else {
        let needed = "one CIDR, or one of each family, such as 10.244.0.0/16,fd44::/16";
        if settings.text("detectLocalMode") == Some("ClusterCIDR") {
            settings.refuse(PATH, format!("must be {needed}"));
        } else {
            settings.note(PATH, format!("not {needed}; detectLocalMode does not need it"));
        }
        return Vec::new();
    };
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

/// `minSyncPeriod` of zero is taken at its word, which upstream documents as "at once", also in the file. Where nobody sets it, the
/// eBPF mode has no use for upstream's second: a change costs a tenth of a millisecond at 10,000 Services, and what comes
/// faster than that is taken together anyhow.
fn sync_periods(settings: &mut Settings, mode: Mode, section: Section) -> (Duration, Duration) {
    let by_flag = |settings: &Settings, flag, own| match mode.name() {
        "ipvs" => own,
        _ => either(settings, flag, own),
    };
    let period = by_flag(settings, "iptables.syncPeriod", section.sync_period);
    let least = by_flag(settings, "iptables.minSyncPeriod", section.min_sync_period);
    let is_unset = !settings.is_given(least) && !settings.is_by_flag(least);
    let sync_period = settings.duration(period);
    let min_sync_period =
        if is_unset && mode == Mode::Ebpf { Duration::ZERO } else { settings.duration(least) };
    if min_sync_period > sync_period {
        if is_unset {
            settings
                .refuse(period, format!("must not be shorter than {least}, which is {min_sync_period:?}"));
        } else {
            settings.refuse(least, format!("must not be longer than {period}, which is {sync_period:?}"));
        }
    }
    (min_sync_period, sync_period)
}

/// Upstream's `getDefaultAddresses`: of the family of `bindAddress`, metrics on loopback only.
fn bind_addresses(settings: &Settings) -> (Option<SocketAddr>, Option<SocketAddr>) {
    let (everywhere, loopback): (IpAddr, IpAddr) =
        if settings.address("bindAddress").is_none_or(|address| address.is_ipv4()) {
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
        pin_dir: settings.text("shunt.ebpf.pinDir").unwrap_or_default().into(),
        map_sizes: MapSizes {
            counted_services: counted_services(settings),
            ..MapSizes::from_settings(|setting| settings.integer(setting.path))
        },
        link_attachment: LinkAttachment::Probe,
        marks: marks(settings, Section::of(Mode::Ebpf)),
        netfilter: Some(SearchPath::default()),
        log: logging::of_programs(settings),
    }
}

/// Upstream's bits, 14 and 15; whoever takes 15 for masquerading gets 14 for the other.
fn marks(settings: &Settings, section: Section) -> Marks {
    let masquerade = 1 << settings.integer::<u32>(section.masquerade_bit);
    let reject = match masquerade {
        NodeValue::REJECT_MARK => NodeValue::MASQUERADE_MARK,
        _ => NodeValue::REJECT_MARK,
    };
    Marks { masquerade, reject }
}

fn counted_services(settings: &Settings) -> u32 {
    if settings.is_true("shunt.serviceMetrics.enabled") {
        settings.integer("shunt.serviceMetrics.maxServices")
    } else {
        0
    }
}
