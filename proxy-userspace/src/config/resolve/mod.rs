//! Loads a [`Config`] from the command line, the file and the environment, with upstream's defaults
//! and checks that involve several settings.

mod ebpf;
mod logging;

pub use self::logging::filter_at as log_filter_at;

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use ipnet::IpNet;

use super::{
    effective::EffectiveSettings,
    environment::Environment,
    error::ConfigError,
    file::ConfigFile,
    flags::Flags,
    gates::{self, FeatureGate, FeatureGates},
    resolved::{Config, IpvsConfig, ObjectSource},
    settings::Settings,
};
use crate::{
    kernel::ipvs::Timeouts,
    mode::Mode,
    model::{
        Balance, DetectLocalMode, InterfaceGlobs, LinkName, ModelSettings, NodePortAddresses,
        parse_cidr_sloppy,
    },
    net::ContentType,
    node::{ConntrackSettings, NodeSettings},
};

const HEALTHZ_PORT: u16 = 10256;
const METRICS_PORT: u16 = 10249;
const LOCALHOST_NODE_PORTS: &str = "iptables.localhostNodePorts";

impl Config {
    /// Reads the file that the flags name, if any, and combines flags, file and defaults.
    pub fn load(flags: &Flags, environment: &Environment) -> Result<Self, ConfigError> {
        let file = flags.config.as_ref().map(ConfigFile::read).transpose()?;
        Self::load_from(flags, file, environment, Mode::Ebpf)
    }

    /// Combines flags, a file that was read already, and defaults. If the mode is `auto`, uses the
    /// sections and defaults of the mode `auto`.
    pub fn load_from(
        flags: &Flags,
        file: Option<ConfigFile>,
        environment: &Environment,
        auto: Mode,
    ) -> Result<Self, ConfigError> {
        let yaml = file.as_ref().map(ConfigFile::yaml).transpose()?;
        let path = || file.as_ref().map(|file| file.path().to_owned());
        let config = Self::from_parts(flags, yaml.as_ref(), environment, auto);
        let config = config.map_err(|error| error.in_file(path()))?;
        Ok(Self { file, ..config })
    }

    pub(in crate::config) fn from_parts(
        flags: &Flags,
        file: Option<&serde_yaml_ng::Value>,
        environment: &Environment,
        auto: Mode,
    ) -> Result<Self, ConfigError> {
        let mut settings = Settings::default();
        if let Some(file) = file {
            settings.add_file(file);
        }
        flags.add_to(&mut settings);
        resolve(settings, environment, auto)
    }
}

/// Resolves all settings. If the mode is `auto`, uses the sections and defaults of the mode `auto`.
fn resolve(mut settings: Settings, environment: &Environment, auto: Mode) -> Result<Config, ConfigError> {
    let name = settings.text("mode").unwrap_or("auto");
    let (mode_is_auto, mode) = (name == "auto", Mode::from_name(name));
    // An unknown name was rejected when it was read.
    let mode = mode.unwrap_or(auto);
    settings.check_sections(mode, mode_is_auto);
    let (min_sync_period, sync_period) = sync_periods(&mut settings, mode);
    let (healthz_bind_address, metrics_bind_address) = bind_addresses(&settings);
    let feature_gates = FeatureGates::of(&settings);
    gates::check(&mut settings, &feature_gates, mode);
    logging::check_options(&mut settings, &feature_gates);
    let mut config = Config {
        mode,
        mode_is_auto,
        source: source(&mut settings),
        model: model(&mut settings, environment, mode, &feature_gates),
        node: node(&settings),
        healthz_bind_address,
        metrics_bind_address,
        bind_address_hard_fail: settings.is_true("bindAddressHardFail"),
        profiling: settings.is_true("enableProfiling"),
        ui: settings.is_true("shunt.ui"),
        feature_gates,
        sync_period,
        min_sync_period,
        masquerade_mark: masquerade_mark(&settings, mode),
        localhost_node_ports: settings.is_true(LOCALHOST_NODE_PORTS),
        counted_services: ebpf::counted_services(&settings),
        ebpf: ebpf::dataplane(&mut settings, environment, mode == Mode::Ebpf && !mode_is_auto),
        ipvs: ipvs(&mut settings, mode),
        log_format: logging::format(&settings),
        log_filter: logging::filter(&mut settings, environment),
        reload_jitter: settings.duration("shunt.reload.jitter"),
        ineffective: Vec::new(),
        deprecated: std::mem::take(&mut settings.deprecated),
        effective: EffectiveSettings::of(&settings, mode, healthz_bind_address, metrics_bind_address),
        file: None,
    };
    settings.find_ineffective(mode);
    let (invalid, ineffective) = settings.finish();
    if !invalid.is_empty() {
        return Err(ConfigError::Invalid { file: None, invalid, ineffective });
    }
    config.ineffective = ineffective;
    Ok(config)
}

