//! What the daemon reports about itself.

use proxy_common::layout::fills_up;

use super::super::{
    Finding,
    catalog::{self, Kind},
    facts::{Daemon, Facts},
};
use crate::{
    health::{NodeReport, ReportedMap, WatchReport},
    inspect::{DriftRow, LeftOutRow},
    link_path::CANNOT_READ,
};

/// How long a change may wait before it is a finding. A full sync of a netfilter mode takes
/// seconds.
const PENDING_SECONDS: u64 = 30;
/// For how long a second shunt is found after its last attempt.
const SECOND_SHUNT_SECONDS: u64 = 15 * 60;
/// When a map counts as nearly full, in percent.
const NEARLY_FULL: usize = 80;
/// From which difference on the clocks differ too much. Dates of HTTP are exact to a second.
const SKEWED_SECONDS: u64 = 10;
/// How long a watch may bring nothing. Servers send bookmarks every minute or so, and end watches
/// after ten minutes at most.
const SILENT_SECONDS: u64 = 1200;
/// How many service ports are named. Thousands can be left out for one reason.
const MAX_NAMED: usize = 10;

pub(super) fn judge(facts: &Facts) -> Vec<Finding> {
    match &facts.daemon {
        Daemon::NotRunning => {
            vec![Finding::new(&catalog::DAEMON_NOT_RUNNING, "no shunt runs in this network namespace")]
        }
        Daemon::Silent(error) => {
            vec![Finding::new(&catalog::DAEMON_SILENT, format!("shunt does not answer: {error}"))]
        }
        Daemon::Running(report) => {
            let mut findings = of_report(report);
            findings.extend(left_out(&facts.left_out_ports));
            findings.extend(drift(&facts.drift));
            findings
        }
    }
}

fn of_report(report: &NodeReport) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut each = |kind: &Kind, texts: &[String]| {
        findings.extend(texts.iter().map(|text| Finding::new(kind, text)));
    };
    each(&catalog::NOT_READY, &report.not_ready);
    each(&catalog::SYNC_FAILING, &report.failing);
    each(&catalog::WATCH_FAILING, &report.watch_errors);
    each(&catalog::MANIFESTS_UNREADABLE, &report.unreadable_manifests);
    each(&catalog::LINK_LEFT_OUT, &report.left_out_links);
    each(&catalog::LINK_DISPLACED, &report.displaced_links);
    let is_unread = report.netfilter_on_links.as_ref().is_some_and(|why| why.starts_with(CANNOT_READ));
    let on_links = if is_unread { &catalog::OTHERS_UNREADABLE } else { &catalog::NETFILTER_ON_LINKS };
    let reasons = [
        (&catalog::CONFIGURATION_REFUSED, &report.configuration_refused),
        (on_links, &report.netfilter_on_links),
        (&catalog::SOCKETS_LEFT_ALONE, &report.sockets_left_alone),
    ];
    for (kind, reason) in reasons {
        findings.extend(reason.as_ref().map(|reason| Finding::new(kind, reason)));
    }
    if let Some(seconds) = report.oldest_pending_seconds.filter(|seconds| *seconds >= PENDING_SECONDS) {
        findings.push(Finding::new(&catalog::CHANGES_PENDING, format!("a change waits for {seconds} s")));
    }
    findings.extend(nearly_full(&report.maps));
    findings.extend(clock(report.clock_ahead_seconds));
    findings.extend(second_shunt(report.second_shunt_seconds_ago));
    findings.extend(silent_watches(&report.watches));
    findings.extend(report.confined_by.as_ref().map(|(module, remedy)| confined(module, remedy)));
    let own = env!("CARGO_PKG_VERSION");
    if report.version != own {
        let message = format!("the daemon is {}, this command is {own}", report.version);
        findings.push(Finding::new(&catalog::OTHER_VERSION, message));
    }
    findings
}

pub(super) fn nearly_full(maps: &[ReportedMap]) -> Vec<Finding> {
    let finding = |map: &ReportedMap| {
        let capacity = usize::try_from(map.capacity).unwrap_or(usize::MAX);
        let is_full = map.entries.saturating_mul(100) >= capacity.saturating_mul(NEARLY_FULL) && capacity > 0;
        let message = || format!("the map {} has {} of {capacity} entries", map.name, map.entries);
        is_full.then(|| Finding::new(&catalog::MAP_NEARLY_FULL, message()))
    };
    maps.iter().filter(|map| !fills_up(&map.name)).filter_map(finding).collect()
}

pub(super) fn confined(module: &str, remedy: &str) -> Finding {
    Finding::new(&catalog::CONFINED, format!("{module} confines shunt")).with_remedy(remedy)
}

/// A kubelet starts a container that fails again after five minutes at most.
fn second_shunt(seconds_ago: Option<u64>) -> Option<Finding> {
    let seconds = seconds_ago.filter(|seconds| *seconds < SECOND_SHUNT_SECONDS)?;
    let message = format!("another shunt tried to run on this node {seconds} s ago, and ended");
    Some(Finding::new(&catalog::SECOND_SHUNT, message))
}

fn clock(ahead: Option<i64>) -> Option<Finding> {
    let ahead = ahead.filter(|seconds| seconds.unsigned_abs() >= SKEWED_SECONDS)?;
    let direction = if ahead > 0 { "ahead of" } else { "behind" };
    let message =
        format!("the clock of this node is {} s {direction} that of the API server", ahead.unsigned_abs());
    Some(Finding::new(&catalog::CLOCK_SKEWED, message))
}

fn silent_watches(watches: &[WatchReport]) -> Vec<Finding> {
    let finding = |watch: &WatchReport| {
        let seconds =
            watch.seconds_since_event.filter(|seconds| watch.connected && *seconds >= SILENT_SECONDS)?;
        let message = format!("{}: no change and no bookmark for {seconds} s", watch.kind);
        Some(Finding::new(&catalog::WATCH_SILENT, message))
    };
    watches.iter().filter_map(finding).collect()
}

fn drift(rows: &[DriftRow]) -> Vec<Finding> {
    let text = |row: &DriftRow| match &row.port {
        Some(port) => {
            format!(
                "{}/{} {} ({}): {}",
                port.namespace, port.name, port.port_name, port.family, row.difference
            )
        }
        None => row.difference.clone(),
    };
    // The sync that fails is a finding already.
    let rows: Vec<&DriftRow> = rows.iter().filter(|row| !row.not_compared).collect();
    let named = rows.iter().take(MAX_NAMED).map(|row| Finding::new(&catalog::DRIFT, text(row)));
    let more = rows.len().saturating_sub(MAX_NAMED);
    let rest = (more > 0).then(|| Finding::new(&catalog::DRIFT, format!("and {more} more")));
    named.chain(rest).collect()
}

fn left_out(rows: &[LeftOutRow]) -> Vec<Finding> {
    let named = rows.iter().take(MAX_NAMED).map(|LeftOutRow { port, reason, message }| {
        let service = format!("{}/{} {} ({})", port.namespace, port.name, port.port_name, port.family);
        Finding::new(&catalog::SERVICE_LEFT_OUT, format!("{service}: {reason}: {message}"))
    });
    let more = rows.len().saturating_sub(MAX_NAMED);
    let rest = (more > 0).then(|| Finding::new(&catalog::SERVICE_LEFT_OUT, format!("and {more} more")));
    named.chain(rest).collect()
}
