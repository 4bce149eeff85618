//! Other proxies and programs, and what an earlier shunt left.

use super::{
    super::{
        Finding, catalog,
        facts::{Daemon, Facts},
    },
    daemon::{confined, nearly_full},
};
use crate::{dataplane::Mode, link_path, net::LinkPath};

pub(super) fn judge(facts: &Facts) -> Vec<Finding> {
    let mut findings = Vec::new();
    for id in &facts.kube_proxies {
        findings.push(Finding::new(&catalog::OTHER_PROXY, format!("kube-proxy runs as the process {id}")));
    }
    for mode in foreign_rules(facts) {
        let message = format!("rules of the mode {mode} are in the kernel, and no proxy of that mode runs");
        findings.push(Finding::new(&catalog::OTHER_RULES, message));
    }
    let pins = &facts.pins;
    if matches!(facts.daemon, Daemon::NotRunning) && pins.links > 0 {
        let message = format!("{} programs are pinned in {}", pins.links, pins.directory.display());
        findings.push(Finding::new(&catalog::PINS_WITHOUT_DAEMON, message));
        findings.extend(nearly_full(&pins.maps));
    }
    for path in &pins.unfinished {
        findings.push(Finding::new(&catalog::PINS_UNFINISHED, format!("{} exists", path.display())));
    }
    // With a daemon, its report has the reason.
    let evidence = facts.evidence.as_ref().filter(|_| facts.daemon.report().is_none());
    if let Some(LinkPath::Netfilter { why }) = evidence.map(link_path::judge) {
        findings.push(Finding::new(&catalog::NETFILTER_ON_LINKS, why.as_ref()));
    }
    let own = facts.confinement.as_ref();
    findings.extend(own.map(|module| confined(&module.to_string(), module.remedy())));
    findings
}

/// Returns the modes whose rules nobody keeps up to date. Those of a kube-proxy that runs are its
/// own. If nothing runs, the rules are one mode's that was stopped, and any further mode is
/// foreign.
fn foreign_rules(facts: &Facts) -> Vec<Mode> {
    if !facts.kube_proxies.is_empty() {
        return Vec::new();
    }
    let Some(report) = facts.daemon.report() else {
        return if matches!(facts.daemon, Daemon::NotRunning) { facts.rules.clone() } else { Vec::new() };
    };
    // While no mode runs, and until the first sync, rules of before serve.
    if report.mode.is_none() || !report.not_ready.is_empty() {
        return Vec::new();
    }
    let used: Vec<&str> = report.mode.iter().chain(&report.backstop).map(String::as_str).collect();
    let is_used = |mode: &Mode| {
        // The ipvs mode has chains of iptables, too.
        used.contains(&mode.name()) || (*mode == Mode::Iptables && used.contains(&Mode::Ipvs.name()))
    };
    facts.rules.iter().copied().filter(|mode| !is_used(mode)).collect()
}
