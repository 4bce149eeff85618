//! The judgement over facts that machines may show.

use std::collections::BTreeMap;

use insta::assert_snapshot;

use super::{judge, table};
use crate::kernel::probe::{Fact, Facts, Feature};

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
    let verdict = judge(&without(missing));
    (verdict.modes[0].missing.len(), verdict.modes[0].limits.len())
}

#[test]
fn auto_takes_ebpf_where_all_it_needs_is_there() {
    let verdict = judge(&without(&[]));
    assert_eq!(
        (verdict.auto, verdict.why.as_str()),
        (Some("ebpf"), "it is preferred, and all it needs is there")
    );
    assert!(verdict.modes.iter().all(|mode| mode.missing.is_empty() && mode.limits.is_empty()));
}

#[test]
fn each_feature_that_ebpf_needs_keeps_it_from_working_alone() {
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
        // Without it the process may not do what the other modes do either.
        assert_eq!(judge(&without(&[feature, Feature::NetAdmin])).auto, None);
        assert_eq!(judge(&without(&[feature])).auto, Some("nftables"));
        let verdict = judge(&without(&[feature, Feature::NftablesMaps]));
        assert_eq!(verdict.auto, Some("iptables"));
        assert!(verdict.why.contains("ebpf lacks") && verdict.why.contains("nftables lacks"));
    }
}

#[test]
fn one_of_two_that_do_the_same_is_enough() {
    for (either, or) in [(Feature::Tcx, Feature::Clsact), (Feature::Nftables, Feature::Iptables)] {
        assert_eq!(ebpf_lacks(&[either]), (0, 0));
        assert_eq!(ebpf_lacks(&[or]), (0, 0));
    }
    assert_eq!(ebpf_lacks(&[Feature::Tcx, Feature::Clsact]), (1, 0));
    assert_eq!(ebpf_lacks(&[Feature::Nftables, Feature::Iptables]), (0, 1), "sockets are served anyhow");
}

#[test]
fn auto_takes_nftables_where_ebpf_does_not_work() {
    let verdict = judge(&without(&[Feature::Bpffs]));
    assert_eq!(verdict.auto, Some("nftables"));
    assert!(verdict.why.contains("ebpf lacks bpf filesystem"), "{}", verdict.why);
}

#[test]
fn what_could_not_be_tried_keeps_nothing_from_working() {
    let mut facts = without(&[]);
    for fact in facts.features.values_mut() {
        *fact = Fact::Unknown("no permission to try".into());
    }
    assert_eq!(judge(&facts).auto, Some("ebpf"));
}

#[test]
fn reports_tell_people_what_is_there_and_what_to_do() {
    let facts = without(&[Feature::Tcx, Feature::SetRetval, Feature::Ipvs, Feature::Ipset]);
    assert_snapshot!("an_older_kernel", table(&facts, &judge(&facts)));
    let facts = without(&[Feature::Bpffs, Feature::Nftables, Feature::NftablesMaps, Feature::Iptables]);
    assert_snapshot!("nothing_works", table(&facts, &judge(&facts)));
}
