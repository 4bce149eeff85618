//! Tests the parsing of cases and the errors for invalid ones.

use super::*;
use crate::world::Host;

fn parse(flow: &str) -> Result<Case> {
    format!("{{name: x, about: y, steps: [{{flows: [{flow}]}}]}}").parse()
}

fn flow(text: &str) -> Flow {
    parse(text).unwrap().steps.remove(0).flows.remove(0)
}

fn error(text: &str) -> String {
    format!("{:#}", parse(text).unwrap_err())
}

#[test]
fn every_case_of_the_project_parses() {
    let cases = Case::read_directory(crate::runner::cases_directory(), &[]).unwrap();
    assert!(cases.len() >= 50, "{} cases", cases.len());
    assert!(cases.iter().all(|case| case.steps.iter().any(|step| !step.flows.is_empty())));
}

#[test]
fn only_selects_cases_and_an_unknown_name_is_an_error() {
    let only = |names: &[&str]| {
        let names: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
        Case::read_directory(crate::runner::cases_directory(), &names)
    };
    assert_eq!(only(&["hairpin", "restart"]).unwrap().len(), 2);
    assert!(only(&["hairpn"]).unwrap_err().to_string().contains("hairpn"));
}

#[test]
fn an_unknown_key_is_an_error_with_its_path() {
    let case: Result<Case> = "{name: x, about: y, stepps: []}".parse();
    assert!(format!("{:#}", case.unwrap_err()).contains("stepps"));
    let step: Result<Case> = "{name: x, about: y, steps: [{flows: []}, {aply: []}]}".parse();
    let step = format!("{:#}", step.unwrap_err());
    assert!(step.contains("steps[1]") && step.contains("aply"), "{step}");
    let flow = error("{from: a1, to: '10.0.0.1:80', proto: tcp, reach: [a1], stiky: true}");
    assert!(flow.contains("steps[0].flows[0]") && flow.contains("stiky"), "{flow}");
}

#[test]
fn an_invalid_value_is_an_error_that_names_it() {
    errors_name(&[
        ("{from: c9, to: '10.0.0.1:80', proto: tcp, reach: [a1]}", "c9"),
        ("{from: a1, to: '10.0.0.1', proto: tcp, reach: [a1]}", "socket address"),
        ("{from: a1, to: '10.0.0.1:80', reach: [a1]}", "needs `proto`"),
        ("{from: a1, to: '10.0.0.1:80', proto: dccp, reach: [a1]}", "dccp"),
        ("{from: a1, to: '10.0.0.1:80', proto: tcp, reach: []}", "names no host"),
        ("{from: a1, to: '10.0.0.1:80', proto: tcp}", "exactly one of `reach` and `result`"),
        ("{from: a1, to: '10.0.0.1:80', proto: tcp, result: dropped}", "dropped"),
        (
            "{from: a1, to: '10.0.0.1:80', proto: tcp, result: blocked, share: [0, 1]}",
            "`share` has no meaning",
        ),
    ]);
}

#[test]
fn a_case_that_changes_the_world_needs_its_own_world() {
    let case =
        |head: &str| -> Case { format!("{{name: x, about: y, {head} steps: [{{}}]}}").parse().unwrap() };
    assert!(!case("").needs_own_world());
    assert!(case("outside-cgroup: [a1],").needs_own_world());
    assert!(case("world: [{on: node2, run: ['ip link set vethb1 mtu 1300']}],").needs_own_world());
    let outside: Result<Case> = "{name: x, about: y, outside-cgroup: [b1], steps: [{}]}".parse();
    assert!(outside.unwrap_err().to_string().contains("b1 is always outside"));
}

#[test]
fn a_case_can_have_a_proxy_on_node2_in_mode_ebpf() {
    let case = |head: &str| format!("{{name: x, about: y, {head}, steps: [{{}}]}}").parse::<Case>();
    let both = case("modes: [ebpf], proxies: [node1, node2]").unwrap();
    assert!(both.needs_own_world() && both.proxies == [Host::Node1, Host::Node2]);
    let usual = case("modes: [ebpf]").unwrap();
    assert!(!usual.needs_own_world() && usual.proxies == [Host::Node1]);
    for (head, expected) in [
        ("proxies: [node1, b1], modes: [ebpf]", "b1 is not a node"),
        ("proxies: [node2], modes: [ebpf]", "node1 is missing"),
        ("proxies: [node1, node1], modes: [ebpf]", "twice"),
        ("proxies: [node1, node2]", "needs `modes: [ebpf]`"),
        ("proxies: [node1, node2], modes: [ebpf, ipvs]", "needs `modes: [ebpf]`"),
    ] {
        let error = case(head).unwrap_err().to_string();
        assert!(error.contains(expected), "{head}: {error}");
    }
}

