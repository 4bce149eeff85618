//! Tests against the kernel, with the commands that redirect traffic. Needs root.

use std::{
    fs,
    path::{Path, PathBuf},
    process, thread,
    time::Duration,
};

use tokio::sync::watch;

use super::{ExemptNamespace, ExemptNamespaces, RedirectingPods, report, watcher::Watcher};
use crate::kernel::command::{Command, Launcher};

/// A wait that is this long has failed.
const LIMIT: Duration = Duration::from_secs(20);

fn run(program: &str, args: &[&str]) {
    Command::new(program, &Launcher::default()).args(args).run().unwrap_or_else(|error| panic!("{error}"));
}

/// A network namespace with a name.
struct Namespace(String);

impl Namespace {
    fn new(test: &str) -> Self {
        let name = format!("shunt-redirect-{}-{test}", process::id());
        run("ip", &["netns", "add", &name]);
        Self(name)
    }

    /// Runs a command line in the namespace.
    fn run(&self, line: &str) {
        let words = ["netns", "exec", &self.0].into_iter().chain(line.split(' '));
        run("ip", &words.collect::<Vec<_>>());
    }

    fn path(&self) -> PathBuf {
        Path::new("/run/netns").join(&self.0)
    }

    fn find(&self, exempt: &ExemptNamespaces) -> Option<ExemptNamespace> {
        exempt.values().find(|namespace| namespace.path == self.path()).cloned()
    }

    fn is_exempt(&self, watcher: &mut Watcher) -> bool {
        watcher.check_all().expect("root may enter all namespaces");
        self.find(&watcher.redirecting().namespaces).is_some()
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = Command::new("ip", &Launcher::default()).args(["netns", "del", &self.0]).run();
    }
}

/// Checks that a namespace is reported after the line `add` ran and until `remove` runs, by a
/// watcher that runs all the time and by one that starts later. The lines of `prepare` alone do not
/// redirect.
fn check(test: &str, prepare: &[&str], add: &str, remove: &str) {
    let namespace = Namespace::new(test);
    let mut watcher = Watcher::new().expect("it opens");
    assert!(!namespace.is_exempt(&mut watcher), "it has no rules");
    for line in prepare {
        namespace.run(line);
    }
    assert!(!namespace.is_exempt(&mut watcher), "{prepare:?} does not redirect");
    for round in 0..2 {
        namespace.run(add);
        assert!(namespace.is_exempt(&mut watcher), "round {round}: {add}");
        assert!(namespace.is_exempt(&mut Watcher::new().expect("it opens")), "a new watcher: {add}");
        namespace.run(remove);
        assert!(!namespace.is_exempt(&mut watcher), "round {round}: {remove}");
        assert!(!namespace.is_exempt(&mut Watcher::new().expect("it opens")), "a new watcher: {remove}");
    }
}

#[test]
fn an_nftables_nat_rule_at_output_redirects() {
    for family in ["ip", "ip6", "inet"] {
        check(
            &format!("nft-{family}"),
            &[
                &format!("nft add table {family} mesh"),
                &format!("nft add chain {family} mesh out {{ type nat hook output priority -100; }}"),
            ],
            &format!("nft add rule {family} mesh out tcp dport 80 redirect to :8081"),
            &format!("nft flush chain {family} mesh out"),
        );
    }
}

#[test]
fn the_addresses_of_a_namespace_that_redirects_are_known() {
    let namespace = Namespace::new("addresses");
    namespace.run("ip link add pod0 type bridge");
    for address in ["10.1.2.3/24", "fd01::3/64"] {
        namespace.run(&format!("ip address add {address} dev pod0"));
    }
    namespace.run("ip link set pod0 up");
    namespace.run("ip link set lo up");
    namespace.run("nft add table ip mesh");
    namespace.run("nft add chain ip mesh out { type nat hook output priority -100; }");
    namespace.run("nft add rule ip mesh out tcp dport 80 redirect to :8081");
    let mut watcher = Watcher::new().expect("it opens");
    assert!(namespace.is_exempt(&mut watcher));
    let expected = ["10.1.2.3", "fd01::3"].map(|ip| ip.parse().expect("an address"));
    assert!(watcher.redirecting().addresses.is_superset(&expected.into()));
    namespace.run("nft delete table ip mesh");
    assert!(!namespace.is_exempt(&mut watcher));
    assert!(watcher.redirecting().addresses.is_superset(&expected.into()), "flows of it may begin later");
}

#[test]
fn an_nftables_chain_that_reroutes_redirects() {
    check(
        "nft-route",
        &["nft add table ip mesh", "nft add chain ip mesh out { type route hook output priority -150; }"],
        "nft add rule ip mesh out meta mark set 7",
        "nft flush chain ip mesh out",
    );
}

#[test]
fn a_tproxy_rule_redirects_also_in_a_chain_that_is_jumped_to() {
    check(
        "nft-tproxy",
        &[
            "nft add table ip mesh",
            "nft add chain ip mesh proxy",
            "nft add chain ip mesh pre { type filter hook prerouting priority -150; }",
            "nft add rule ip mesh pre jump proxy",
        ],
        "nft add rule ip mesh proxy tcp dport 80 tproxy to :15001",
        "nft flush chain ip mesh proxy",
    );
}