/// Returns the section with the masquerade settings of a mode. As in upstream's conversion, a mode
/// without such settings of its own reads those of iptables.
const fn masquerade_section(mode: Mode) -> &'static str {
    if matches!(mode, Mode::Nftables) { "nftables" } else { "iptables" }
}

fn model(
    settings: &mut Settings,
    environment: &Environment,
    mode: Mode,
    gates: &FeatureGates,
) -> ModelSettings {
    ModelSettings {
        node_name: node_name(settings, environment),
        bind_address: settings.address("bindAddress").filter(|address| !address.is_unspecified()),
        cluster_cidrs: cluster_cidrs(settings),
        detect_local: detect_local(settings),
        node_port_addresses: node_port_addresses(settings, mode),
        loopback_node_ports: mode != Mode::Ebpf || settings.is_true(LOCALHOST_NODE_PORTS),
        ignores_external_ips: !gates.is_on(FeatureGate::AllowServiceExternalIps),
        leaves_cluster_ips_of_links: mode == Mode::Ebpf,
        masquerade_all: settings.is_true(&field(settings, masquerade_section(mode), "masqueradeAll")),
        masquerade_ports: ebpf::masquerade_ports(settings).filter(|_| mode == Mode::Ebpf),
        masquerades_with_direct_path: ebpf::masquerades_with_direct_path(settings),
        xdp: ebpf::xdp(settings),
        dsr_port: ebpf::dsr_port(settings).filter(|_| mode == Mode::Ebpf),
        dsr_returns: ebpf::dsr_returns(settings),
        balance: if settings.is_true("shunt.links.maglev") { Balance::Maglev } else { Balance::Random },
        interfaces: InterfaceGlobs {
            only: settings.globs("shunt.ebpf.interfaces"),
            except: settings.globs("shunt.ebpf.excludeInterfaces"),
        },
    }
}

/// Returns the path of a field in a section. Flags of the iptables mode apply to nftables, too.
fn field(settings: &Settings, section: &str, name: &str) -> String {
    let iptables = format!("iptables.{name}");
    if section != "ipvs" && settings.is_by_flag(&iptables) { iptables } else { format!("{section}.{name}") }
}

fn node(settings: &Settings) -> NodeSettings {
    let conntrack = ConntrackSettings {
        max_per_core: settings.integer("conntrack.maxPerCore"),
        min: settings.integer("conntrack.min"),
        tcp_established_timeout: settings.duration("conntrack.tcpEstablishedTimeout"),
        tcp_close_wait_timeout: settings.duration("conntrack.tcpCloseWaitTimeout"),
        tcp_be_liberal: settings.is_true("conntrack.tcpBeLiberal"),
        udp_timeout: settings.duration("conntrack.udpTimeout"),
        udp_stream_timeout: settings.duration("conntrack.udpStreamTimeout"),
    };
    NodeSettings { conntrack, oom_score_adj: settings.integer("oomScoreAdj") }
}

