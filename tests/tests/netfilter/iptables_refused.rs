//! The iptables mode when its rules are refused or cannot be shown, in this kernel and with both
//! kinds of iptables.

use proxy_userspace::{
    dataplane::{
        Dataplane as _, FailureScope, MetricValue, ModeMetric,
        iptables::{Iptables, State},
    },
    kernel::command::Launcher,
    model::{Dirty, FrontendKind, IpFamily, Protocol, Snapshot, TrafficPolicy},
};

use crate::{
    iptables_mode::{KINDS, add, frontend, mode, observe, on_each_kind, port, services, settings, sync},
    node::Node,
};

/// Returns the Services without the one with source ranges, whose chain is then removed.
fn without_guarded() -> Snapshot {
    let mut less = services();
    less.ports.retain(|key, _| !key.to_string().contains("guarded"));
    less
}

/// Returns the name of that chain in the output of iptables-save.
fn firewall_chain(shown: &str) -> String {
    let name = |line: &str| line.strip_prefix(':')?.split(' ').next().map(String::from);
    shown.lines().filter_map(name).find(|name| name.starts_with("KUBE-FW-")).expect("a chain")
}

#[test]
fn refused_rules_are_reported_by_line_and_written_when_accepted() {
    on_each_kind(|kind, node| {
        let mut mode = mode(node);
        let mut state = observe(node, &mut mode);
        sync(node, &mut mode, &mut state, &services());
        // A foreign rule uses a chain, so that it cannot be removed.
        let less = without_guarded();
        let shown = kind.saved(node);
        let chain = firewall_chain(&shown);
        kind.both(node, "-t nat -N MINE");
        kind.both(node, &format!("-t nat -A MINE -j {chain}"));
        let plan = Iptables::plan(&state, &less, &Dirty::everything());
        let refused =
            node.within(|| Ok(mode.apply(&mut state, plan))).expect_err("a foreign rule uses the chain");
        let reported = refused.to_string();
        assert!(reported.contains("cannot write IPv4 rules at line "), "{reported}");
        assert!(counted(&mut mode, "sync_proxy_rules_iptables_restore_failures") >= 1);
        assert!(!node.within(|| Ok(mode.is_certain(&state))));
        // The chain stays, and everything else is written.
        let mut state = observe(node, &mut mode);
        assert!(sync(node, &mut mode, &mut state, &less) > 0);
        assert_eq!(sync(node, &mut mode, &mut state, &less), 0);
        assert!(kind.saved(node).contains(&format!(":{chain}")));
        // The next process tries again.
        kind.both(node, "-t nat -F MINE");
        let mut next = crate::iptables_mode::mode(node);
        let mut state = observe(node, &mut next);
        sync(node, &mut next, &mut state, &less);
        assert!(!kind.saved(node).contains(&chain));
    });
}

#[test]
fn refused_rules_of_one_family_do_not_delay_the_other() {
    on_each_kind(|kind, node| {
        let mut mode = mode(node);
        let mut state = observe(node, &mut mode);
        sync(node, &mut mode, &mut state, &services());
        let less = without_guarded();
        // A foreign rule uses a chain that must go, in IPv6 only.
        let ip6tables = format!("ip6tables-{}", kind.name);
        let shown = node.run(&format!("{ip6tables}-save"), &[], "");
        let chain = firewall_chain(&shown);
        node.run(&ip6tables, &["-t", "nat", "-N", "MINE"], "");
        node.run(&ip6tables, &["-t", "nat", "-A", "MINE", "-j", &chain], "");
        let plan = Iptables::plan(&state, &less, &Dirty::everything());
        let refused =
            node.within(|| Ok(mode.apply(&mut state, plan))).expect_err("a foreign rule uses the chain");
        assert_eq!(Iptables::failure_scope(&refused), FailureScope::Family(IpFamily::V6), "{refused}");
        let guarded = |command: &str| {
            node.run(&format!("{command}-{}-save", kind.name), &[], "").contains("default/guarded")
        };
        assert_eq!([guarded("iptables"), guarded("ip6tables")], [false, true]);
        // Changes of the other family are still made.
        let key = services().ports.keys().find(|key| key.to_string().contains("guarded")).cloned();
        let dirty = Dirty { ports: key.into_iter().collect(), ..Dirty::default() };
        let plan = Iptables::plan(&state, &services(), &dirty);
        node.within(|| Ok(mode.apply(&mut state, plan))).expect("no change of IPv6 is tried");
        assert!(guarded("iptables"));
    });
}

