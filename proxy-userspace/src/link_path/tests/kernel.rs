//! Reads the real kernel, in a network namespace of its own for each test.

use std::{fs, time::Duration};

use nix::sched::{CloneFlags, unshare};
use tokio::{sync::watch, time::timeout};

use super::{
    super::{DirectPath, Evidence, Settings, read, report},
    OWN_MARKS, why,
};
use crate::{
    kernel::{
        bpf::tc,
        command::{Command, Launcher},
    },
    net::{ChosenPath, DirectScope, LinkPath},
};

/// A test waits no longer, on a busy machine either.
const LIMIT: Duration = Duration::from_mins(1);

/// Runs a test on a new thread in a new network namespace, which goes away with it.
fn in_new_namespace(test: impl FnOnce() + Send + 'static) {
    let run = move || {
        unshare(CloneFlags::CLONE_NEWNET).expect("a network namespace, as root");
        test();
    };
    std::thread::spawn(run).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}

fn run(line: &str) {
    let mut words = line.split_whitespace();
    let program = words.next().expect("a program");
    Command::new(program, &Launcher::default()).args(words).run().expect(line);
}

fn nft(script: &str) {
    Command::new("nft", &Launcher::default()).args(["-f", "-"]).stdin(script).run().expect(script);
}

fn evidence() -> Evidence {
    read(&Launcher::default(), OWN_MARKS).expect("everything can be read")
}

#[test]
fn a_new_namespace_has_nothing_that_matters() {
    in_new_namespace(|| {
        let found = evidence();
        assert_eq!(found, Evidence { own_marks: OWN_MARKS, ..Evidence::default() });
        assert_eq!(why(&found), None);
    });
}

#[test]
fn nft_tables_are_read_without_those_of_shunt() {
    in_new_namespace(|| {
        nft("table inet shunt { chain c { type filter hook prerouting priority raw; tcp dport 1 drop; }; }
             table ip6 kube-proxy { chain c { type filter hook prerouting priority raw; tcp dport 2 drop; }; }
             table ip shunt-trace-1 { chain c { type filter hook output priority -150; meta nftrace set 1; }; }
             table ip6 shunt-trace-8 { chain c { type filter hook output priority -150; meta nftrace set 1; }; }");
        assert_eq!(evidence().tables, []);
        nft("table inet theirs {
               map verdicts { type inet_service : verdict; elements = { 3 : jump others } }
               chain others { ct original ip daddr 192.0.2.1 drop; }
               chain c { type filter hook forward priority 0; tcp dport vmap @verdicts; }
             }");
        let why = why(&evidence()).expect("it matters");
        assert!(why.ends_with(": nft inet theirs others `ct original ip daddr 192.0.2.1 drop`"), "{why}");
    });
}

#[test]
fn tables_of_iptables_in_nftables_are_read_with_their_extensions() {
    in_new_namespace(|| {
        run("iptables-nft -t raw -A PREROUTING -m addrtype --dst-type LOCAL -j DROP");
        let found = why(&evidence()).expect("it matters");
        assert!(
            found.ends_with(": iptables-nft raw PREROUTING `-m addrtype --dst-type LOCAL -j DROP`"),
            "{found}"
        );
    });
}

#[test]
fn a_table_that_iptables_cannot_read_is_read_with_nft() {
    in_new_namespace(|| {
        run("ip6tables-nft -t filter -A FORWARD -s 2001:db8::1 -j ACCEPT");
        assert_eq!(why(&evidence()), None);
        nft("add rule ip6 filter FORWARD ct status dnat drop");
        let found = why(&evidence()).expect("it matters");
        assert!(found.ends_with("ip6 filter FORWARD `ct status dnat drop`"), "{found}");
    });
}

#[test]
fn tables_of_legacy_iptables_are_read() {
    in_new_namespace(|| {
        run("iptables-legacy -t mangle -A PREROUTING -d 192.0.2.1 -j DROP");
        let found = why(&evidence()).expect("it matters");
        assert!(found.ends_with(": iptables-legacy mangle PREROUTING `-d 192.0.2.1/32 -j DROP`"), "{found}");
    });
}

#[test]
fn filters_of_traffic_control_are_read() {
    in_new_namespace(|| {
        run("ip link add near type veth peer name far");
        run("tc qdisc add dev near root tbf rate 1mbit burst 32kbit latency 400ms");
        run("tc qdisc add dev near clsact");
        assert_eq!(evidence().filters, []);
        run("tc filter add dev near egress protocol all u32 match u32 0 0 classid 1:1");
        let filters = evidence().filters;
        assert_eq!(filters.len(), 1, "{filters:?}");
        let filter = &filters[0];
        assert_eq!((&*filter.link, filter.hook, &*filter.kind), ("near", tc::Hook::Egress, "u32"));
    });
}

#[test]
fn redirections_have_the_kind_of_their_link() {
    in_new_namespace(|| {
        run("ip link add near type veth peer name far");
        run("ip link add bridge type bridge");
        run("tc qdisc add dev near handle ffff: ingress");
        run(
            "tc filter add dev near parent ffff: protocol all u32 match u32 0 0 action mirred egress redirect dev bridge",
        );
        let filters = evidence().filters;
        assert_eq!(filters.len(), 1, "{filters:?}");
        assert_eq!((&*filters[0].kind, filters[0].redirects_to.as_deref()), ("u32", Some("bridge")));
        assert!(why(&evidence()).expect("it matters").contains("u32 without a name at ingress of near"));
    });
}

#[test]
fn routing_rules_by_source_are_read() {
    in_new_namespace(|| {
        run("ip rule add fwmark 1 table 100");
        assert!(!evidence().routes_by_source);
        run("ip -6 rule add from 2001:db8::/64 table 100");
        assert!(evidence().routes_by_source);
    });
}

#[test]
fn ipsec_policies_are_read() {
    assert!(fs::exists("/proc/net/xfrm_stat").unwrap_or(false), "this test needs a kernel with CONFIG_XFRM");
    in_new_namespace(|| {
        run("ip xfrm policy add src 10.0.0.0/8 dst 192.0.2.0/24 dir out action block");
        let policies: Vec<String> = evidence().policies.iter().map(ToString::to_string).collect();
        assert_eq!(policies, ["src 10.0.0.0/8 dst 192.0.2.0/24 dir out"]);
    });
}

fn settings(direct: DirectPath) -> Settings {
    Settings {
        own_marks: OWN_MARKS,
        sync_period: Duration::from_hours(1),
        direct,
        scope: DirectScope::Learned,
    }
}

/// Runs `report` until `test` has seen enough.
fn with_report(
    direct: DirectPath,
    test: impl AsyncFnOnce(&mut watch::Receiver<Option<ChosenPath>>) + Send + 'static,
) {
    in_new_namespace(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let (to, mut from) = watch::channel(None);
            let reporting = tokio::spawn(report(Launcher::default(), settings(direct), to));
            test(&mut from).await;
            drop(from);
            let ended = timeout(LIMIT, reporting).await.expect("ends without receivers");
            ended.expect("no panic").expect("no error");
        });
    });
}

