//! Tests the routes over real HTTP on loopback.

use std::{
    collections::BTreeMap,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
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
    dataplane::DisplacedLink,
    metrics::Metrics,
    model::{HealthCheck, IpFamily, NamespacedName},
    node::NodeEvents,
};

const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const TIMEOUT: Duration = Duration::from_mins(1);

struct Answer {
    status: u16,
    headers: String,
    body: String,
}

impl Answer {
    /// Returns the headers of the answer itself, without those of the connection.
    fn own_headers(&self) -> Vec<&str> {
        let connection_headers = ["content-length:", "date:", "connection:"];
        let own = self
            .headers
            .lines()
            .skip(1)
            .filter(|line| !connection_headers.iter().any(|name| line.starts_with(name)));
        let mut own: Vec<_> = own.collect();
        own.sort_unstable();
        own
    }

    /// Returns the body with `TIME` in place of each RFC 3339 time.
    fn without_times(&self) -> String {
        let parts = self.body.split('"').map(|part| if part.ends_with('Z') { "TIME" } else { part });
        parts.collect::<Vec<_>>().join("\"")
    }

    fn json(&self) -> Value {
        serde_json::from_str(&self.body).expect("the body is JSON")
    }
}

async fn get(address: SocketAddr, path: &str) -> io::Result<Answer> {
    request(address, "GET", path).await
}

async fn request(address: SocketAddr, method: &str, path: &str) -> io::Result<Answer> {
    let mut stream = TcpStream::connect(address).await?;
    let text = format!("{method} {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    stream.write_all(text.as_bytes()).await?;
    let mut answer = String::new();
    timeout(TIMEOUT, stream.read_to_string(&mut answer)).await??;
    let (head, body) = answer.split_once("\r\n\r\n").ok_or(io::ErrorKind::InvalidData)?;
    let status =
        head.split(' ').nth(1).and_then(|code| code.parse().ok()).ok_or(io::ErrorKind::InvalidData)?;
    Ok(Answer { status, headers: head.to_lowercase(), body: body.to_owned() })
}

/// Requests `/` until the answer is accepted, for at most [`TIMEOUT`].
async fn eventually(
    address: SocketAddr,
    is_accepted: impl Fn(&io::Result<Answer>) -> bool,
) -> io::Result<Answer> {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let answer = get(address, "/").await;
        if is_accepted(&answer) || Instant::now() > deadline {
            return answer;
        }
        sleep(Duration::from_millis(10)).await;
    }
}

fn start(routes: axum::Router) -> SocketAddr {
    let listener = bind("test", SocketAddr::new(LOOPBACK, 0)).expect("a free port");
    let address = listener.local_addr().expect("a bound address");
    tokio::spawn(server::run(listener, routes, server::SERVER));
    address
}

fn start_healthz() -> (ProxyHealth, Metrics, SocketAddr) {
    let health = ProxyHealth::new(TIMEOUT);
    let metrics = Metrics::default();
    let address = start(healthz_routes(health.clone(), metrics.clone(), Status::default()));
    (health, metrics, address)
}