#[test]
fn service_with_refused_rules_is_left_out_and_others_are_served() {
    on_each_kind(|kind, node| {
        let mut mode = mode(node);
        let mut state = observe(node, &mut mode);
        let mut snapshot = services();
        // An address of the other family, which no real Service has.
        let frontends = vec![frontend(FrontendKind::ClusterIp, Some("fd96::99"), 80)];
        let bad = port(frontends, IpFamily::V4, TrafficPolicy::Cluster, 1);
        let (bad_key, bad) = add(IpFamily::V4, "bad", Protocol::Tcp, bad);
        snapshot.ports.insert(bad_key.clone(), bad);
        let apply = |mode: &mut Iptables, state: &mut State, snapshot: &Snapshot| {
            let plan = Iptables::plan(state, snapshot, &Dirty::everything());
            node.within(|| Ok(mode.apply(state, plan))).map_err(|error| error.to_string())
        };
        let refused = apply(&mut mode, &mut state, &snapshot).expect_err("a rule is refused");
        assert!(refused.contains("cannot write IPv4 rules at line"), "{refused}");
        let mut state = observe(node, &mut mode);
        let reported = apply(&mut mode, &mut state, &snapshot).expect_err("every sync reports it");
        assert!(reported.starts_with("1 service ports are left out"), "{reported}");
        let shown = kind.saved(node);
        assert!(shown.contains("default/open:p cluster IP") && !shown.contains("default/bad"), "{shown}");
        assert!(node.within(|| Ok(mode.is_certain(&state))), "everything else is in place");
        snapshot.ports.remove(&bad_key);
        apply(&mut mode, &mut state, &snapshot).expect("no rule is refused any more");
        assert_eq!(sync(node, &mut mode, &mut state, &services()), 0);
    });
}

#[test]
fn refusal_without_a_line_is_traced_to_its_service() {
    on_each_kind(|kind, node| {
        // A jump from POSTROUTING to a Service's chain makes the kernel refuse DNAT in that chain.
        let bad = "KUBE-SVC-WOF25GF5VX2POM23";
        kind.both(node, &format!("-t nat -N {bad}"));
        kind.both(node, &format!("-t nat -A POSTROUTING -j {bad}"));
        let mut mode = mode(node);
        let mut state = observe(node, &mut mode);
        let apply = |mode: &mut Iptables, state: &mut State, snapshot: &Snapshot| {
            let plan = Iptables::plan(state, snapshot, &Dirty::everything());
            node.within(|| Ok(mode.apply(state, plan))).map_err(|error| error.to_string())
        };
        let refused = apply(&mut mode, &mut state, &services()).expect_err("it is refused");
        assert!(refused.contains("cannot write IPv"), "{}: {refused}", kind.name);
        // The next syncs find that the chain cannot be removed.
        let mut tries = (0..3).map(|_| {
            let mut state = observe(node, &mut mode);
            apply(&mut mode, &mut state, &services()).expect_err("every sync reports it")
        });
        let expected =
            "2 service ports are left out because their rules were rejected; the first is default/open:p";
        let reported: Vec<String> = tries.by_ref().take(3).collect();
        assert!(reported[2].starts_with(expected), "{}: {reported:?}", kind.name);
        let shown = kind.saved(node);
        // The same name with UDP is a different service port.
        for there in
            ["-p udp -m comment --comment \"default/open:p cluster IP", "default/guarded:p cluster IP"]
        {
            assert_eq!(shown.matches(there).count(), 4, "{}: {there}: {shown}", kind.name);
        }
        assert!(
            !shown.contains("-p tcp -m comment --comment \"default/open:p cluster IP"),
            "{}: {shown}",
            kind.name
        );
        // After the foreign jump is removed, a new process serves everything.
        kind.both(node, &format!("-t nat -D POSTROUTING -j {bad}"));
        let mut next = crate::iptables_mode::mode(node);
        let mut state = observe(node, &mut next);
        sync(node, &mut next, &mut state, &services());
        assert!(kind.saved(node).contains("-p tcp -m comment --comment \"default/open:p cluster IP"));
    });
}

