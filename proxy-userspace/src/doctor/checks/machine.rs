//! The kernel, its settings, and what this process may do.

use std::collections::BTreeMap;

use super::super::{
    Finding,
    catalog::{self, Kind},
    facts::{Facts, Sysctls},
};
use crate::{dataplane::Mode, net::IpFamily, probe::Lack};

/// When the table of conntrack counts as nearly full, in percent.
const NEARLY_FULL: i64 = 80;
/// `rp_filter`: the source must be reached over the same link (RFC 3704, strict).
const STRICT: i64 = 1;
/// How many links are named. A node has one for each pod.
const MAX_NAMED: usize = 5;

pub(super) fn judge(facts: &Facts) -> Vec<Finding> {
    let mode = facts.daemon.report().and_then(|report| Mode::from_name(report.mode.as_deref()?));
    let mut findings = features(facts, mode);
    let families = facts.daemon.report().map_or(&[][..], |report| &report.families);
    findings.extend(forwarding(&facts.sysctls, families));
    findings.extend(conntrack(&facts.sysctls));
    findings.extend(
        of_links(&facts.sysctls.rp_filter, STRICT)
            .map(|links| Finding::new(&catalog::STRICT_RP_FILTER, format!("rp_filter is 1 on {links}"))),
    );
    let backstop = facts.daemon.report().and_then(|report| report.backstop.as_deref());
    let sets_it = mode == Some(Mode::Iptables) || backstop == Some(Mode::Iptables.name());
    let open = of_links(&facts.sysctls.route_localnet, 1).filter(|_| !sets_it);
    findings.extend(
        open.map(|links| Finding::new(&catalog::ROUTE_LOCALNET, format!("route_localnet is 1 on {links}"))),
    );
    findings
}

const UNCHECKED: &str = "cannot check what each mode needs: only root can";

/// Judges what the mode that runs lacks, or what every mode lacks if none runs.
fn features(facts: &Facts, mode: Option<Mode>) -> Vec<Finding> {
    let Facts { evaluation, is_root, .. } = facts;
    let found = |kind: &Kind, lacks: &[Lack]| -> Vec<Finding> {
        let finding = |lack: &Lack| Finding::new(kind, lack.to_string()).with_remedy(&*lack.remedy);
        lacks.iter().map(finding).collect()
    };
    let Some(running) = mode else {
        return match evaluation.auto {
            Some(_) => Vec::new(),
            None if *is_root => vec![Finding::new(&catalog::NO_MODE_WORKS, &*evaluation.why)],
            None => vec![Finding::new(&catalog::CHECK_FAILED, UNCHECKED)],
        };
    };
    let supports = evaluation.modes.iter().filter(|support| support.mode == running);
    let both = |support: &crate::probe::ModeSupport| {
        [
            found(&catalog::FEATURE_MISSING, &support.missing),
            found(&catalog::FEATURE_LIMITED, &support.limits),
        ]
        .concat()
    };
    supports.flat_map(both).collect()
}

/// Judges families of which the node has pods. If they are not known, a node needs IPv4 and may
/// need IPv6.
fn forwarding(sysctls: &Sysctls, families: &[String]) -> Vec<Finding> {
    let is_used = |family: IpFamily| families.iter().any(|used| used == family.name());
    let mut findings = Vec::new();
    if sysctls.forwards_ipv4 == Some(0) && (families.is_empty() || is_used(IpFamily::V4)) {
        findings.push(Finding::new(&catalog::NOT_FORWARDING, "net.ipv4.ip_forward is 0"));
    }
    if sysctls.forwards_ipv6 == Some(0) {
        let message = "net.ipv6.conf.all.forwarding is 0";
        findings.push(if is_used(IpFamily::V6) {
            let remedy = "sysctl -w net.ipv6.conf.all.forwarding=1, and the same in /etc/sysctl.d; most pod networks do it";
            Finding::new(&catalog::NOT_FORWARDING, message).with_remedy(remedy)
        } else {
            Finding::new(&catalog::NOT_FORWARDING_IPV6, message)
        });
    }
    findings
}

fn conntrack(sysctls: &Sysctls) -> Option<Finding> {
    let (entries, max) = (sysctls.conntrack_entries?, sysctls.conntrack_max?);
    // Zero is no limit.
    let is_nearly_full = max > 0 && entries.saturating_mul(100) >= max.saturating_mul(NEARLY_FULL);
    is_nearly_full.then(|| {
        Finding::new(&catalog::CONNTRACK_NEARLY_FULL, format!("conntrack has {entries} of {max} entries"))
    })
}

/// Returns the links on which a value is in effect, as text. The kernel takes the larger one of the
/// link's value and that of `all`.
fn of_links(values: &BTreeMap<String, i64>, value: i64) -> Option<String> {
    let all = values.get("all").copied().unwrap_or(0);
    let links = values.iter().filter(|(link, _)| !["all", "default", "lo"].contains(&link.as_str()));
    let found: Vec<&str> =
        links.filter(|(_, own)| (**own).max(all) == value).map(|(link, _)| link.as_str()).collect();
    let named = found.iter().take(MAX_NAMED).copied().collect::<Vec<_>>().join(", ");
    match found.len() {
        0 => None,
        count if count <= MAX_NAMED => Some(named),
        count => Some(format!("{named} and {} more", count - MAX_NAMED)),
    }
}
