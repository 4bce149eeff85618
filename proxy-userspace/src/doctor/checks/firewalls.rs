//! Rules of others that can drop packets of Services. What a packet meets cannot be told in whole,
//! so the findings say "may".

use super::super::{Finding, catalog, facts::Facts};
use crate::{
    dataplane::Mode,
    link_path::{drops_before_services, forward_drops},
};

/// How many rules are named.
const MAX_NAMED: usize = 5;

pub(super) fn judge(facts: &Facts) -> Vec<Finding> {
    let Some(evidence) = &facts.evidence else { return Vec::new() };
    let mut findings = Vec::new();
    for chain in forward_drops(evidence) {
        findings.push(if chain.accepts_some {
            let message = format!("{}, after rules that accept some connections", chain.text);
            Finding::new(&catalog::FORWARD_FILTERED, message)
        } else {
            let message = format!("{}, and no rule accepts new connections", chain.text);
            Finding::new(&catalog::FORWARD_DROPPED, message)
        });
    }
    let is_ipvs =
        facts.daemon.report().is_some_and(|report| report.mode.as_deref() == Some(Mode::Ipvs.name()));
    let drops = drops_before_services(evidence, is_ipvs);
    findings.extend(drops.into_iter().take(MAX_NAMED).map(|rule| {
        Finding::new(
            &catalog::NODE_PORTS_DROPPED,
            format!("a rule may drop connections to node ports: {rule}"),
        )
    }));
    findings
}
