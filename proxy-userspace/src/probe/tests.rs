//! Tests the evaluation with facts that real machines report.

use std::collections::BTreeMap;

use insta::assert_snapshot;

use super::{evaluate, table};
use crate::{
    kernel::probe::{Fact, Facts, Feature},
    mode::Mode,
};

const ALL: [Feature; 19] = [
    Feature::NetAdmin,
    Feature::Capabilities,
    Feature::SocketPrograms,
    Feature::LinkPrograms,
    Feature::Maps,
    Feature::Bpffs,
    Feature::Cgroup2,
    Feature::Btf,
    Feature::Tcx,
    Feature::Clsact,
    Feature::SetRetval,
    Feature::NetnsCookie,
    Feature::SocketDestroy,
    Feature::Nftables,
    Feature::NftablesMaps,
    Feature::Iptables,
    Feature::Ipset,
    Feature::Ipvs,
    Feature::DummyLinks,
];

fn without(missing: &[Feature]) -> Facts {
    let fact = |feature| {
        let is_missing = missing.contains(&feature);
        (feature, if is_missing { Fact::Missing("not here".into()) } else { Fact::Present(String::new()) })
    };
    Facts { kernel: "6.1.0".into(), features: BTreeMap::from(ALL.map(fact)) }
}

fn ebpf_lacks(missing: &[Feature]) -> (usize, usize) {
    let evaluation = evaluate(&without(missing));
    (evaluation.modes[0].missing.len(), evaluation.modes[0].limits.len())
}

#[test]
fn auto_takes_ebpf_if_nothing_is_missing() {
    let evaluation = evaluate(&without(&[]));
    assert_eq!(
        (evaluation.auto, evaluation.why.as_str()),
        (Some(Mode::Ebpf), "it is the preferred mode and nothing that it needs is missing")
    );
    assert!(evaluation.modes.iter().all(|mode| mode.missing.is_empty() && mode.limits.is_empty()));
}

#[test]
fn ebpf_fails_without_any_one_required_feature() {
    let needed = [
        Feature::Capabilities,
        Feature::SocketPrograms,
        Feature::LinkPrograms,
        Feature::Maps,
        Feature::Bpffs,
        Feature::Cgroup2,
    ];
    for feature in needed {
        assert_eq!(ebpf_lacks(&[feature]), (1, 0), "{feature:?}");
        // Without CAP_NET_ADMIN, the other modes do not work either.
        assert_eq!(evaluate(&without(&[feature, Feature::NetAdmin])).auto, None);
        assert_eq!(evaluate(&without(&[feature])).auto, Some(Mode::Nftables));
        let evaluation = evaluate(&without(&[feature, Feature::NftablesMaps]));
        assert_eq!(evaluation.auto, Some(Mode::Iptables));
        assert!(evaluation.why.contains("ebpf lacks") && evaluation.why.contains("nftables lacks"));
    }
}

#[test]
fn one_of_two_equivalent_features_is_enough() {
    for (either, or) in [(Feature::Tcx, Feature::Clsact), (Feature::Nftables, Feature::Iptables)] {
        assert_eq!(ebpf_lacks(&[either]), (0, 0));
        assert_eq!(ebpf_lacks(&[or]), (0, 0));
    }
    assert_eq!(ebpf_lacks(&[Feature::Tcx, Feature::Clsact]), (1, 0));
    assert_eq!(
        ebpf_lacks(&[Feature::Nftables, Feature::Iptables]),
        (0, 1),
        "the socket programs work without netfilter"
    );
}

#[test]
fn auto_takes_nftables_if_ebpf_does_not_work() {
    let evaluation = evaluate(&without(&[Feature::Bpffs]));
    assert_eq!(evaluation.auto, Some(Mode::Nftables));
    assert!(evaluation.why.contains("ebpf lacks bpf filesystem"), "{}", evaluation.why);
}

#[test]
fn a_feature_that_could_not_be_tested_counts_as_present() {
    let mut facts = without(&[]);
    for fact in facts.features.values_mut() {
        *fact = Fact::Unknown("no permission to try".into());
    }
    assert_eq!(evaluate(&facts).auto, Some(Mode::Ebpf));
}

#[test]
fn a_denial_is_reported_with_its_own_remedy() {
    let mut facts = without(&[]);
    let denial = "the AppArmor profile p denies it; set a field";
    facts.features.insert(Feature::Bpffs, Fact::Denied(denial.into()));
    let evaluation = evaluate(&facts);
    let expected = format!("it is the first mode that works: ebpf lacks bpf filesystem: {denial}");
    assert_eq!((evaluation.auto, evaluation.why), (Some(Mode::Nftables), expected));
    assert_eq!(evaluation.modes[0].missing[0].to_string(), format!("bpf filesystem: {denial}"));
}

#[test]
fn reports_name_features_and_remedies() {
    let facts = without(&[Feature::Tcx, Feature::SetRetval, Feature::Ipvs, Feature::Ipset]);
    assert_snapshot!("an_older_kernel", table(&facts, &evaluate(&facts)));
    let facts = without(&[Feature::Bpffs, Feature::Nftables, Feature::NftablesMaps, Feature::Iptables]);
    assert_snapshot!("nothing_works", table(&facts, &evaluate(&facts)));
}
