//! Judges the facts. Pure.

mod daemon;
mod firewalls;
mod machine;
mod others;

#[cfg(test)]
mod tests;

use super::{Finding, Report, catalog, facts::Facts};

/// Judges everything.
pub(super) fn judge(facts: &Facts) -> Report {
    let mut findings = daemon::judge(facts);
    findings.extend(others::judge(facts));
    findings.extend(firewalls::judge(facts));
    findings.extend(machine::judge(facts));
    findings.extend(facts.unread.iter().map(|error| Finding::new(&catalog::CHECK_FAILED, error)));
    let report = facts.daemon.report();
    let watches = report.map(|report| report.watches.clone()).unwrap_or_default();
    Report::new(report.and_then(|report| report.mode.clone()), watches, findings)
}