#[test]
fn nftables_rules_that_filter_or_translate_incoming_packets_do_not_redirect() {
    let namespace = Namespace::new("nft-other");
    for line in [
        "nft add table inet mesh",
        "nft add chain inet mesh out { type filter hook output priority 0; }",
        "nft add rule inet mesh out tcp dport 80 drop",
        "nft add chain inet mesh pre { type nat hook prerouting priority -100; }",
        "nft add rule inet mesh pre tcp dport 80 redirect to :8081",
        "nft add chain inet mesh post { type nat hook postrouting priority 100; }",
        "nft add rule inet mesh post masquerade",
    ] {
        namespace.run(line);
    }
    assert!(!namespace.is_exempt(&mut Watcher::new().expect("it opens")));
}

#[test]
fn rules_of_both_variants_of_iptables_redirect_at_output() {
    for program in ["iptables-nft", "ip6tables-nft", "iptables-legacy", "ip6tables-legacy"] {
        for (table, rule) in [("nat", "REDIRECT --to-ports 8081"), ("mangle", "MARK --set-mark 7")] {
            check(
                &format!("{program}-{table}"),
                &[
                    // Creates the table and its chains, if the variant needs that.
                    &format!("{program} -t {table} -A PREROUTING -j ACCEPT"),
                    &format!("{program} -t filter -A OUTPUT -j ACCEPT"),
                ],
                &format!("{program} -t {table} -A OUTPUT -p tcp --dport 80 -j {rule}"),
                &format!("{program} -t {table} -D OUTPUT -p tcp --dport 80 -j {rule}"),
            );
        }
    }
}

#[test]
fn a_tproxy_rule_of_iptables_on_nftables_redirects() {
    let rule = "PREROUTING -p tcp --dport 80 -j TPROXY --on-port 15001";
    check(
        "iptables-tproxy",
        &["iptables-nft -t mangle -A PREROUTING -j ACCEPT"],
        &format!("iptables-nft -t mangle -A {rule}"),
        &format!("iptables-nft -t mangle -D {rule}"),
    );
}

#[test]
fn asking_does_not_create_legacy_tables() {
    let namespace = Namespace::new("untouched");
    assert!(!namespace.is_exempt(&mut Watcher::new().expect("it opens")));
    let list = "! cat /proc/net/ip_tables_names /proc/net/ip6_tables_names | grep .";
    run("ip", &["netns", "exec", &namespace.0, "sh", "-c", list]);
}

/// Waits until the watcher reports a value that `is` accepts.
async fn wait(from: &mut watch::Receiver<Option<RedirectingPods>>, is: impl Fn(&ExemptNamespaces) -> bool) {
    let found = from.wait_for(|value| value.as_ref().is_some_and(|pods| is(&pods.namespaces)));
    tokio::time::timeout(LIMIT, found).await.expect("it is reported").expect("the watcher runs");
}

#[tokio::test]
async fn changes_are_reported_until_nobody_listens() {
    let namespace = Namespace::new("report");
    let (to, mut from) = watch::channel(None);
    let reporting = tokio::spawn(report(to));
    wait(&mut from, |exempt| namespace.find(exempt).is_none()).await;
    namespace.run("iptables-nft -t nat -A OUTPUT -p tcp --dport 80 -j REDIRECT --to-ports 8081");
    wait(&mut from, |exempt| namespace.find(exempt).is_some()).await;
    namespace.run("iptables-nft -t nat -F OUTPUT");
    wait(&mut from, |exempt| namespace.find(exempt).is_none()).await;
    namespace.run("iptables-legacy -t nat -A OUTPUT -p tcp --dport 80 -j REDIRECT --to-ports 8081");
    wait(&mut from, |exempt| namespace.find(exempt).is_some()).await;

    let late = Namespace::new("late");
    late.run("iptables-nft -t nat -A OUTPUT -p tcp --dport 80 -j REDIRECT --to-ports 8081");
    wait(&mut from, |exempt| late.find(exempt).is_some()).await;
    let exempt = from.borrow().as_ref().and_then(|pods| late.find(&pods.namespaces)).expect("it was there");
    assert!(exempt.to_string().contains(&late.0) && exempt.cookie.is_some(), "{exempt:?}");

    let path = namespace.path();
    drop(namespace);
    wait(&mut from, |exempt| exempt.values().all(|namespace| namespace.path != path)).await;
    drop(from);
    let ended = tokio::time::timeout(LIMIT, reporting).await.expect("it ends");
    ended.expect("no panic").expect("no error");
}

/// A pod whose namespace has no name: a process in its own network namespace.
#[tokio::test]
async fn a_namespace_of_a_process_has_the_host_name_of_the_process() {
    let directory = tempfile::tempdir().expect("a directory");
    let end = directory.path().join("end");
    run("mkfifo", &[&end.display().to_string()]);
    let script = format!(
        "hostname redirecting-pod; iptables-nft -t nat -A OUTPUT -j REDIRECT; cat {} >/dev/null",
        end.display()
    );
    let pod = thread::spawn(move || run("unshare", &["--net", "--uts", "bash", "-c", &script]));
    let (to, mut from) = watch::channel(None);
    let reporting = tokio::spawn(report(to));
    let is_pod = |namespace: &ExemptNamespace| namespace.host_name.as_deref() == Some("redirecting-pod");
    wait(&mut from, |exempt| exempt.values().any(is_pod)).await;
    let text = from
        .borrow()
        .iter()
        .flat_map(|pods| pods.namespaces.values())
        .find(|pod| is_pod(pod))
        .map(ToString::to_string);
    let text = text.expect("it was there");
    assert!(text.starts_with("redirecting-pod (/proc/") && text.ends_with("/ns/net)"), "{text}");
    fs::write(&end, "").expect("the pod reads it");
    pod.join().expect("the pod ends");
    wait(&mut from, |exempt| !exempt.values().any(is_pod)).await;
    reporting.abort();
}
