//! What a flow expects, held against what was seen.

use std::net::SocketAddr;

use super::*;
use crate::{
    agent::protocol::{Answer, Failure, FailureKind, Page, Try},
    case::Case,
    world::Host,
};

const DESTINATION: &str = "10.96.0.10:80";

fn flow(keys: &str) -> Flow {
    let text = format!("{{name: x, about: y, steps: [{{flows: [{{{keys}}}]}}]}}");
    text.parse::<Case>().unwrap().steps.remove(0).flows.remove(0)
}

/// The verdict on tries from a2 to a cluster IP.
fn verdict(expect: &str, tries: &[Try]) -> Result<(), String> {
    let flow = flow(&format!("from: a2, to: '{DESTINATION}', proto: tcp, {expect}"));
    judge(flow.from, &flow.expect, &Seen::Tries(tries.to_vec()))
}

fn address(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

fn answered(host: &str, seen: &str) -> Try {
    let (seen, destination) = (address(seen), address(DESTINATION));
    Try::Answered(Answer { host: host.to_owned(), seen, destination, source: None, reported: destination })
}

fn a1() -> Try {
    answered("a1", "10.244.1.12:40000")
}

fn b1() -> Try {
    answered("b1", "10.244.1.12:40000")
}

fn failed(kind: FailureKind) -> Try {
    Try::Failed(Failure { doing: "connect".to_owned(), kind, message: format!("{kind:?}") })
}

#[test]
fn reach_wants_exactly_its_hosts_and_every_try_answered() {
    assert_eq!(verdict("reach: [a1, b1]", &[a1(), b1(), a1()]), Ok(()));
    assert!(verdict("reach: [a1, b1]", &[a1(), a1()]).unwrap_err().contains("b1 never answered"));
    assert!(verdict("reach: [a1]", &[a1(), b1()]).unwrap_err().contains("b1 answered"));
    assert!(verdict("reach: [a1]", &[a1(), failed(FailureKind::TimedOut)]).is_err());
    assert!(verdict("reach: [a1]", &[]).is_err());
}

#[test]
fn sticky_wants_one_and_the_same_host() {
    assert_eq!(verdict("reach: [a1, b1], sticky: true", &[b1(), b1()]), Ok(()));
    assert!(verdict("reach: [a1, b1], sticky: true", &[a1(), b1()]).unwrap_err().contains("2 hosts"));
    assert!(verdict("reach: [a1], sticky: true", &[b1(), b1()]).is_err());
}

#[test]
fn share_bounds_each_hosts_part() {
    assert_eq!(verdict("reach: [a1, b1], share: [0.4, 0.6]", &[a1(), b1()]), Ok(()));
    let uneven = [a1(), a1(), a1(), b1()];
    assert!(verdict("reach: [a1, b1], share: [0.4, 0.6]", &uneven).unwrap_err().contains("0.75"));
}

#[test]
fn source_is_the_callers_own_address_or_one_of_node1() {
    let as_node = |address| [answered("a1", address)];
    assert_eq!(verdict("reach: [a1], source: client", &[a1()]), Ok(()));
    assert!(verdict("reach: [a1], source: node", &[a1()]).unwrap_err().contains("10.244.1.12"));
    for own in ["192.168.57.11:1", "192.168.57.111:1", "10.244.1.1:1", "[fd57::11]:1", "[fd44:1::1]:1"] {
        assert_eq!(verdict("reach: [a1], source: node", &as_node(own)), Ok(()), "{own}");
        assert!(verdict("reach: [a1], source: client", &as_node(own)).is_err(), "{own}");
    }
}

#[test]
fn a_source_address_the_flow_gave_the_host_counts_as_its_own() {
    let Try::Answered(mut answer) = answered("a1", "192.168.57.60:1") else { unreachable!() };
    answer.source = Some(answer.seen.ip());
    assert_eq!(verdict("reach: [a1], source: client", &[Try::Answered(answer)]), Ok(()));
}

#[test]
fn the_callers_socket_must_report_the_vip() {
    let Try::Answered(mut answer) = a1() else { unreachable!() };
    answer.reported = address("10.244.1.11:8080");
    assert!(verdict("reach: [a1]", &[Try::Answered(answer)]).unwrap_err().contains("10.244.1.11:8080"));
}

#[test]
fn refused_wants_a_refusal_of_every_try() {
    let refusal = || failed(FailureKind::Refused);
    assert_eq!(verdict("result: refused", &[refusal(), refusal()]), Ok(()));
    for other in [FailureKind::TimedOut, FailureKind::Unreachable, FailureKind::Other] {
        assert!(verdict("result: refused", &[refusal(), failed(other)]).is_err(), "{other:?}");
    }
    assert!(verdict("result: refused", &[refusal(), a1()]).is_err());
}

#[test]
fn blocked_wants_no_answer_however_it_fails_but_not_by_the_tests_own_fault() {
    for kind in [FailureKind::Refused, FailureKind::TimedOut, FailureKind::Unreachable] {
        assert_eq!(verdict("result: blocked", &[failed(kind)]), Ok(()), "{kind:?}");
    }
    assert!(verdict("result: blocked", &[failed(FailureKind::Other)]).is_err());
    assert!(verdict("result: blocked", &[failed(FailureKind::TimedOut), a1()]).is_err());
}

fn page_verdict(keys: &str, page: Result<Page, Failure>) -> Result<(), String> {
    let flow = flow(&format!("from: client, http: 'http://10.0.0.1/', {keys}"));
    judge(flow.from, &flow.expect, &Seen::Page(page))
}

fn page() -> Page {
    Page {
        status: 200,
        headers: [("x-weight".to_owned(), "2".to_owned())].into(),
        body: r#"{"localEndpoints": 2, "service": {"namespace": "default", "name": "hc"}}"#.to_owned(),
    }
}

#[test]
fn a_page_must_hold_what_is_asked_for_and_may_hold_more() {
    for keys in [
        "status: 200",
        "header: {X-Weight: '2'}",
        "json: {localEndpoints: 2}",
        "json: {service: {name: hc}}",
        "contains: localEnd",
    ] {
        assert_eq!(page_verdict(keys, Ok(page())), Ok(()), "{keys}");
    }
    for (keys, why) in [
        ("status: 503", "status is 200"),
        ("header: {X-Weight: '3'}", "X-Weight"),
        ("header: {X-Other: '3'}", "no header X-Other"),
        ("json: {localEndpoints: 0}", ".localEndpoints is 2"),
        ("json: {service: {kind: x}}", "no .service.kind"),
        ("contains: nothing", "does not contain"),
    ] {
        let verdict = page_verdict(keys, Ok(page())).unwrap_err();
        assert!(verdict.contains(why), "{keys}: {verdict}");
    }
}

#[test]
fn a_refused_page_is_refused_and_no_page() {
    let refusal = || Err(Failure::new("connect", &std::io::ErrorKind::ConnectionRefused.into()));
    assert_eq!(page_verdict("result: refused", refusal()), Ok(()));
    assert!(page_verdict("status: 200", refusal()).is_err());
    assert!(page_verdict("result: refused", Ok(page())).is_err());
}

fn send_verdict(keys: &str, one: Try) -> Result<(), String> {
    let hold = format!("{{from: a2, to: '{DESTINATION}', proto: udp, reach: [a1], hold: u}}");
    let text = format!("{{name: x, about: y, steps: [{{flows: [{hold}, {{from: a2, send: u, {keys}}}]}}]}}");
    let flow = text.parse::<Case>().unwrap().steps.remove(0).flows.remove(1);
    judge_action(&flow, &Seen::Tries(vec![one]))
}

#[test]
fn with_or_error_a_prompt_error_is_as_good_as_an_answer_but_silence_is_not() {
    assert_eq!(send_verdict("reach: [b1], or_error: true", b1()), Ok(()));
    assert_eq!(send_verdict("reach: [b1], or_error: true", failed(FailureKind::Refused)), Ok(()));
    assert_eq!(send_verdict("reach: [b1], or_error: true", failed(FailureKind::Unreachable)), Ok(()));
    assert!(send_verdict("reach: [b1], or_error: true", failed(FailureKind::TimedOut)).is_err());
    assert!(send_verdict("reach: [b1], or_error: true", a1()).is_err());
    assert!(send_verdict("reach: [b1]", failed(FailureKind::Refused)).is_err());
}

#[test]
fn flows_that_depend_on_chance_or_use_up_a_connection_are_not_repeated() {
    let dial = |keys: &str| {
        flow(&format!("from: a2, to: '{DESTINATION}', proto: tcp, reach: [{}] {keys}", Host::A1))
    };
    assert!(is_repeatable(&dial("")));
    assert!(!is_repeatable(&dial(", hold: x")));
    assert!(!is_repeatable(&dial(", sticky: true")));
    assert!(!is_repeatable(&dial(", share: [0, 1]")));
}