#[test]
fn beside_rules_that_iptables_cannot_show_everything_is_served_once() {
    // The legacy iptables shares its tables with no other program.
    let (kind, directory) = (KINDS[0], tempfile::tempdir().expect("a directory"));
    let node = &kind.node(directory.path());
    kind.both(node, "-t nat -N MINE");
    let foreign =
        "add rule ip nat MINE ct state new masquerade\nadd rule ip6 nat MINE ct state new masquerade\n";
    node.run("nft", &["-f", "-"], foreign);
    assert!(!kind.saved(node).contains("*nat"), "it is shown");
    let mut snapshot = services();
    // More rules than iptables-nft gets in one simple input.
    for number in 20..26_u16 {
        let frontends = vec![frontend(FrontendKind::ClusterIp, Some(&format!("10.96.1.{number}")), 80)];
        let large = port(frontends, IpFamily::V4, TrafficPolicy::Cluster, 250);
        snapshot.ports.extend([add(IpFamily::V4, &format!("large-{number}"), Protocol::Tcp, large)]);
    }
    let mut first = mode(node);
    let mut state = observe(node, &mut first);
    sync(node, &mut first, &mut state, &snapshot);
    assert!(node.within(|| Ok(first.is_certain(&state))));
    let mut next = mode(node);
    let mut state = observe(node, &mut next);
    sync(node, &mut next, &mut state, &services());
    let listed = node.run("iptables-nft", &["-t", "nat", "-S", "PREROUTING"], "");
    assert_eq!(listed.matches("-j KUBE-SERVICES").count(), 1, "{listed}");
    let settings = settings(&node.launcher);
    let errors = node.within(|| Ok(Iptables::remove(&settings)));
    let reported: Vec<String> = errors.iter().map(ToString::to_string).collect();
    assert_eq!(reported.len(), 2, "one a family: {reported:?}");
    assert!(reported[0].contains("table nat of iptables-nft"), "{reported:?}");
    node.run("nft", &["-f", "-"], "flush chain ip nat MINE\nflush chain ip6 nat MINE\n");
    assert!(node.within(|| Ok(Iptables::remove(&settings))).is_empty());
    assert!(!kind.saved(node).contains("KUBE-"), "{}", kind.saved(node));
}

fn counted(mode: &mut Iptables, name: &str) -> u64 {
    let metrics: Vec<ModeMetric> = mode.mode_metrics().expect("the mode counts")();
    let values = metrics.iter().filter(|metric| metric.name == name).map(|metric| match metric.value {
        MetricValue::Counter(value) => value,
        MetricValue::Gauge(value) => value.unsigned_abs(),
    });
    values.sum()
}

#[test]
fn without_iptables_the_mode_says_which_command_is_missing() {
    let directory = tempfile::tempdir().expect("a directory");
    let node = Node::with_only(&[], directory.path());
    let settings = settings(&Launcher::only_in([directory.path().to_owned()]));
    let error = node.within(|| Ok(Iptables::new(settings))).expect_err("there is no command");
    assert!(error.to_string().contains("iptables-restore"), "{error}");
}
