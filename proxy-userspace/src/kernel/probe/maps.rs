//! Probes what the nftables mode needs: translation by maps, random numbers in keys, and sets to
//! which packets add elements.

use super::Fact;
use crate::{
    kernel::{
        KernelError,
        nftables::{
            Chain, Change, FieldType, Hook, Name, Nftables, Rule, Selector, Set, SetKind, Statement, Verdict,
        },
    },
    net::IpFamily,
};

/// The oldest kernel, the same as kube-proxy's. Older kernels have bugs that this probe does not
/// show.
const OLDEST: (u32, u32) = (5, 13);
const TABLE: &str = "shunt-probe";

/// Probes nftables. The calling thread must be in a fresh network namespace.
pub(super) fn nftables(release: &str) -> Fact {
    if version(release).is_some_and(|version| version < OLDEST) {
        let (major, minor) = OLDEST;
        return Fact::Missing(format!("kernel {release} is older than {major}.{minor}"));
    }
    let tried = Nftables::open().and_then(|mut nftables| {
        IpFamily::ALL.into_iter().try_for_each(|family| nftables.commit(TABLE, &trial(family)))
    });
    Fact::of::<(), KernelError>(tried)
}

/// Returns major and minor version of a release such as `6.1.0-37-cloud-amd64`, or `None` for
/// another format.
pub fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

const KEY: &[FieldType] = &[FieldType::Address, FieldType::Number];
const DATA: &[FieldType] = &[FieldType::Address, FieldType::Port];

fn trial(family: IpFamily) -> Vec<(IpFamily, Change)> {
    let set = |name: &str, key, kind| Change::AddSet(Set { name: name.into(), key, kind, comment: "" });
    let chain = |name: &str, hook| Change::AddChain(Chain { name: name.into(), hook });
    let rule = |chain: &str, statements: Vec<Statement>| Change::AddRule(chain.into(), Rule::new(statements));
    let hook = |kind, number, priority| Some(Hook { kind, number, priority });
    let slot = vec![Selector::Destination, Selector::Random(2)];
    let clients: Name = "clients".into();
    let changes = vec![
        Change::AddTable(""),
        set("clients", &[FieldType::Address], SetKind::Dynamic(std::time::Duration::from_secs(1), 16)),
        set("verdicts", &[FieldType::Address], SetKind::VerdictMap),
        set("endpoints", KEY, SetKind::DataMap(DATA)),
        chain("forward", hook("filter", 2, 0)),
        chain("prerouting", hook("nat", 0, -100)),
        chain("postrouting", hook("nat", 4, 100)),
        rule("forward", vec![Statement::StateNew, Statement::Reject]),
        rule("prerouting", vec![Statement::VerdictMap(vec![Selector::Destination], "verdicts".into())]),
        rule("prerouting", vec![Statement::SourceIsLocal, Statement::SetMark(1)]),
        rule("prerouting", vec![Statement::UpdateSet(clients, vec![Selector::Source])]),
        rule("prerouting", vec![Statement::OneIn(2), Statement::Verdict(Verdict::Return)]),
        rule("prerouting", vec![Statement::DnatByMap(slot, "endpoints".into())]),
        rule("postrouting", vec![Statement::StatusDnat, Statement::Masquerade]),
    ];
    changes.into_iter().map(|change| (family, change)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn older_kernels_are_refused_by_name() {
        let fact = nftables("5.10.0-37-cloud-amd64");
        assert_eq!(fact, Fact::Missing("kernel 5.10.0-37-cloud-amd64 is older than 5.13".into()));
        assert!(nftables("4.19.1").is_missing());
        assert_eq!(version("6.18.44-fc-v657"), Some((6, 18)));
        assert_eq!(version("unknown"), None);
    }
}
