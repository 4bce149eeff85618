//! The endpoints over real HTTP on loopback.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    num::NonZeroU16,
    time::Duration,
};

use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    sync::watch,
    time::{Instant, sleep, timeout},
};

use super::*;
use crate::{
    metrics::Metrics,
    model::{HealthCheck, IpFamily, NamespacedName},
};

const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const TIMEOUT: Duration = Duration::from_mins(1);

struct Answer {
    status: u16,
    headers: String,
    body: String,
}

impl Answer {
    fn json(&self) -> Value {
        serde_json::from_str(&self.body).expect("the body is JSON")
    }
}

async fn get(address: SocketAddr, path: &str) -> io::Result<Answer> {
    let mut stream = TcpStream::connect(address).await?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut text = String::new();
    timeout(Duration::from_secs(10), stream.read_to_string(&mut text)).await??;
    let (head, body) = text.split_once("\r\n\r\n").ok_or(io::ErrorKind::InvalidData)?;
    let status =
        head.split(' ').nth(1).and_then(|code| code.parse().ok()).ok_or(io::ErrorKind::InvalidData)?;
    Ok(Answer { status, headers: head.to_lowercase(), body: body.to_owned() })
}

/// Asks until the answer is as wanted, for ten seconds at most.
async fn eventually(address: SocketAddr, wanted: impl Fn(&io::Result<Answer>) -> bool) -> io::Result<Answer> {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        let answer = get(address, "/").await;
        if wanted(&answer) || Instant::now() > deadline {
            return answer;
        }
        sleep(Duration::from_millis(10)).await;
    }
}

fn start(routes: axum::Router) -> SocketAddr {
    let listener = bind("test", SocketAddr::new(LOOPBACK, 0)).expect("a free port");
    let address = listener.local_addr().expect("a bound address");
    tokio::spawn(axum::serve(listener, routes).into_future());
    address
}

fn start_healthz() -> (ProxyHealth, Metrics, SocketAddr) {
    let health = ProxyHealth::new(TIMEOUT);
    let metrics = Metrics::default();
    let address = start(healthz_routes(health.clone(), metrics.clone()));
    (health, metrics, address)
}

#[tokio::test]
async fn healthz_turns_200_with_the_first_full_sync_and_livez_is_200_from_the_start() {
    let (health, metrics, address) = start_healthz();
    let answer = get(address, "/healthz").await.unwrap();
    assert_eq!(answer.status, 503);
    assert_eq!(answer.json()["nodeEligible"], json!(false));
    assert_eq!(answer.json()["lastUpdated"], json!("0001-01-01T00:00:00Z"));
    assert_eq!(get(address, "/livez").await.unwrap().status, 200);
    health.updated(&IpFamily::ALL);
    let answer = get(address, "/healthz").await.unwrap();
    assert_eq!(answer.status, 200);
    assert!(answer.headers.contains("content-type: application/json"), "{}", answer.headers);
    assert!(answer.headers.contains("x-content-type-options: nosniff"), "{}", answer.headers);
    let body = answer.json();
    assert_eq!((&body["nodeEligible"], &body["healthy"]), (&json!(true), &json!(true)));
    assert_eq!(body["lastUpdated"], body["currentTime"]);
    assert_eq!(body["status"]["IPv6"]["healthy"], json!(true));
    let (_, text) = metrics.exposition().encode(None).unwrap();
    assert!(text.contains("kubeproxy_proxy_healthz_total{code=\"503\"} 1\n"), "{text}");
    assert!(text.contains("kubeproxy_proxy_livez_total{code=\"200\"} 1\n"), "{text}");
}

#[tokio::test]
async fn a_node_that_is_being_deleted_is_live_but_not_healthy() {
    let (health, _, address) = start_healthz();
    health.updated(&IpFamily::ALL);
    health.set_node_being_deleted(true);
    let answer = get(address, "/healthz").await.unwrap();
    assert_eq!((answer.status, &answer.json()["nodeEligible"]), (503, &json!(false)));
    let answer = get(address, "/livez").await.unwrap();
    assert_eq!((answer.status, answer.json().get("nodeEligible")), (200, None));
}

#[tokio::test(start_paused = true)]
async fn a_change_that_waits_too_long_makes_both_unhealthy() {
    let health = ProxyHealth::new(TIMEOUT);
    health.updated(&IpFamily::ALL);
    health.queued(&IpFamily::ALL);
    sleep(TIMEOUT / 2).await;
    health.queued(&IpFamily::ALL);
    assert!(health.is_live());
    sleep(TIMEOUT / 2).await;
    assert!(!health.livez().ok && !health.healthz().ok, "the oldest change counts");
    health.updated(&IpFamily::ALL);
    assert!(health.livez().ok && health.healthz().ok);
}

#[tokio::test(start_paused = true)]
async fn each_family_tells_of_itself_and_one_that_waits_too_long_makes_the_whole_unhealthy() {
    let health = ProxyHealth::new(TIMEOUT);
    health.updated(&[IpFamily::V4]);
    assert!(!health.is_programmed(), "IPv6 was not");
    health.updated(&[IpFamily::V6]);
    health.queued(&[IpFamily::V6]);
    sleep(TIMEOUT).await;
    health.updated(&[IpFamily::V4]);
    let report = serde_json::to_value(health.healthz()).expect("JSON");
    assert!(!health.healthz().ok && !health.livez().ok);
    let healthy = ["IPv4", "IPv6"].map(|family| report["status"][family]["healthy"].clone());
    assert_eq!(healthy, [json!(true), json!(false)], "{report}");
}