#[test]
fn a_flow_can_expect_a_large_answer_or_a_certain_failure() {
    let large =
        flow("{from: client, to: '10.0.0.1:80', proto: tcp, answer: 9000, retransmits: 3, reach: [a1]}");
    assert!(matches!(&large.action, Action::Connect(connect) if connect.answer == 9000));
    assert!(matches!(&large.expect, Expectation::Reach(answers) if answers.retransmits == Some(3)));
    for (result, expect) in
        [("silent", Expectation::Silent), ("reset", Expectation::Reset), ("too-big", Expectation::TooBig)]
    {
        let text = format!("{{from: client, to: '10.0.0.1:80', proto: udp, result: {result}}}");
        assert_eq!(flow(&text).expect, expect);
    }
}

#[test]
fn contradicting_keys_are_errors_that_name_them() {
    errors_name(&[
        ("{from: a1, to: '10.0.0.1:80', proto: tcp, mode: unconnected, reach: [a1]}", "needs `proto: udp`"),
        ("{from: a1, to: '10.0.0.1:80', proto: tcp, n: 0, reach: [a1]}", "`n` is 0"),
        ("{from: a1, to: '10.0.0.1:80', proto: tcp, pause: -1, reach: [a1]}", "`pause` -1"),
        ("{from: a1, to: '10.0.0.1:80', proto: tcp, sources: ['fd57::1'], reach: [a1]}", "fd57::1"),
        ("{from: a1, to: '10.0.0.1:80', proto: tcp, n: 2, hold: x, reach: [a1]}", "`hold` keeps one"),
        ("{from: a1, to: '10.0.0.1:80', proto: tcp, sport: 46000, reach: [a1]}", "`sport` 46000"),
        ("{from: a1, to: '10.0.0.1:80', proto: tcp, sport: 0, reach: [a1]}", "`sport` 0"),
        ("{from: a1, to: '10.0.0.1:80', send: x, proto: tcp, reach: [a1]}", "exactly one of `to`"),
        ("{from: a1, send: x, reach: [a1]}", "no earlier flow from a1 has hold: x"),
        ("{from: a1, http: 'http://10.0.0.1/'}", "needs `status`"),
        ("{from: a1, http: 'http://10.0.0.1/', status: 200, result: refused}", "`result` means"),
        ("{from: a1, http: 'http://10.0.0.1/', status: 200, size: 3}", "`size` has no meaning"),
    ]);
}

/// Asserts that each text is rejected with an error that contains the given words.
fn errors_name(cases: &[(&str, &str)]) {
    for (text, expected) in cases {
        let error = error(text);
        assert!(error.contains(expected), "{text}: {error}");
    }
}

#[test]
fn unknown_tags_and_objects_without_a_name_are_errors() {
    let mode: Result<Case> = "{name: x, about: y, modes: [fast], steps: [{}]}".parse();
    assert!(format!("{:#}", mode.unwrap_err()).contains("known are ebpf"));
    let tag: Result<Case> = "{name: x, about: y, requires: [ipv7], steps: [{}]}".parse();
    assert!(format!("{:#}", tag.unwrap_err()).contains("ipv7"));
    let object: Result<Case> = "{name: x, about: y, steps: [{apply: [{kind: Service}]}]}".parse();
    let object = format!("{:#}", object.unwrap_err());
    assert!(object.contains("steps[0].apply[0]") && object.contains("metadata.name"), "{object}");
    let key: Result<Case> = "{name: x, about: y, steps: [{delete: [Service]}]}".parse();
    assert!(format!("{:#}", key.unwrap_err()).contains("Kind/namespace/name"));
}

#[test]
fn all_keys_of_a_connection_parse() {
    let flow = flow(
        "{from: client, to: '[fd96::10]:53', proto: udp, mode: unconnected, n: 4, size: 9, sport: 40001, \
          sources: ['fd57::60', 'fd57::61'], pause: 0.5, reach: [a1, b1], source: node, share: [0.3, 0.7]}",
    );
    let Action::Connect(connect) = &flow.action else { panic!("{flow:?}") };
    assert_eq!((flow.from, connect.to.port(), connect.attempts, connect.size), (Host::Client, 53, 4, 9));
    assert_eq!((connect.unconnected, connect.source_port, connect.sources.len()), (true, Some(40001), 2));
    assert_eq!(connect.pause.as_millis(), 500);
    let Expectation::Reach(answers) = &flow.expect else { panic!("{flow:?}") };
    assert_eq!(answers.hosts, BTreeSet::from([Host::A1, Host::B1]));
    assert_eq!((answers.source, answers.share), (Some(Source::Node), Some((0.3, 0.7))));
}

#[test]
fn send_parses_its_own_keys() {
    let case = parse(
        "{from: a1, to: '10.0.0.1:80', proto: udp, reach: [a1], hold: u}, \
         {from: a1, send: u, reach: [b1], n: 3, pause: 0.5, tries: 5, or_error: true}",
    );
    let flows = case.unwrap().steps.remove(0).flows;
    let Action::Send(send) = &flows[1].action else { panic!("{flows:?}") };
    assert_eq!((send.request.id.as_str(), send.tries, send.or_error), ("u", 5, true));
    assert_eq!((send.sends, send.pause.as_millis()), (3, 500));
    assert_eq!(flows[1].to_string(), "a1 send u x3");
}
