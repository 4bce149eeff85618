//! A process with other mark bits than the one before it: netfilter rules for each mark exist
//! before and while packets carry it.

use std::path::Path;

use aya::maps::{Array, Map, MapData};
use proxy_common::layout::NodeValue;
use proxy_userspace::{
    dataplane::ebpf::{LinkAttachment, Marks, Step},
    kernel::{bpf::LogLevel, command::Launcher},
};
use shunt_tests::process::run_with_timeout;

use crate::bench::{Bench, WITHIN, run};

const OLD: Marks = Marks { masquerade: NodeValue::MASQUERADE_MARK, reject: NodeValue::REJECT_MARK };
const NEW: Marks = Marks { masquerade: 1 << 20, reject: 1 << 21 };

/// Returns the marks in the pinned map.
fn in_map(bench: &Bench) -> Marks {
    let node = MapData::from_pin(bench.settings.pin_dir.join("node")).expect("pinned");
    let node: Array<MapData, NodeValue> =
        Map::from_map_data(node).and_then(Array::try_from).expect("of this type");
    let NodeValue { masquerade_mark: masquerade, reject_mark: reject, .. } =
        node.get(&0, 0).expect("written");
    Marks { masquerade, reject }
}

/// Returns the marks of the rules, from their comments.
fn in_rules() -> Marks {
    let listed = run("nft", &["list", "table", "inet", "shunt"]);
    let mark_of = |rule: &str| {
        let start = format!("{rule} (0x");
        let (_, rest) = listed.split_once(&start).unwrap_or_else(|| panic!("no {start}: {listed}"));
        let number = rest.split(')').next().expect("a mark");
        u32::from_str_radix(number, 16).unwrap_or_else(|error| panic!("{number}: {error}"))
    };
    Marks {
        masquerade: mark_of("replies of a Service return through this node"),
        reject: mark_of("to a Service without endpoints"),
    }
}

fn both() -> Marks {
    Marks { masquerade: OLD.masquerade | NEW.masquerade, reject: OLD.reject | NEW.reject }
}

/// Runs an old process that attaches its programs and rules, then starts a new one with other
/// programs.
fn restarted(change: impl FnOnce(&mut Bench)) -> Bench {
    let mut bench = Bench::new(LinkAttachment::Probe);
    bench.settings.netfilter = Some(Launcher::default());
    bench.restart();
    bench.add_veth("v0", "v1");
    bench.sync();
    assert_eq!((in_map(&bench), in_rules()), (OLD, OLD));
    bench.settings.marks = NEW;
    bench.settings.log = LogLevel::Error;
    change(&mut bench);
    bench.restart();
    bench
}

#[test]
fn rules_for_both_marks_exist_before_the_new_mark_is_used() {
    let mut bench = restarted(|_| {});
    assert_eq!((in_map(&bench), in_rules()), (OLD, OLD), "programs of the old process run, and read this");
    let steps = bench.planned();
    let rules = steps.iter().position(|step| matches!(step, Step::InstallRules(_))).expect("they differ");
    let first_link =
        steps.iter().position(|step| matches!(step, Step::AttachLink(..))).expect("its programs");
    assert!(rules < first_link);
    bench.apply(&steps[..=rules]);
    assert_eq!((in_map(&bench), in_rules()), (OLD, both()));
    bench.apply(&steps[rules + 1..]);
    assert_eq!((in_map(&bench), in_rules()), (NEW, NEW));
    assert_eq!(bench.verify(), 0);
    bench.restart();
    assert_eq!((in_map(&bench), bench.sync()), (NEW, 1 + 4), "only programs are replaced");
}

#[test]
fn programs_that_stay_get_the_new_marks_too() {
    let mut bench = restarted(|bench| bench.settings.log = LogLevel::Off);
    assert!(!bench.planned().iter().any(|step| matches!(step, Step::AttachLink(..))), "they stay");
    bench.sync();
    assert_eq!((in_map(&bench), in_rules(), bench.verify()), (NEW, NEW, 0));
}

#[test]
fn new_programs_use_the_old_marks_while_old_ones_run() {
    let mut bench = restarted(|bench| bench.settings.map_sizes.services = 128);
    let steps = bench.planned();
    let last = steps.iter().rposition(|step| matches!(step, Step::AttachLink(..))).expect("its programs");
    bench.apply(&steps[..last]);
    // The maps are in place, and one link still has a program of the old process.
    assert_eq!((in_map(&bench), in_rules()), (OLD, both()));
    bench.apply(&steps[last..]);
    assert_eq!((in_map(&bench), in_rules()), (NEW, NEW));
    assert_eq!(bench.verify(), 0);
}

#[test]
fn swapped_bits_keep_their_meaning_until_all_programs_are_replaced() {
    let swapped = Marks { masquerade: OLD.reject, reject: OLD.masquerade };
    let mut bench = restarted(|bench| bench.settings.marks = swapped);
    let steps = bench.planned();
    let last = steps.iter().rposition(|step| matches!(step, Step::AttachLink(..))).expect("its programs");
    bench.apply(&steps[..last]);
    assert_eq!((in_map(&bench), in_rules()), (OLD, OLD), "masquerading must not be refusing meanwhile");
    bench.apply(&steps[last..]);
    assert_eq!((in_map(&bench), in_rules()), (swapped, swapped));
    assert_eq!(bench.verify(), 0);
}

#[test]
fn iptables_acts_on_both_marks_too() {
    let mut bench = restarted(|_| {});
    // A policy in FORWARD makes a rule of ours necessary there.
    for command in ["iptables-nft", "ip6tables-nft"] {
        let ran = run_with_timeout(Path::new(command), &["-P", "FORWARD", "DROP"], WITHIN).expect("iptables");
        assert!(ran.status.success(), "{}", ran.stderr);
    }
    let steps = bench.planned();
    let rules = steps.iter().position(|step| matches!(step, Step::InstallRules(_))).expect("they differ");
    bench.apply(&steps[..=rules]);
    let forward = || run("iptables-nft", &["-S", "SHUNT-FORWARD"]);
    let Marks { masquerade, .. } = both();
    assert!(forward().contains(&format!("! --mark 0x0/{masquerade:#x} -j ACCEPT")), "{}", forward());
    bench.apply(&steps[rules + 1..]);
    let Marks { masquerade, .. } = NEW;
    assert!(
        forward().contains(&format!("--mark {masquerade:#x}/{masquerade:#x} -j ACCEPT")),
        "{}",
        forward()
    );
    assert_eq!(bench.verify(), 0);
}