#[tokio::test]
async fn healthz_is_503_until_the_first_full_sync_and_livez_is_200() {
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

/// `json.Marshal` of `ProxyHealth` in upstream's `proxy_health.go`, and its headers.
#[tokio::test]
async fn healthz_and_livez_answer_byte_by_byte_as_upstream() {
    const HEADERS: [&str; 2] = ["content-type: application/json", "x-content-type-options: nosniff"];
    let (health, _, address) = start_healthz();
    let answer = get(address, "/livez").await.unwrap();
    assert_eq!(answer.without_times(), r#"{"lastUpdated":"TIME","currentTime":"TIME","healthy":true}"#);
    health.updated(&[IpFamily::V6]);
    let answer = get(address, "/healthz").await.unwrap();
    let expected = concat!(
        r#"{"lastUpdated":"TIME","currentTime":"TIME","nodeEligible":false,"healthy":true,"#,
        r#""status":{"IPv6":{"lastUpdated":"TIME","healthy":true}}}"#,
    );
    assert_eq!((answer.status, answer.without_times().as_str()), (503, expected));
    assert_eq!(answer.json()["lastUpdated"], answer.json()["status"]["IPv6"]["lastUpdated"]);
    health.updated(&[IpFamily::V4]);
    for (method, status) in [("GET", 200), ("POST", 200)] {
        let answer = request(address, method, "/healthz").await.unwrap();
        let expected = concat!(
            r#"{"lastUpdated":"TIME","currentTime":"TIME","nodeEligible":true,"healthy":true,"status":"#,
            r#"{"IPv4":{"lastUpdated":"TIME","healthy":true},"IPv6":{"lastUpdated":"TIME","healthy":true}}}"#,
        );
        assert_eq!((answer.status, answer.without_times().as_str()), (status, expected));
        assert_eq!(answer.own_headers(), HEADERS);
    }
    assert_eq!(get(address, "/other").await.unwrap().status, 404);
}

#[tokio::test]
async fn healthz_names_displaced_links_and_unreadable_manifests_and_stays_200() {
    let (health, status) = (ProxyHealth::new(TIMEOUT), Status::default());
    let address = start(healthz_routes(health.clone(), Metrics::default(), status.clone()));
    health.updated(&IpFamily::ALL);
    let displaced = DisplacedLink { link: "eth0".into(), by: "cni_ingress".into() };
    status.set_links_displaced(vec![displaced]);
    let answer = get(address, "/healthz").await.unwrap();
    assert_eq!((answer.status, &answer.json()["displacedLinks"]), (200, &json!(["eth0 by cni_ingress"])));
    status.set_links_displaced(Vec::new());
    assert_eq!(get(address, "/healthz").await.unwrap().json().get("displacedLinks"), None);
    status.set_unreadable_manifests(vec!["a.yaml: no".into()]);
    let answer = get(address, "/healthz").await.unwrap();
    assert_eq!((answer.status, &answer.json()["unreadableManifests"]), (200, &json!(["a.yaml: no"])));
}

#[tokio::test]
async fn a_node_that_is_being_deleted_is_live_but_not_healthy() {
    let (health, _, address) = start_healthz();
    health.updated(&IpFamily::ALL);
    health.set_node(NodeObject::Deleting);
    let answer = get(address, "/healthz").await.unwrap();
    assert_eq!((answer.status, &answer.json()["nodeEligible"]), (503, &json!(false)));
    let answer = get(address, "/livez").await.unwrap();
    assert_eq!((answer.status, answer.json().get("nodeEligible")), (200, None));
}

#[tokio::test(start_paused = true)]
async fn an_overdue_change_makes_healthz_and_livez_fail() {
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
async fn an_overdue_family_is_reported_alone_and_fails_both_pages() {
    let health = ProxyHealth::new(TIMEOUT);
    health.updated(&[IpFamily::V4]);
    assert!(!health.is_programmed(), "IPv6 was not updated");
    health.updated(&[IpFamily::V6]);
    health.queued(&[IpFamily::V6]);
    sleep(TIMEOUT).await;
    health.updated(&[IpFamily::V4]);
    let report = serde_json::to_value(health.healthz()).expect("JSON");
    assert!(!health.healthz().ok && !health.livez().ok);
    let healthy = ["IPv4", "IPv6"].map(|family| report["status"][family]["healthy"].clone());
    assert_eq!(healthy, [json!(true), json!(false)], "{report}");
}

#[tokio::test(start_paused = true)]
async fn a_part_that_fails_ends_healthz_and_not_livez() {
    let health = ProxyHealth::new(TIMEOUT);
    health.updated(&IpFamily::ALL);
    health.part_failed();
    sleep(TIMEOUT).await;
    let healthy = |report| serde_json::to_value(report).expect("JSON")["healthy"].clone();
    assert_eq!((health.healthz().ok, healthy(health.healthz())), (false, json!(false)));
    assert_eq!((health.livez().ok, healthy(health.livez())), (true, json!(true)));
    assert!(!health.is_healthy(), "load balancers with policy Local choose another node too");
}

#[tokio::test(start_paused = true)]
async fn a_first_sync_that_takes_long_does_not_end_livez() {
    let health = ProxyHealth::new(TIMEOUT);
    health.queued(&IpFamily::ALL);
    sleep(2 * TIMEOUT).await;
    assert!(health.livez().ok && !health.healthz().ok);
}

fn ebpf_metrics() -> Metrics {
    let metrics = Metrics::default();
    metrics.set_mode("ebpf", "as configured");
    metrics
}

#[tokio::test]
async fn the_metrics_server_has_metrics_slis_proxy_mode_and_healthz() {
    let address = start(metrics_routes(&ebpf_metrics()));
    let metrics = get(address, "/metrics").await.unwrap();
    assert_eq!(metrics.status, 200);
    assert!(metrics.headers.contains("content-type: text/plain; version=0.0.4"), "{}", metrics.headers);
    assert!(metrics.body.contains("kubeproxy_sync_proxy_rules_duration_seconds_count"), "{}", metrics.body);
    let indicators = get(address, "/metrics/slis").await.unwrap();
    assert_eq!(
        (indicators.status, indicators.body.contains("kubeproxy")),
        (200, false),
        "{}",
        indicators.body
    );
    let mode = get(address, "/proxyMode").await.unwrap();
    assert_eq!((mode.status, mode.body.as_str()), (200, "ebpf"));
    for (path, body) in [
        ("/healthz", "ok"),
        ("/healthz/ping", "ok"),
        ("/healthz?verbose", "[+]ping ok\nhealthz check passed\n"),
        ("/healthz?verbose=1&verbose", "[+]ping ok\nhealthz check passed\n"),
    ] {
        let answer = get(address, path).await.unwrap();
        assert_eq!((answer.status, answer.body.as_str()), (200, body), "{path}");
    }
    let indicators = get(address, "/metrics/slis").await.unwrap().body;
    let ping = "kubernetes_healthcheck{name=\"ping\",type=\"healthz\"} 1";
    assert!(indicators.lines().any(|line| line == ping), "{indicators}");
}

#[tokio::test]
async fn an_address_in_use_is_an_error_or_is_retried() {
    let taken = bind("test", SocketAddr::new(LOOPBACK, 0)).unwrap();
    let address = taken.local_addr().unwrap();
    let routes = metrics_routes(&ebpf_metrics());
    let (events, mut sent) = NodeEvents::channel();
    let error = serve(HttpServer::Metrics, address, routes.clone(), true, &events).await.unwrap_err();
    assert_eq!(error.to_string(), format!("cannot listen on {address} for metrics"));
    let event = sent.try_recv().expect("an Event");
    assert_eq!((event.reason, event.is_warning), ("FailedToStartMetricServer", true));
    let note =
        format!("cannot listen on {address} for metrics: Address already in use (os error 98); shunt ends");
    assert!(event.note.starts_with(&note), "{}", event.note);
    let retrying = async move { serve(HttpServer::Healthz, address, routes, false, &events).await };
    let serving = tokio::spawn(retrying);
    sleep(Duration::from_millis(50)).await;
    drop(taken);
    assert_eq!(eventually(address, Result::is_ok).await.unwrap().status, 404);
    assert!(sent.try_recv().is_err(), "a former process had just not ended");
    serving.abort();
}

#[tokio::test(start_paused = true)]
async fn an_address_in_use_gives_one_event_after_half_a_minute() {
    let taken = bind("test", SocketAddr::new(LOOPBACK, 0)).unwrap();
    let address = taken.local_addr().unwrap();
    let (events, mut sent) = NodeEvents::channel();
    let routes = metrics_routes(&ebpf_metrics());
    let retrying = async move { serve(HttpServer::Healthz, address, routes, false, &events).await };
    let serving = tokio::spawn(retrying);
    sleep(Duration::from_secs(29)).await;
    assert!(sent.try_recv().is_err(), "it is too early");
    sleep(Duration::from_secs(2)).await;
    assert_eq!(sent.try_recv().map(|event| event.reason), Ok("FailedToStartProxierHealthcheck"));
    sleep(Duration::from_mins(5)).await;
    assert!(sent.try_recv().is_err(), "one for all attempts");
    serving.abort();
}

#[tokio::test]
async fn a_wildcard_address_serves_both_families() {
    let listener = bind("test", SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(server::run(listener, metrics_routes(&ebpf_metrics()), server::SERVER));
    for address in ["127.0.0.1", "::1"] {
        let address = SocketAddr::new(address.parse().unwrap(), port);
        assert_eq!(get(address, "/proxyMode").await.unwrap().body, "ebpf", "{address}");
    }
}

/// Returns a port that was free a moment ago.
fn free_port() -> NonZeroU16 {
    let listener = std::net::TcpListener::bind((LOOPBACK, 0)).expect("a free port");
    NonZeroU16::new(listener.local_addr().expect("a bound address").port()).expect("ports are not zero")
}

fn checks(entries: &[(&str, NonZeroU16, usize)]) -> HealthChecks {
    let checks = entries.iter().map(|(name, port, local_endpoints)| {
        let check = HealthCheck { port: *port, local_endpoints: *local_endpoints };
        ((NamespacedName::parse("default", name).expect("valid"), IpFamily::V4), check)
    });
    HealthChecks { checks: checks.collect(), listen_on: on_addresses([LOOPBACK]) }
}

fn on_addresses<const N: usize>(addresses: [IpAddr; N]) -> BTreeMap<IpFamily, ListenOn> {
    [(IpFamily::V4, ListenOn::Addresses(addresses.into()))].into()
}

fn no_events() -> PortFailureEvents {
    PortFailureEvents { events: NodeEvents::default(), node_name: "n1".into() }
}

#[tokio::test]
async fn a_health_check_port_in_use_gives_one_event_on_its_service() {
    let taken = bind("somebody else", SocketAddr::new(LOOPBACK, 0)).expect("a free port");
    let port = NonZeroU16::new(taken.local_addr().expect("an address").port()).expect("not zero");
    let (events, mut queued) = NodeEvents::channel();
    let mut checks = checks(&[("web", port, 2)]);
    // Two addresses, one Event.
    checks.listen_on = on_addresses([LOOPBACK, IpAddr::from([127, 0, 0, 2])]);
    let other = bind("somebody else", SocketAddr::new(IpAddr::from([127, 0, 0, 2]), port.get()));
    let checks_sender = watch::Sender::new(checks);
    let port_failures = PortFailureEvents { events, node_name: "n1".into() };
    tokio::spawn(serve_health_checks(checks_sender.subscribe(), ProxyHealth::new(TIMEOUT), port_failures));
    let event = timeout(TIMEOUT, queued.recv()).await.expect("an Event is queued").expect("the proxy runs");
    assert_eq!(event.service, Some(NamespacedName::new("default", "web")));
    assert!(event.is_warning && event.reason == "FailedToStartServiceHealthcheck", "{event:?}");
    let note =
        format!("node n1 failed to start healthcheck \"default/web\" on port {port}: Address already in use");
    assert!(event.note.starts_with(&note), "{}", event.note);
    drop((taken, other));
    let answer = eventually(SocketAddr::new(LOOPBACK, port.get()), Result::is_ok).await.unwrap();
    assert_eq!(answer.status, 200, "the port is opened when it is free");
    assert!(queued.try_recv().is_err(), "one Event is queued");
}

#[tokio::test]
async fn many_ports_in_use_give_one_event_each_and_lose_no_node_event() {
    const SERVICES: usize = 40;
    const NODE_EVENTS: usize = 8;
    let taken: Vec<_> = (0..SERVICES)
        .map(|_| bind("somebody else", SocketAddr::new(LOOPBACK, 0)).expect("a free port"))
        .collect();
    let ports = taken.iter().map(|listener| listener.local_addr().expect("an address").port());
    let named: Vec<_> = ports.enumerate().map(|(index, port)| (format!("web-{index}"), port)).collect();
    let entries = named.iter().map(|(name, port)| (&**name, NonZeroU16::new(*port).expect("not zero"), 1));
    let (events, mut queued) = NodeEvents::channel();
    let checks_sender = watch::Sender::new(checks(&entries.collect::<Vec<_>>()));
    let port_failures = PortFailureEvents { events: events.clone(), node_name: "n1".into() };
    tokio::spawn(serve_health_checks(checks_sender.subscribe(), ProxyHealth::new(TIMEOUT), port_failures));
    let mut services = std::collections::BTreeSet::new();
    let mut node_events = 0;
    while services.len() + node_events < SERVICES + NODE_EVENTS {
        let event =
            timeout(TIMEOUT, queued.recv()).await.expect("an Event is queued").expect("the proxy runs");
        // The queue is now full of Events of Services.
        if services.is_empty() {
            (0..NODE_EVENTS).for_each(|_| events.normal("Starting", ""));
        }
        match event.service {
            Some(service) => assert!(services.insert(service.clone()), "two Events for {service}"),
            None => node_events += 1,
        }
        // Triggers a retry.
        checks_sender.send_modify(|_| {});
    }
    assert!(queued.try_recv().is_err(), "one Event for each Service");
}

#[tokio::test]
async fn health_check_node_ports_report_local_endpoints_and_open_and_close() {
    let health = ProxyHealth::new(TIMEOUT);
    let port = free_port();
    let address = SocketAddr::new(LOOPBACK, port.get());
    let checks_sender = watch::Sender::new(checks(&[("a", port, 2)]));
    tokio::spawn(serve_health_checks(checks_sender.subscribe(), health.clone(), no_events()));
    let answer = eventually(address, Result::is_ok).await.unwrap();
    assert_eq!(answer.status, 200);
    assert!(answer.headers.contains("x-load-balancing-endpoint-weight: 2"), "{}", answer.headers);
    let service = json!({ "namespace": "default", "name": "a" });
    assert_eq!(
        answer.json(),
        json!({ "service": service, "localEndpoints": 2, "serviceProxyHealthy": true })
    );

    checks_sender.send_replace(checks(&[("a", port, 0)]));
    let answer =
        eventually(address, |answer| answer.as_ref().is_ok_and(|answer| answer.status == 503)).await.unwrap();
    assert_eq!((answer.status, &answer.json()["localEndpoints"]), (503, &json!(0)));

    // The port moves to another Service in the same update.
    checks_sender.send_replace(checks(&[("b", port, 1)]));
    let is_b =
        |answer: &io::Result<Answer>| answer.as_ref().is_ok_and(|answer| answer.body.contains("\"b\""));
    assert_eq!(eventually(address, is_b).await.unwrap().status, 200);

    let mut idle = TcpStream::connect(address).await.unwrap();
    checks_sender.send_replace(checks(&[]));
    let is_refused = |answer: &io::Result<Answer>| {
        answer.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
    };
    assert!(is_refused(&eventually(address, is_refused).await), "the port is closed");
    let end = timeout(TIMEOUT, idle.read(&mut [0; 16])).await.expect("idle connections are closed");
    assert_eq!(end.unwrap_or(0), 0);
}

/// As upstream: Go listens in both families on `0.0.0.0`.
#[tokio::test]
async fn a_health_check_port_on_all_addresses_answers_in_both_families() {
    let port = free_port();
    let [v4, v6] = [LOOPBACK, Ipv6Addr::LOCALHOST.into()].map(|ip| SocketAddr::new(ip, port.get()));
    let in_families = |families: &[(IpFamily, usize)]| {
        let check = |local_endpoints| HealthCheck { port, local_endpoints };
        let web = NamespacedName::new("default", "web");
        let checks = families.iter().map(|(family, count)| ((web.clone(), *family), check(*count)));
        HealthChecks { checks: checks.collect(), listen_on: BTreeMap::new() }
    };
    let checks_sender = watch::Sender::default();
    tokio::spawn(serve_health_checks(checks_sender.subscribe(), ProxyHealth::new(TIMEOUT), no_events()));
    for (families, expected) in [
        (&[(IpFamily::V4, 1)][..], [1, 1]),
        (&[(IpFamily::V6, 2)], [2, 2]),
        // The families count separately.
        (&[(IpFamily::V4, 3), (IpFamily::V6, 4)], [3, 4]),
        (&[(IpFamily::V4, 5)], [5, 5]),
    ] {
        checks_sender.send_replace(in_families(families));
        for (address, count) in [v4, v6].into_iter().zip(expected) {
            let weight = format!("x-load-balancing-endpoint-weight: {count}");
            let has_weight = |answer: &io::Result<Answer>| {
                answer.as_ref().is_ok_and(|answer| answer.headers.contains(&weight))
            };
            assert!(has_weight(&eventually(address, has_weight).await), "{address}: {weight}");
        }
    }
}

/// What `hcHandler.ServeHTTP` of upstream's `service_health.go` writes.
#[tokio::test]
async fn a_health_check_node_port_answers_byte_by_byte_as_upstream() {
    let port = free_port();
    let address = SocketAddr::new(LOOPBACK, port.get());
    let checks_sender = watch::Sender::new(checks(&[("web", port, 2)]));
    tokio::spawn(serve_health_checks(checks_sender.subscribe(), ProxyHealth::new(TIMEOUT), no_events()));
    eventually(address, Result::is_ok).await.unwrap();
    for (method, path) in [("GET", "/"), ("GET", "/healthz?any=thing"), ("POST", "/")] {
        let answer = request(address, method, path).await.unwrap();
        let expected = "{\n\t\"service\": {\n\t\t\"namespace\": \"default\",\n\t\t\"name\": \"web\"\n\t},\n\t\"localEndpoints\": 2,\n\t\"serviceProxyHealthy\": true\n}";
        assert_eq!((answer.status, answer.body.as_str()), (200, expected));
        let headers = [
            "content-type: application/json",
            "x-content-type-options: nosniff",
            "x-load-balancing-endpoint-weight: 2",
        ];
        assert_eq!(answer.own_headers(), headers);
    }
}

#[tokio::test]
async fn a_health_check_node_port_fails_while_the_proxy_is_not_live() {
    let health = ProxyHealth::new(Duration::ZERO);
    health.updated(&IpFamily::ALL);
    health.queued(&IpFamily::ALL);
    let port = free_port();
    let checks_sender = watch::Sender::new(checks(&[("a", port, 2)]));
    tokio::spawn(serve_health_checks(checks_sender.subscribe(), health, no_events()));
    let answer = eventually(SocketAddr::new(LOOPBACK, port.get()), Result::is_ok).await.unwrap();
    assert_eq!((answer.status, &answer.json()["serviceProxyHealthy"]), (503, &json!(false)));
}
