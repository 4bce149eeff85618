//! Tests the comparison of observations with expectations.

use std::net::SocketAddr;

use super::*;
use crate::{
    agent::protocol::{Answer, Attempt, Failure, FailureKind, Page},
    case::Case,
    world::Host,
};

const DESTINATION: &str = "10.96.0.10:80";

fn flow(keys: &str) -> Flow {
    let text = format!("{{name: x, about: y, steps: [{{flows: [{{{keys}}}]}}]}}");
    text.parse::<Case>().unwrap().steps.remove(0).flows.remove(0)
}

/// Checks attempts from a2 to a cluster IP.
fn check_attempts(expect: &str, attempts: &[Attempt]) -> Result<(), String> {
    let flow = flow(&format!("from: a2, to: '{DESTINATION}', proto: tcp, {expect}"));
    check(flow.from, &flow.expect, &Observation::Attempts(attempts.to_vec()))
}

fn address(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

fn answered(host: &str, client: &str) -> Attempt {
    Attempt::Answered(answer(host, client))
}

fn answer(host: &str, client: &str) -> Answer {
    let (client, destination) = (address(client), address(DESTINATION));
    Answer { host: host.to_owned(), client, original: None, destination, source: None, peer: destination }
}

fn a1() -> Attempt {
    answered("a1", "10.244.1.12:40000")
}

fn b1() -> Attempt {
    answered("b1", "10.244.1.12:40000")
}

fn failed(kind: FailureKind) -> Attempt {
    Attempt::Failed(Failure { operation: "connect".to_owned(), kind, message: format!("{kind:?}") })
}

#[test]
fn reach_needs_every_attempt_answered_by_exactly_its_hosts() {
    assert_eq!(check_attempts("reach: [a1, b1]", &[a1(), b1(), a1()]), Ok(()));
    assert!(check_attempts("reach: [a1, b1]", &[a1(), a1()]).unwrap_err().contains("b1 never answered"));
    assert!(check_attempts("reach: [a1]", &[a1(), b1()]).unwrap_err().contains("b1 answered"));
    assert!(check_attempts("reach: [a1]", &[a1(), failed(FailureKind::TimedOut)]).is_err());
    assert!(check_attempts("reach: [a1]", &[]).is_err());
}

#[test]
fn sticky_needs_a_single_host() {
    assert_eq!(check_attempts("reach: [a1, b1], sticky: true", &[b1(), b1()]), Ok(()));
    assert!(check_attempts("reach: [a1, b1], sticky: true", &[a1(), b1()]).unwrap_err().contains("2 hosts"));
    assert!(check_attempts("reach: [a1], sticky: true", &[b1(), b1()]).is_err());
}

#[test]
fn original_is_the_destination_before_the_redirect() {
    let redirected =
        |to| Attempt::Answered(Answer { original: Some(address(to)), ..answer("a2", "10.244.1.12:40000") });
    let expect = format!("reach: [a2], original: '{DESTINATION}'");
    assert_eq!(check_attempts(&expect, &[redirected(DESTINATION)]), Ok(()));
    assert_eq!(check_attempts("reach: [a2]", &[redirected(DESTINATION)]), Ok(()));
    assert!(
        check_attempts(&expect, &[redirected("10.244.2.11:8080")]).unwrap_err().contains("10.244.2.11:8080")
    );
    assert!(
        check_attempts(&expect, &[answered("a2", "10.244.1.12:40000")]).unwrap_err().contains("no original")
    );
}

#[test]
fn share_limits_the_part_of_each_host() {
    assert_eq!(check_attempts("reach: [a1, b1], share: [0.4, 0.6]", &[a1(), b1()]), Ok(()));
    let uneven = [a1(), a1(), a1(), b1()];
    assert!(check_attempts("reach: [a1, b1], share: [0.4, 0.6]", &uneven).unwrap_err().contains("0.75"));
}

#[test]
fn source_is_the_caller_or_node1() {
    let as_node = |address| [answered("a1", address)];
    assert_eq!(check_attempts("reach: [a1], source: client", &[a1()]), Ok(()));
    assert!(check_attempts("reach: [a1], source: node", &[a1()]).unwrap_err().contains("10.244.1.12"));
    for own in ["192.168.57.11:1", "192.168.57.111:1", "10.244.1.1:1", "[fd57::11]:1", "[fd44:1::1]:1"] {
        assert_eq!(check_attempts("reach: [a1], source: node", &as_node(own)), Ok(()), "{own}");
        assert!(check_attempts("reach: [a1], source: client", &as_node(own)).is_err(), "{own}");
    }
}

#[test]
fn a_source_address_of_the_flow_counts_as_the_callers() {
    let Attempt::Answered(mut answer) = answered("a1", "192.168.57.60:1") else { unreachable!() };
    answer.source = Some(answer.client.ip());
    assert_eq!(check_attempts("reach: [a1], source: client", &[Attempt::Answered(answer)]), Ok(()));
}

#[test]
fn the_callers_socket_must_report_the_vip() {
    let Attempt::Answered(mut answer) = a1() else { unreachable!() };
    answer.peer = address("10.244.1.11:8080");
    assert!(
        check_attempts("reach: [a1]", &[Attempt::Answered(answer)]).unwrap_err().contains("10.244.1.11:8080")
    );
}

#[test]
fn refused_needs_every_attempt_refused() {
    let refusal = || failed(FailureKind::Refused);
    assert_eq!(check_attempts("result: refused", &[refusal(), refusal()]), Ok(()));
    for other in [FailureKind::TimedOut, FailureKind::Unreachable, FailureKind::Other] {
        assert!(check_attempts("result: refused", &[refusal(), failed(other)]).is_err(), "{other:?}");
    }
    assert!(check_attempts("result: refused", &[refusal(), a1()]).is_err());
}

#[test]
fn blocked_accepts_every_failure_except_one_of_the_test() {
    for kind in [FailureKind::Refused, FailureKind::TimedOut, FailureKind::Unreachable] {
        assert_eq!(check_attempts("result: blocked", &[failed(kind)]), Ok(()), "{kind:?}");
    }
    assert!(check_attempts("result: blocked", &[failed(FailureKind::Other)]).is_err());
    assert!(check_attempts("result: blocked", &[failed(FailureKind::TimedOut), a1()]).is_err());
}

fn check_page(keys: &str, page: Result<Page, Failure>) -> Result<(), String> {
    let flow = flow(&format!("from: client, http: 'http://10.0.0.1/', {keys}"));
    check(flow.from, &flow.expect, &Observation::Page(page))
}

fn page() -> Page {
    Page {
        status: 200,
        headers: [("x-weight".to_owned(), "2".to_owned())].into(),
        body: r#"{"localEndpoints": 2, "service": {"namespace": "default", "name": "hc"}}"#.to_owned(),
    }
}

#[test]
fn a_page_needs_the_expected_parts_and_may_have_more() {
    for keys in [
        "status: 200",
        "header: {X-Weight: '2'}",
        "json: {localEndpoints: 2}",
        "json: {service: {name: hc}}",
        "contains: localEnd",
    ] {
        assert_eq!(check_page(keys, Ok(page())), Ok(()), "{keys}");
    }
    for (keys, why) in [
        ("status: 503", "status is 200"),
        ("header: {X-Weight: '3'}", "X-Weight"),
        ("header: {X-Other: '3'}", "no header X-Other"),
        ("json: {localEndpoints: 0}", ".localEndpoints is 2"),
        ("json: {service: {kind: x}}", "no .service.kind"),
        ("contains: nothing", "does not contain"),
    ] {
        let check_attempts = check_page(keys, Ok(page())).unwrap_err();
        assert!(check_attempts.contains(why), "{keys}: {check_attempts}");
    }
}

#[test]
fn a_refused_request_has_no_page() {
    let refusal = || Err(Failure::new("connect", &std::io::ErrorKind::ConnectionRefused.into()));
    assert_eq!(check_page("result: refused", refusal()), Ok(()));
    assert!(check_page("status: 200", refusal()).is_err());
    assert!(check_page("result: refused", Ok(page())).is_err());
}

fn check_send(keys: &str, one: Attempt) -> Result<(), String> {
    let hold = format!("{{from: a2, to: '{DESTINATION}', proto: udp, reach: [a1], hold: u}}");
    let text = format!("{{name: x, about: y, steps: [{{flows: [{hold}, {{from: a2, send: u, {keys}}}]}}]}}");
    let flow = text.parse::<Case>().unwrap().steps.remove(0).flows.remove(1);
    check_action(&flow, &Observation::Attempts(vec![one]))
}

#[test]
fn or_error_accepts_a_prompt_error_but_not_silence() {
    assert_eq!(check_send("reach: [b1], or_error: true", b1()), Ok(()));
    assert_eq!(check_send("reach: [b1], or_error: true", failed(FailureKind::Refused)), Ok(()));
    assert_eq!(check_send("reach: [b1], or_error: true", failed(FailureKind::Unreachable)), Ok(()));
    assert!(check_send("reach: [b1], or_error: true", failed(FailureKind::TimedOut)).is_err());
    assert!(check_send("reach: [b1], or_error: true", a1()).is_err());
    assert!(check_send("reach: [b1]", failed(FailureKind::Refused)).is_err());
}

#[test]
fn flows_by_chance_or_on_open_connections_are_not_repeated() {
    let connect_flow = |keys: &str| {
        flow(&format!("from: a2, to: '{DESTINATION}', proto: tcp, reach: [{}] {keys}", Host::A1))
    };
    assert!(is_repeatable(&connect_flow("")));
    assert!(!is_repeatable(&connect_flow(", hold: x")));
    assert!(!is_repeatable(&connect_flow(", sticky: true")));
    assert!(!is_repeatable(&connect_flow(", share: [0, 1]")));
}