async fn wait_for(
    from: &mut watch::Receiver<Option<ChosenPath>>,
    is_wanted: impl FnMut(&Option<ChosenPath>) -> bool,
) {
    timeout(LIMIT, from.wait_for(is_wanted)).await.expect("in time").expect("it is still reporting");
}

fn is_programs(chosen: Option<&ChosenPath>) -> bool {
    chosen.is_some_and(|chosen| chosen.path == LinkPath::Programs)
}

fn is_netfilter_for(chosen: Option<&ChosenPath>, part: &str) -> bool {
    let path = chosen.map(|chosen| &chosen.path);
    matches!(path, Some(LinkPath::Netfilter { why }) if why.contains(part))
}

#[test]
fn a_rule_that_comes_and_goes_is_reported() {
    with_report(DirectPath::Never, async |from| {
        wait_for(from, |path| is_programs(path.as_ref())).await;
        nft(
            "table inet theirs { chain c { type filter hook prerouting priority raw; tcp dport 30080 drop; }; }",
        );
        wait_for(from, |path| is_netfilter_for(path.as_ref(), "`tcp dport 30080 drop`")).await;
        nft("delete table inet theirs");
        wait_for(from, |path| is_programs(path.as_ref())).await;
    });
}

#[test]
fn a_filter_and_a_policy_are_reported() {
    with_report(DirectPath::Never, async |from| {
        wait_for(from, Option::is_some).await;
        run("ip link add near type veth peer name far");
        run("tc qdisc add dev near clsact");
        run("tc filter add dev near ingress protocol all u32 match u32 0 0 classid 1:1");
        wait_for(from, |path| is_netfilter_for(path.as_ref(), "u32 without a name at ingress of near")).await;
        run("ip link delete near");
        wait_for(from, |path| is_programs(path.as_ref())).await;
        run("ip xfrm policy add src 10.0.0.0/8 dst 192.0.2.0/24 dir in action block");
        wait_for(from, |path| is_netfilter_for(path.as_ref(), "dir in")).await;
    });
}

/// Returns true for the direct path for packets from all links but these.
fn is_direct_without(chosen: Option<&ChosenPath>, links: &[&str]) -> bool {
    let path = chosen.map(|chosen| &chosen.path);
    matches!(path, Some(LinkPath::Direct { without, .. }) if without.iter().map(|link| &**link).eq(links.iter().copied()))
}

#[test]
fn node_without_rules_for_forwarded_packets_has_the_direct_path() {
    with_report(DirectPath::IfNoRules, async |from| {
        wait_for(from, |path| is_direct_without(path.as_ref(), &[])).await;
        nft(
            "table inet theirs { chain c { type filter hook input priority filter; tcp dport 22 counter; }; }",
        );
        nft("table inet counts { chain c { type filter hook forward priority filter; counter; }; }");
        wait_for(from, |path| is_programs(path.as_ref())).await;
        nft("delete table inet counts");
        wait_for(from, |path| is_direct_without(path.as_ref(), &[])).await;
    });
}

#[test]
fn direct_path_that_is_given_leaves_out_links_with_filters_of_others() {
    with_report(DirectPath::Always, async |from| {
        nft("table inet counts { chain c { type filter hook forward priority filter; counter; }; }");
        wait_for(from, |path| is_direct_without(path.as_ref(), &[])).await;
        run("ip link add near type veth peer name far");
        run("tc qdisc add dev near clsact");
        run("tc filter add dev near ingress protocol all u32 match u32 0 0 classid 1:1");
        wait_for(from, |path| is_direct_without(path.as_ref(), &["near"])).await;
    });
}

#[test]
fn netfilter_is_the_path_if_rules_cannot_be_read() {
    in_new_namespace(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let (to, mut from) = watch::channel(None);
            let reporting = tokio::spawn(report(Launcher::only_in([]), settings(DirectPath::Never), to));
            wait_for(&mut from, |path| is_netfilter_for(path.as_ref(), "the command nft is not installed"))
                .await;
            reporting.abort();
        });
    });
}
