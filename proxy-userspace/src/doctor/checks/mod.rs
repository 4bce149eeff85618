//! Judges the facts. Pure.

mod daemon;
mod machine;
mod others;

#[cfg(test)]
mod tests;

use super::{Finding, Report, catalog, facts::Facts};

/// Judges everything.
pub(super) fn judge(facts: &Facts) -> Report {
    let mut findings = daemon::judge(facts);
    findings.extend(others::judge(facts));
    findings.extend(machine::judge(facts));
    findings.extend(facts.unread.iter().map(|error| Finding::new(&catalog::CHECK_FAILED, error)));
    Report::new(facts.daemon.report().and_then(|report| report.mode.clone()), findings)
}