fn ipvs(settings: &mut Settings, mode: Mode) -> IpvsConfig {
    let scheduler: Arc<str> =
        settings.text("ipvs.scheduler").filter(|name| !name.is_empty()).unwrap_or("rr").into();
    let is_used = mode == Mode::Ipvs;
    // `IP_VS_SCHEDNAME_MAXLEN`, with the final zero.
    if is_used
        && (scheduler.len() > 15
            || !scheduler.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_'))
    {
        settings.reject("ipvs.scheduler", "must be the name of a scheduler, such as rr, wrr, lc, sh or mh");
    }
    IpvsConfig {
        scheduler,
        exclude_cidrs: settings.cidrs("ipvs.excludeCIDRs").unwrap_or_default().0,
        strict_arp: settings.is_true("ipvs.strictARP"),
        timeouts: Timeouts {
            tcp: whole_seconds(settings, "ipvs.tcpTimeout", is_used),
            tcp_fin: whole_seconds(settings, "ipvs.tcpFinTimeout", is_used),
            udp: whole_seconds(settings, "ipvs.udpTimeout", is_used),
        },
    }
}

/// Drops fractions of a second, as upstream does. The kernel multiplies by HZ (<= 1000) in an
/// `int`.
fn whole_seconds(settings: &mut Settings, path: &'static str, is_used: bool) -> u32 {
    const MAX: u64 = i32::MAX as u64 / 1000;
    let seconds = settings.duration(path).as_secs();
    if is_used && seconds > MAX {
        settings.reject(path, format!("must not be longer than {MAX}s"));
    }
    u32::try_from(seconds).unwrap_or_default()
}

fn source(settings: &mut Settings) -> ObjectSource {
    let kubeconfig = settings.text("clientConnection.kubeconfig").map(PathBuf::from);
    let servers: Vec<String> = settings
        .text("shunt.master")
        .map(|urls| urls.split(',').map(|url| url.trim().to_owned()).collect())
        .unwrap_or_default();
    if let Some(directory) = settings.text("shunt.manifests").map(PathBuf::from) {
        if !servers.is_empty() {
            settings.reject(
                "shunt.master",
                "must not be set together with --manifests: objects come from one source",
            );
        }
        return ObjectSource::Manifests(directory);
    }
    if !servers.iter().all(|server| is_server(server)) {
        settings.reject(
            "shunt.master",
            "must be a URL such as https://192.168.0.1:6443, a host with or without a port, or several with commas between \
             them",
        );
    }
    ObjectSource::Api { kubeconfig, servers, content_types: content_types(settings) }
}

/// Returns the encodings that the API server may use, the preferred one first. Any server knows
/// JSON, so it is the second if no list is given, as with client-go.
fn content_types(settings: &mut Settings) -> Vec<ContentType> {
    const LIST: &str = "clientConnection.acceptContentTypes";
    let names = ContentType::NAMES;
    if let Some(list) = settings.text(LIST).filter(|list| !list.trim().is_empty()) {
        let media_types = list.split(',').filter(|media_type| !media_type.trim().is_empty());
        let listed = media_types.map(ContentType::named);
        let listed: Option<Vec<_>> = listed.collect();
        return listed.unwrap_or_else(|| {
            settings.reject(LIST, format!("must be a list of {}", names.join(" and ")));
            Vec::new()
        });
    }
    let preferred = settings.text("clientConnection.contentType").and_then(ContentType::named);
    match preferred {
        Some(ContentType::Json) => vec![ContentType::Json],
        Some(ContentType::Protobuf) | None => ContentType::ALL.to_vec(),
    }
}

/// Returns true for a URL, and as with client-go for one without its scheme.
fn is_server(text: &str) -> bool {
    let url = if text.contains("://") { text.to_owned() } else { format!("http://{text}") };
    url.parse::<http::Uri>()
        .is_ok_and(|uri| matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some())
}

/// Returns the name in lower case and without surrounding spaces, as upstream's `GetHostname` does.
/// `NODE_NAME` precedes the host name: it is only set if a manifest takes it from the Node.
fn node_name(settings: &mut Settings, environment: &Environment) -> Arc<str> {
    let clean = |name: &str| name.trim().to_lowercase();
    if let Some(name) = settings.text("hostnameOverride").map(clean) {
        if name.is_empty() {
            settings.reject("hostnameOverride", "must be the name of a Node");
        }
        return name.into();
    }
    let from_environment = environment.node_name.as_deref().map(clean).filter(|name| !name.is_empty());
    let name = from_environment.unwrap_or_else(|| clean(&environment.host_name));
    if name.is_empty() {
        settings.reject("hostnameOverride", "must be the name of a Node: this machine has no host name");
    }
    name.into()
}

/// Upstream checks them only if they detect local traffic.
fn cluster_cidrs(settings: &mut Settings) -> Vec<IpNet> {
    const PATH: &str = "clusterCIDR";
    let Some(text) = settings.text(PATH) else { return Vec::new() };
    let cidrs: Option<Vec<_>> = text.split(',').map(|cidr| parse_cidr_sloppy(cidr.trim())).collect();
    let cidrs = cidrs.filter(|cidrs| match cidrs[..] {
        [_] => true,
        [one, other] => one.addr().is_ipv4() != other.addr().is_ipv4(),
        _ => false,
    });
    let Some(cidrs) = cidrs else {
        let needed = "one CIDR, or one of each family, such as 10.244.0.0/16,fd44::/16";
        if settings.text("detectLocalMode") == Some("ClusterCIDR") {
            settings.reject(PATH, format!("must be {needed}"));
        } else {
            settings.add_ineffective(PATH, format!("not {needed}; detectLocalMode does not need it"));
        }
        return Vec::new();
    };
    cidrs
}

fn detect_local(settings: &mut Settings) -> DetectLocalMode {
    match settings.text("detectLocalMode") {
        Some("NodeCIDR") => DetectLocalMode::NodeCidr,
        Some("BridgeInterface") => {
            let path = "detectLocal.bridgeInterface";
            let bridge = interface(settings, path, "BridgeInterface");
            bridge.map_or(DetectLocalMode::ClusterCidr, DetectLocalMode::BridgeInterface)
        }
        Some("InterfaceNamePrefix") => {
            let path = "detectLocal.interfaceNamePrefix";
            let prefix = interface(settings, path, "InterfaceNamePrefix");
            prefix.map_or(DetectLocalMode::ClusterCidr, DetectLocalMode::InterfaceNamePrefix)
        }
        _ => DetectLocalMode::ClusterCidr,
    }
}

/// Returns the name of a link, if it is valid. Otherwise the configuration is rejected.
fn interface(settings: &mut Settings, path: &'static str, mode: &str) -> Option<LinkName> {
    let name = settings.text(path).unwrap_or_default();
    let problem = match LinkName::parse(name) {
        Ok(name) => return Some(name),
        Err(_) if name.is_empty() => format!("must not be empty when detectLocalMode is {mode}"),
        Err(error) => error.to_string(),
    };
    settings.reject(path, problem);
    None
}

/// Upstream's default is every address, except in the nftables mode.
fn node_port_addresses(settings: &mut Settings, mode: Mode) -> NodePortAddresses {
    const PATH: &str = "nodePortAddresses";
    let given = settings.cidrs(PATH);
    let is_loopback = |cidr: &IpNet| cidr.addr().is_loopback();
    if mode == Mode::Nftables && given.as_ref().is_some_and(|(cidrs, _)| cidrs.iter().any(is_loopback)) {
        let why = "the nftables mode does not serve node ports on loopback addresses; the ebpf mode does";
        settings.add_ineffective_part(PATH, why);
    }
    match given {
        None if mode == Mode::Nftables => NodePortAddresses::Primary { cidrs: Vec::new() },
        None => NodePortAddresses::All,
        Some((cidrs, true)) => NodePortAddresses::Primary { cidrs },
        Some((cidrs, false)) => NodePortAddresses::Cidrs(cidrs),
    }
}

/// Returns `minSyncPeriod` and `syncPeriod`.
///
/// A `minSyncPeriod` of zero means "at once", as upstream documents it, also in the file. If nobody
/// sets it, the ebpf mode does not use upstream's default of one second: with 10,000 Services a
/// change costs a tenth of a millisecond, and the loop combines changes that arrive faster.
fn sync_periods(settings: &mut Settings, mode: Mode) -> (Duration, Duration) {
    let section = if mode == Mode::Ebpf { "iptables" } else { mode.name() };
    let period = &field(settings, section, "syncPeriod");
    let least = &field(settings, section, "minSyncPeriod");
    let is_unset = settings.given(least).is_none() && !settings.is_by_flag(least);
    let sync_period = settings.duration(period);
    let min_sync_period =
        if is_unset && mode == Mode::Ebpf { Duration::ZERO } else { settings.duration(least) };
    if min_sync_period > sync_period {
        if is_unset {
            settings
                .reject(period, format!("must not be shorter than {least}, which is {min_sync_period:?}"));
        } else {
            settings.reject(least, format!("must not be longer than {period}, which is {sync_period:?}"));
        }
    }
    (min_sync_period, sync_period)
}

/// Returns the addresses of healthz and metrics. The defaults follow upstream's
/// `getDefaultAddresses`: the family of `bindAddress`, and loopback for metrics.
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

fn masquerade_mark(settings: &Settings, mode: Mode) -> u32 {
    1 << settings.integer::<u32>(&format!("{}.masqueradeBit", masquerade_section(mode)))
}
