//! What the daemon reports about itself.

use super::super::{
    Finding,
    catalog::{self, Kind},
    facts::{Daemon, Facts},
};
use crate::{health::NodeReport, inspect::LeftOutRow};

/// How long a change may wait before it is a finding. A full sync of a netfilter mode takes
/// seconds.
const PENDING_SECONDS: u64 = 30;
/// When a map counts as nearly full, in percent.
const NEARLY_FULL: usize = 80;
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
    let reasons = [
        (&catalog::NETFILTER_ON_LINKS, &report.netfilter_on_links),
        (&catalog::SOCKETS_LEFT_ALONE, &report.sockets_left_alone),
    ];
    for (kind, reason) in reasons {
        findings.extend(reason.as_ref().map(|reason| Finding::new(kind, reason)));
    }
    if let Some(seconds) = report.oldest_pending_seconds.filter(|seconds| *seconds >= PENDING_SECONDS) {
        findings.push(Finding::new(&catalog::CHANGES_PENDING, format!("a change waits for {seconds} s")));
    }
    for map in &report.maps {
        let capacity = usize::try_from(map.capacity).unwrap_or(usize::MAX);
        if map.entries.saturating_mul(100) >= capacity.saturating_mul(NEARLY_FULL) && capacity > 0 {
            let message = format!("the map {} has {} of {capacity} entries", map.name, map.entries);
            findings.push(Finding::new(&catalog::MAP_NEARLY_FULL, message));
        }
    }
    let own = env!("CARGO_PKG_VERSION");
    if report.version != own {
        let message = format!("the daemon is {}, this command is {own}", report.version);
        findings.push(Finding::new(&catalog::OTHER_VERSION, message));
    }
    findings
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
