//! Reads the facts. Nothing here changes the node: the probe tests in namespaces that it removes.

use std::{fmt::Display, path::Path};

use tokio::runtime;

use super::{
    DoctorArguments,
    facts::{Daemon, Facts, Pins, Sysctls},
};
use crate::{
    causes::with_causes,
    dataplane::modes_with_rules,
    inspect::{Client, ClientError, Filter, LeftOutRow, Resource},
    kernel::{
        self, KernelError,
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
    let (daemon, left_out_ports) = ask_daemon(&mut unread);
    let pin_directory = daemon.report().map_or_else(
        || arguments.pin_directory.clone(),
        |report| Path::new(&report.pin_directory).to_owned(),
    );
    let link_path = if daemon.report().is_some() {
        None
    } else {
        // Without a daemon its mark bits are not known: rules of others that use them are not found.
        let evidence = link_path::read(launcher, 0).map(Some);
        unread.or_default(evidence).map(|evidence| link_path::judge(&evidence))
    };
    let pins = pins(&pin_directory);
    Facts {
        daemon,
        left_out_ports,
        evaluation: probe::evaluate(&kernel::probe::facts(launcher, &pin_directory)),
        kube_proxies: processes::named(KUBE_PROXY),
        rules: modes_with_rules(launcher),
        pins: unread.or_default(pins),
        sysctls: sysctls(&mut unread),
        link_path,
        unread: unread.0,
    }
}

fn ask_daemon(unread: &mut Unread) -> (Daemon, Vec<LeftOutRow>) {
    let runtime = match runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return (Daemon::Silent(error.to_string()), Vec::new()),
    };
    runtime.block_on(async {
        let report = async { Client::connect().await?.node().await };
        match report.await {
            Err(ClientError::NotRunning(_)) => (Daemon::NotRunning, Vec::new()),
            Err(error) => (Daemon::Silent(with_causes(&error)), Vec::new()),
            // While no mode runs there is no list.
            Ok(report) if report.mode.is_none() => (Daemon::Running(report.into()), Vec::new()),
            Ok(report) => (Daemon::Running(report.into()), unread.or_default(left_out_ports().await)),
        }
    })
}

async fn left_out_ports() -> Result<Vec<LeftOutRow>, ClientError> {
    let mut rows = Vec::new();
    Client::connect().await?.list(Resource::LeftOut, &Filter::default(), |row| rows.push(row)).await?;
    Ok(rows)
}

fn pins(directory: &Path) -> Result<Pins, KernelError> {
    let unfinished = PinDir::unfinished(directory);
    let links = match PinDir::existing(directory)? {
        // A directory without links was never used.
        Some(pins) if directory.join("links").is_dir() => pins.link_names()?.len(),
        _ => 0,
    };
    Ok(Pins { directory: directory.to_owned(), links, unfinished })
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
