//! Where the rules are kept: drift, restarts, changes of backend, and cleanup.

use std::{sync::Arc, time::Duration};

use proxy_common::layout::Refusing;
use proxy_userspace::{
    dataplane::ebpf::{Marks, RULE_NAMES, RuleDuties, Rules},
    kernel::{
        KernelError,
        command::{Command, Launcher},
        conntrack::{self, UdpFilter},
        ruleset_changes,
    },
    model::IpFamily,
};
use shunt_tests::{agent::protocol::Protocol, deadline::scaled};
use tokio::sync::Notify;

use crate::node::{AttemptResult, MARKS, MASQUERADED, Node};

#[test]
fn flushed_rules_are_noticed_and_restored() {
    let mut node = Node::new();
    node.both_families("iptables-nft -P FORWARD DROP");
    node.both_families("iptables-legacy -P FORWARD DROP");
    let mut rules = node.rules();
    node.put(&mut rules);
    for flush in [
        "nft delete table inet shunt",
        "nft flush chain inet shunt postrouting",
        "nft add rule inet shunt forward drop",
        "iptables-legacy -F FORWARD",
        "iptables-nft -F SHUNT-FORWARD",
        "nft flush ruleset",
    ] {
        let words: Vec<_> = flush.split(' ').collect();
        node.run(words[0], &words[1..], "");
        assert!(!node.are_installed(&mut rules), "{flush}");
        node.put(&mut rules);
    }
    node.mark();
    node.assert_served(&AttemptResult::Silence);
}

#[test]
fn table_is_absent_while_the_programs_refuse() {
    const NONE: RuleDuties = RuleDuties { masquerade: false, refuse: false };
    const REFUSE: RuleDuties = RuleDuties { masquerade: false, refuse: true };
    let node = Node::new();
    let has_table = || node.run("nft", &["list", "tables"], "").contains("table inet shunt\n");
    let mut rules = node.rules();
    node.give(&mut rules, REFUSE);
    node.put(&mut rules);
    assert!(has_table());
    node.give(&mut rules, NONE);
    assert_eq!(rules.refusing(), Refusing::Programs, "a kernel with IPVS needs the rules");
    assert!(!node.are_installed(&mut rules), "the table is still there");
    node.put(&mut rules);
    assert!(!has_table());
    node.run("nft", &["add", "table", "inet", "shunt"], "");
    assert!(!node.are_installed(&mut rules), "rules of an earlier process");
    node.put(&mut rules);
    node.give(&mut rules, REFUSE);
    assert!(!node.are_installed(&mut rules));
    node.put(&mut rules);
    assert_eq!((rules.refusing(), has_table()), (Refusing::Netfilter, true));
}

#[test]
fn chain_of_type_nat_and_the_refusing_rules_stay_until_conntrack_translates_nothing() {
    const NONE: RuleDuties = RuleDuties { masquerade: false, refuse: false };
    let mut node = Node::new();
    let mut rules = node.rules();
    node.put(&mut rules);
    assert_eq!(node.try_both_families(Protocol::Udp, MASQUERADED), AttemptResult::AsNode1);
    node.give(&mut rules, NONE);
    assert_eq!(rules.refusing(), Refusing::Netfilter, "rules still masquerade");
    node.put(&mut rules);
    node.give(&mut rules, NONE);
    assert_eq!(rules.refusing(), Refusing::Netfilter, "conntrack translates the datagrams");
    assert!(node.are_installed(&mut rules));
    for family in IpFamily::ALL {
        let all = UdpFilter { family, destination_port: None };
        node.within(|| conntrack::delete_udp(all, &mut |_| true));
    }
    assert!(!node.are_installed(&mut rules), "nothing needs the chain any more");
    node.give(&mut rules, NONE);
    assert_eq!(rules.refusing(), Refusing::Programs);
    node.put(&mut rules);
    assert!(!node.everything().contains("table inet shunt"));
}

#[test]
fn next_process_finds_the_rules_in_place() {
    let node = Node::new();
    node.both_families("iptables-nft -P FORWARD DROP");
    node.both_families("iptables-legacy -A FORWARD -j ACCEPT");
    node.put(&mut node.rules());
    assert!(node.are_installed(&mut node.rules()));
    let mut other = Rules::new(Marks { masquerade: 1 << 20, ..MARKS }, true, node.launcher.clone());
    assert!(!node.are_installed(&mut other), "these are for other marks");
    node.put(&mut other);
    assert!(!node.are_installed(&mut node.rules()));
}

#[test]
fn cleanup_leaves_foreign_rules_and_works_without_rules() {
    let node = Node::new();
    node.remove(&mut node.rules());
    node.run("nft", &["add", "table", "inet", "shunts"], "");
    for backend in ["nft", "legacy"] {
        node.both_families(&format!("iptables-{backend} -N SHUNTED"));
        node.both_families(&format!("iptables-{backend} -A FORWARD -j SHUNTED"));
    }
    let before = node.everything();
    node.put(&mut node.rules());
    node.remove(&mut node.rules());
    assert_eq!(node.everything(), before);
}

#[test]
fn rules_in_iptables_are_removed_when_nft_appears() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let names = ["save", "restore"].map(|verb| format!("iptables-nft-{verb}"));
    let mut node = Node::with_only(&names.each_ref().map(String::as_str), directory.path());
    node.put(&mut node.rules());
    assert!(node.everything().contains("SHUNT-POSTROUTING"));
    node.launcher = Launcher::default();
    node.put(&mut node.rules());
    assert!(!node.everything().contains("SHUNT"), "{}", node.everything());
    node.assert_served(&AttemptResult::AsNode2);
}

#[test]
fn kernel_reports_removed_rules_at_once() {
    let node = Node::new();
    node.put(&mut node.rules());
    let nft = |args: &str| Command::new("nft", &node.launcher).args(args.split(' '));
    let [add, delete, flush] = ["add table inet other", "delete table inet other", "flush ruleset"].map(nft);
    node.within(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
        runtime.block_on(async {
            let removals = Arc::new(Notify::new());
            let follow = ruleset_changes::report_removals(&RULE_NAMES, Arc::clone(&removals));
            let changes = async {
                // The subscription starts with the first poll of the other future.
                tokio::task::yield_now().await;
                add.run().and_then(|_| delete.run()).expect("foreign rules change");
                tokio::task::yield_now().await;
                let reported = futures::FutureExt::now_or_never(removals.notified());
                assert!(reported.is_none(), "foreign tables are ignored");
                flush.run().expect("flushed");
                let reported =
                    tokio::time::timeout(scaled(Duration::from_secs(10)), removals.notified()).await;
                reported.expect("reported in time");
            };
            tokio::select! {
                biased;
                ended = follow => panic!("{ended:?}"),
                () = changes => {}
            }
        });
        Ok::<_, KernelError>(())
    });
}