fn of_ebpf() -> Metrics {
    let metrics = Metrics::default();
    metrics.set_mode("ebpf", "as configured");
    metrics
}

#[tokio::test]
async fn the_metrics_server_answers_metrics_proxy_mode_and_healthz() {
    let address = start(metrics_routes(&of_ebpf()));
    let metrics = get(address, "/metrics").await.unwrap();
    assert_eq!(metrics.status, 200);
    assert!(metrics.headers.contains("content-type: text/plain; version=0.0.4"), "{}", metrics.headers);
    assert!(metrics.body.contains("kubeproxy_sync_proxy_rules_duration_seconds_count"), "{}", metrics.body);
    let mode = get(address, "/proxyMode").await.unwrap();
    assert_eq!((mode.status, mode.body.as_str()), (200, "ebpf"));
    assert_eq!(get(address, "/healthz").await.unwrap().body, "ok");
}

#[tokio::test]
async fn an_address_that_is_taken_is_reported_or_waited_for() {
    let taken = bind("test", SocketAddr::new(LOOPBACK, 0)).unwrap();
    let address = taken.local_addr().unwrap();
    let routes = metrics_routes(&of_ebpf());
    let error = serve("metrics", address, routes.clone(), true).await.unwrap_err();
    assert_eq!(error.to_string(), format!("cannot listen on {address} for metrics"));
    let serving = tokio::spawn(async move { serve("metrics", address, routes, false).await });
    sleep(Duration::from_millis(50)).await;
    drop(taken);
    assert_eq!(eventually(address, Result::is_ok).await.unwrap().status, 404);
    serving.abort();
}

#[tokio::test]
async fn a_wildcard_address_answers_in_both_families() {
    let listener = bind("test", SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(axum::serve(listener, metrics_routes(&of_ebpf())).into_future());
    for address in ["127.0.0.1", "::1"] {
        let address = SocketAddr::new(address.parse().unwrap(), port);
        assert_eq!(get(address, "/proxyMode").await.unwrap().body, "ebpf", "{address}");
    }
}

/// A port that was free a moment ago.
fn free_port() -> NonZeroU16 {
    let listener = std::net::TcpListener::bind((LOOPBACK, 0)).expect("a free port");
    NonZeroU16::new(listener.local_addr().expect("a bound address").port()).expect("ports are not zero")
}

fn checks(entries: &[(&str, NonZeroU16, usize)]) -> HealthChecks {
    let checks = entries.iter().map(|(name, port, local_endpoints)| {
        let check = HealthCheck { port: *port, local_endpoints: *local_endpoints };
        ((NamespacedName::new("default", *name), IpFamily::V4), check)
    });
    HealthChecks { checks: checks.collect(), listen_on: ListenOn::Addresses([LOOPBACK].into()) }
}

#[tokio::test]
async fn health_check_node_ports_tell_of_local_endpoints_and_come_and_go() {
    let health = ProxyHealth::new(TIMEOUT);
    let port = free_port();
    let address = SocketAddr::new(LOOPBACK, port.get());
    let wanted = watch::Sender::new(checks(&[("a", port, 2)]));
    tokio::spawn(answer_health_checks(wanted.subscribe(), health.clone()));
    let answer = eventually(address, Result::is_ok).await.unwrap();
    assert_eq!(answer.status, 200);
    assert!(answer.headers.contains("x-load-balancing-endpoint-weight: 2"), "{}", answer.headers);
    let service = json!({ "namespace": "default", "name": "a" });
    assert_eq!(
        answer.json(),
        json!({ "service": service, "localEndpoints": 2, "serviceProxyHealthy": true })
    );

    wanted.send_replace(checks(&[("a", port, 0)]));
    let answer =
        eventually(address, |answer| answer.as_ref().is_ok_and(|answer| answer.status == 503)).await.unwrap();
    assert_eq!((answer.status, &answer.json()["localEndpoints"]), (503, &json!(0)));

    // The port goes to another Service in the same step.
    wanted.send_replace(checks(&[("b", port, 1)]));
    let is_b =
        |answer: &io::Result<Answer>| answer.as_ref().is_ok_and(|answer| answer.body.contains("\"b\""));
    assert_eq!(eventually(address, is_b).await.unwrap().status, 200);

    let mut idle = TcpStream::connect(address).await.unwrap();
    wanted.send_replace(checks(&[]));
    let is_refused = |answer: &io::Result<Answer>| {
        answer.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
    };
    assert!(is_refused(&eventually(address, is_refused).await), "the port is closed");
    let end =
        timeout(Duration::from_secs(10), idle.read(&mut [0; 16])).await.expect("idle connections are closed");
    assert_eq!(end.unwrap_or(0), 0);
}

#[tokio::test]
async fn a_health_check_node_port_fails_while_the_proxy_is_not_live() {
    let health = ProxyHealth::new(Duration::ZERO);
    health.queued(&IpFamily::ALL);
    let port = free_port();
    let wanted = watch::Sender::new(checks(&[("a", port, 2)]));
    tokio::spawn(answer_health_checks(wanted.subscribe(), health));
    let answer = eventually(SocketAddr::new(LOOPBACK, port.get()), Result::is_ok).await.unwrap();
    assert_eq!((answer.status, &answer.json()["serviceProxyHealthy"]), (503, &json!(false)));
}
