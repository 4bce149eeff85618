//! Reads the facts. Nothing here changes the node: the probe tests in namespaces that it removes.

use std::{fmt::Display, path::Path};

use nix::unistd::Uid;
use tokio::runtime;

use super::{
    DoctorArguments,
    facts::{Daemon, Facts, Pins, Sysctls},
};
use crate::{
    causes::with_causes,
    dataplane::{modes_with_rules, pinned_map_fill},
    health::{NodeReport, ReportedMap},
    inspect::{Client, ClientError, DriftRow, Filter, LeftOutRow, Resource},
    kernel::{
        self, Confinement, KernelError,
        bpf::PinDir,
        command::Launcher,
        processes,
        sysctl::{self, Sysctl},
    },
    link_path, probe,
};

/// The comm of kube-proxy's processes.
const KUBE_PROXY: &str = "kube-proxy";

/// Collects the errors of what cannot be read.
#[derive(Default)]
struct Unread(Vec<String>);

impl Unread {
    fn or_default<T: Default, E: Display>(&mut self, result: Result<T, E>) -> T {
        result.unwrap_or_else(|error| {
            self.0.push(error.to_string());
            T::default()
        })
    }
}

/// Reads the facts in the network namespace of the caller.
pub(super) fn facts(arguments: &DoctorArguments, launcher: &Launcher) -> Facts {
    let mut unread = Unread::default();
    let Asked { daemon, left_out_ports, drift } = ask_daemon(&mut unread);
    let pin_directory = daemon.report().map_or_else(
        || arguments.pin_directory.clone(),
        |report| Path::new(&report.pin_directory).to_owned(),
    );
    let has_report = daemon.report().is_some();
    // The mark bits of the daemon are not known here: rules of others that use them are not found.
    let evidence = link_path::read(launcher, 0).map(Some);
    let pins = pins(&pin_directory, !has_report);
    Facts {
        daemon,
        left_out_ports,
        drift,
        evaluation: probe::evaluate(&kernel::probe::facts(launcher, &pin_directory)),
        kube_proxies: processes::named(KUBE_PROXY),
        rules: modes_with_rules(launcher),
        pins: unread.or_default(pins),
        sysctls: sysctls(&mut unread),
        evidence: unread.or_default(evidence),
        is_root: Uid::effective().is_root(),
        confinement: if has_report { None } else { Confinement::of_this_process() },
        unread: unread.0,
    }
}

/// What the daemon says.
struct Asked {
    daemon: Daemon,
    left_out_ports: Vec<LeftOutRow>,
    drift: Vec<DriftRow>,
}

impl From<Daemon> for Asked {
    fn from(daemon: Daemon) -> Self {
        Self { daemon, left_out_ports: Vec::new(), drift: Vec::new() }
    }
}

fn ask_daemon(unread: &mut Unread) -> Asked {
    match runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime.block_on(ask(unread)),
        Err(error) => Daemon::Silent(error.to_string()).into(),
    }
}

async fn ask(unread: &mut Unread) -> Asked {
    let (mut client, report) = match reported().await {
        Err(ClientError::NotRunning(_)) => return Daemon::NotRunning.into(),
        Err(error) => return Daemon::Silent(with_causes(&error)).into(),
        Ok(asked) => asked,
    };
    // While no mode runs there are no lists. Before the first full sync, the kernel may hold
    // anything.
    let (runs, is_ready) = (report.mode.is_some(), report.not_ready.is_empty());
    let mut asked = Asked::from(Daemon::Running(report.into()));
    let filter = Filter::default();
    if runs {
        let on_row = |row| asked.left_out_ports.push(row);
        unread.or_default(client.list(Resource::LeftOut, &filter, on_row).await);
    }
    if runs && is_ready {
        let on_row = |row| asked.drift.push(row);
        unread.or_default(client.list(Resource::Drift, &filter, on_row).await);
    }
    asked
}

async fn reported() -> Result<(Client, NodeReport), ClientError> {
    let mut client = Client::connect().await?;
    let report = client.node().await?;
    Ok((client, report))
}

/// Reads what is pinned; with `counts_entries` also how full the maps are.
fn pins(directory: &Path, counts_entries: bool) -> Result<Pins, KernelError> {
    let unfinished = PinDir::unfinished(directory);
    let links = match PinDir::existing(directory)? {
        // A directory without links was never used.
        Some(pins) if directory.join("links").is_dir() => pins.link_names()?.len(),
        _ => 0,
    };
    let maps = if counts_entries && links > 0 { pinned_map_fill(directory)? } else { Vec::new() };
    let maps = maps.into_iter().map(ReportedMap::from).collect();
    Ok(Pins { directory: directory.to_owned(), links, maps, unfinished })
}

fn sysctls(unread: &mut Unread) -> Sysctls {
    let mut read = |name| unread.or_default(Sysctl(name).read());
    let numbers = [
        "ipv4/ip_forward",
        "ipv6/conf/all/forwarding",
        "netfilter/nf_conntrack_count",
        "netfilter/nf_conntrack_max",
    ];
    let [forwards_ipv4, forwards_ipv6, conntrack_entries, conntrack_max] = numbers.map(&mut read);
    Sysctls {
        forwards_ipv4,
        forwards_ipv6,
        conntrack_entries,
        conntrack_max,
        rp_filter: unread.or_default(sysctl::of_links("rp_filter")),
        route_localnet: unread.or_default(sysctl::of_links("route_localnet")),
    }
}
