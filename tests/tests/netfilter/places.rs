//! Where rules are put and stay: drift, restarts, changes of backend, and cleanup.

use std::{sync::Arc, time::Duration};

use proxy_userspace::{
    dataplane::ebpf::{Marks, RULE_NAMES, Rules},
    kernel::{
        KernelError,
        command::{Command, SearchPath},
        ruleset_changes,
    },
};
use shunt_tests::deadline::patient;
use tokio::sync::Notify;

use crate::node::{MARKS, Node, Seen};

#[test]
fn rules_that_someone_flushed_are_missed_and_put_back() {
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
        assert!(!node.are_put(&mut rules), "{flush}");
        node.put(&mut rules);
    }
    node.mark();
    node.assert_served(&Seen::Silence);
}

#[test]
fn the_next_process_finds_the_rules_as_they_should_be() {
    let node = Node::new();
    node.both_families("iptables-nft -P FORWARD DROP");
    node.both_families("iptables-legacy -A FORWARD -j ACCEPT");
    node.put(&mut node.rules());
    assert!(node.are_put(&mut node.rules()));
    let mut other = Rules::new(Marks { masquerade: 1 << 20, ..MARKS }, node.path.clone());
    assert!(!node.are_put(&mut other), "these are for other marks");
    node.put(&mut other);
    assert!(!node.are_put(&mut node.rules()));
}

#[test]
fn cleanup_leaves_what_others_have_and_nothing_there_is_fine() {
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
fn what_a_process_without_nft_left_in_iptables_goes_when_nft_is_there() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let names = ["save", "restore"].map(|verb| format!("iptables-nft-{verb}"));
    let mut node = Node::with_only(&names.each_ref().map(String::as_str), directory.path());
    node.put(&mut node.rules());
    assert!(node.everything().contains("SHUNT-POSTROUTING"));
    node.path = SearchPath::default();
    node.put(&mut node.rules());
    assert!(!node.everything().contains("SHUNT"), "{}", node.everything());
    node.assert_served(&Seen::AsNode2);
}

#[test]
fn the_kernel_tells_at_once_that_rules_are_gone() {
    let node = Node::new();
    node.put(&mut node.rules());
    let nft = |args: &str| Command::new("nft", &node.path).args(args.split(' '));
    let [add, delete, flush] = ["add table inet other", "delete table inet other", "flush ruleset"].map(nft);
    node.within(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
        runtime.block_on(async {
            let removals = Arc::new(Notify::new());
            let follow = ruleset_changes::report_removals(&RULE_NAMES, Arc::clone(&removals));
            let changes = async {
                // Following begins with its first poll, which comes first.
                tokio::task::yield_now().await;
                add.run().and_then(|_| delete.run()).expect("others do as they like");
                tokio::task::yield_now().await;
                let told = futures::FutureExt::now_or_never(removals.notified());
                assert!(told.is_none(), "others' tables are theirs");
                flush.run().expect("flushed");
                let told = tokio::time::timeout(patient(Duration::from_secs(10)), removals.notified()).await;
                told.expect("told in time");
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
