//! Resolves the settings of the ebpf mode.

use std::{num::NonZeroU16, path::PathBuf};

use proxy_common::{layout::MapSizes, maglev::TableSize};

use super::{logging, masquerade_mark};
use crate::{
    config::{environment::Environment, resolved::EbpfConfig, settings::Settings},
    kernel::cgroup,
    mode::{
        BackstopPolicy, DsrReturn, LinksDirect, LinksMasquerade, LinksPath, LinksXdp, Mode, SocketsScope,
    },
    model::{PortRange, XdpPolicy},
};

/// Returns the settings of the dataplane. `is_needed` says that the user chose this mode.
pub(super) fn dataplane(settings: &mut Settings, environment: &Environment, is_needed: bool) -> EbpfConfig {
    let given = settings.text("shunt.ebpf.cgroupRoot").map(PathBuf::from);
    let cgroup_root = given.or_else(|| cgroup::first_mount(&environment.mounts));
    if cgroup_root.is_none() && is_needed {
        let allowed = "must be a cgroup v2 directory: none is mounted; mount one with: \
                       mount -t cgroup2 none /sys/fs/cgroup";
        settings.reject("shunt.ebpf.cgroupRoot", allowed);
    }
    for path in ["shunt.ebpf.cgroupRoot", "shunt.ebpf.pinDir"] {
        if settings.text(path).is_some_and(|text| !text.starts_with('/')) {
            settings.reject(path, "must be an absolute path");
        }
    }
    let (backstop, links_path) = backstop(settings);
    EbpfConfig {
        cgroup_root: cgroup_root.unwrap_or_default(),
        pin_dir: settings.text("shunt.ebpf.pinDir").unwrap_or_default().into(),
        map_sizes: map_sizes(settings),
        masquerade_mark: masquerade_mark(settings, Mode::Ebpf),
        log: logging::of_programs(settings),
        backstop,
        links_path,
        links_direct: links_direct(settings),
        maglev_table_size: maglev_table_size(settings),
        sockets_scope: settings
            .text("shunt.sockets.scope")
            .and_then(SocketsScope::from_name)
            .unwrap_or(SocketsScope::Auto),
    }
}

/// Returns the backstop's policy and the path of packets that come in on links.
fn backstop(settings: &mut Settings) -> (BackstopPolicy, LinksPath) {
    let policy = settings.text("shunt.backstop").and_then(BackstopPolicy::from_name);
    let path = settings.text("shunt.links.path").and_then(LinksPath::from_name);
    if (policy, path) == (Some(BackstopPolicy::Never), Some(LinksPath::Netfilter)) {
        settings.reject("shunt.links.path", "must be auto, programs or direct when shunt.backstop is never");
    }
    (policy.unwrap_or(BackstopPolicy::Auto), path.unwrap_or(LinksPath::Auto))
}

/// Returns which packets take the direct path.
fn links_direct(settings: &mut Settings) -> LinksDirect {
    const PATH: &str = "shunt.links.direct";
    let direct = settings.text(PATH).and_then(LinksDirect::from_name).unwrap_or(LinksDirect::Learned);
    let masquerade = settings.text("shunt.links.masquerade").and_then(LinksMasquerade::from_name);
    if (direct, masquerade) == (LinksDirect::Whole, Some(LinksMasquerade::Netfilter)) {
        settings.reject(PATH, "must be learned when shunt.links.masquerade is netfilter");
    }
    direct
}

/// Returns which links have an XDP program.
pub(super) fn xdp(settings: &Settings) -> XdpPolicy {
    match settings.text("shunt.links.xdp").and_then(LinksXdp::from_name) {
        None | Some(LinksXdp::Off) => XdpPolicy::Off,
        Some(LinksXdp::Auto) => XdpPolicy::Auto,
        Some(LinksXdp::Generic) => XdpPolicy::Generic,
        Some(LinksXdp::Native) => XdpPolicy::Native,
    }
}

/// Returns the port of the tunnel for direct server return, if it is on.
pub(super) fn dsr_port(settings: &Settings) -> Option<NonZeroU16> {
    NonZeroU16::new(settings.integer("shunt.dsr.port")).filter(|_| settings.is_true("shunt.dsr.enabled"))
}

/// Returns true if packets for clients go back through that tunnel.
pub(super) fn dsr_returns(settings: &Settings) -> bool {
    settings.text("shunt.dsr.return").and_then(DsrReturn::from_name) == Some(DsrReturn::Tunnel)
}

/// Returns the numbers of entries of the maps. A map that is not used has room for one.
fn map_sizes(settings: &mut Settings) -> MapSizes {
    let counted_services = counted_services(settings);
    let sizes = MapSizes::from_settings(|setting| settings.integer(setting.path));
    let uses_returns = dsr_port(settings).is_some() && dsr_returns(settings);
    let dsr_returns = if uses_returns { sizes.dsr_returns } else { 1 };
    MapSizes { counted_services, dsr_returns, ..sizes }
}

/// Returns the smallest number of entries of a Maglev table.
fn maglev_table_size(settings: &mut Settings) -> TableSize {
    const PATH: &str = "shunt.links.maglevTableSize";
    let size = TableSize::of_entries(settings.integer(PATH));
    if size.is_none() {
        let sizes = TableSize::ENTRIES.map(|entries| entries.to_string());
        settings.reject(PATH, format!("must be one of these primes: {}", sizes.join(", ")));
    }
    size.unwrap_or_default()
}

/// Returns the source ports of the flows that the link programs masquerade, if they may.
pub(super) fn masquerade_ports(settings: &mut Settings) -> Option<PortRange> {
    const PATH: &str = "shunt.links.masqueradePorts";
    let ports = settings.text(PATH).and_then(PortRange::parse);
    if ports.is_none() {
        settings.reject(PATH, "must be a range of ports such as 1024-29999");
    }
    let may_masquerade = match links_masquerade(settings) {
        (LinksMasquerade::Programs, _) => true,
        (LinksMasquerade::Auto, path) => matches!(path, LinksPath::Auto | LinksPath::Direct),
        (LinksMasquerade::Netfilter, _) => false,
    };
    ports.filter(|_| may_masquerade)
}

/// Returns true if the programs masquerade only on a node that has the direct path, and shunt
/// decides whether this node has it.
pub(super) fn masquerades_with_direct_path(settings: &Settings) -> bool {
    links_masquerade(settings) == (LinksMasquerade::Auto, LinksPath::Auto)
}

fn links_masquerade(settings: &Settings) -> (LinksMasquerade, LinksPath) {
    let by = settings.text("shunt.links.masquerade").and_then(LinksMasquerade::from_name);
    let path = settings.text("shunt.links.path").and_then(LinksPath::from_name);
    (by.unwrap_or(LinksMasquerade::Auto), path.unwrap_or(LinksPath::Auto))
}

/// Returns the number of Services with metrics of their own.
pub(super) fn counted_services(settings: &Settings) -> u32 {
    if settings.is_true("shunt.serviceMetrics.enabled") {
        settings.integer("shunt.serviceMetrics.maxServices")
    } else {
        0
    }
}
