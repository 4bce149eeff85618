//! The pages as a browser gets them.

use axum::{
    body::{Body, to_bytes},
    http::{HeaderMap, Request, StatusCode, header},
};
use tower::ServiceExt as _;

use super::{services::SearchForm, *};
use crate::{
    health::{NodeReport, ReportedMap},
    inspect::{FoundServices, LeftOutRow, NamedPort, NodeDetails, PodFinder, ServiceDetails, ServiceRow},
    sync::NoAnswer,
};

const MARKUP: &str = "<script>alert(1)</script>";
const ESCAPED: &str = "&lt;script&gt;alert(1)&lt;/script&gt;";

/// The pages of a process whose sync loop does not run.
fn pages() -> Pages {
    Pages::new(NodeInspector::without_loop(), NodeEvents::default())
}

async fn ask(pages: Pages, method: &str, path: &str, host: &str) -> (StatusCode, HeaderMap, String) {
    let request = Request::builder().method(method).uri(path).header(header::HOST, host);
    let request = request.body(Body::empty()).expect("a request");
    let Ok(answer) = routes(pages).oneshot(request).await;
    let (head, body) = answer.into_parts();
    let body = to_bytes(body, usize::MAX).await.expect("the whole body");
    (head.status, head.headers, String::from_utf8(body.into()).expect("text"))
}

async fn get(path: &str) -> (StatusCode, String) {
    let (status, _, body) = ask(pages(), "GET", path, "localhost:10249").await;
    (status, body)
}

fn service(name: &str) -> ServiceRow {
    ServiceRow {
        port: NamedPort {
            namespace: "shop".to_owned(),
            name: name.to_owned(),
            port_name: "http".to_owned(),
            protocol: "TCP".to_owned(),
            family: "IPv4".to_owned(),
        },
        addresses: Vec::new(),
        internal_traffic_policy: "Cluster".to_owned(),
        external_traffic_policy: "Local".to_owned(),
        affinity_seconds: None,
        balance: "random".into(),
        source_ranges: Vec::new(),
        eligible_endpoints: 1,
        total_endpoints: 2,
        counts: None,
        programmed: None,
        left_out: None,
        drift: None,
    }
}

#[tokio::test]
async fn a_page_may_load_nothing_and_run_only_its_own_script() {
    let (status, headers, body) = ask(pages(), "GET", "/ui/", "127.0.0.1:10249").await;
    let value = |name: &str| headers[name].to_str().expect("text").to_owned();
    assert_eq!(status, StatusCode::OK);
    let policy = value("content-security-policy");
    assert!(
        policy.starts_with("default-src 'none'; style-src 'sha256-") && !policy.contains("unsafe"),
        "{policy}"
    );
    assert_eq!(
        (value("x-content-type-options"), value("cache-control")),
        ("nosniff".into(), "no-store".into())
    );
    assert_eq!((body.matches("<script").count(), body.matches("<style").count()), (1, 1), "{body}");
    assert!(!body.contains("http://") && !body.contains("https://") && !body.contains(" style="), "{body}");
}

#[tokio::test]
async fn pages_are_only_read() {
    let (status, headers, body) = ask(pages(), "HEAD", "/ui/", "[::1]:10249").await;
    assert_eq!((status, body.as_str()), (StatusCode::OK, ""));
    assert!(headers.contains_key("content-security-policy"));
    for method in ["POST", "PUT", "DELETE", "PATCH"] {
        for path in ["/ui/", "/ui/services", "/ui/services/a/b", "/ui/maps", "/ui/events"] {
            let (status, ..) = ask(pages(), method, path, "localhost").await;
            assert_eq!(status, StatusCode::METHOD_NOT_ALLOWED, "{method} {path}");
        }
    }
}

#[tokio::test]
async fn only_addresses_and_localhost_are_names_of_the_server() {
    for host in ["localhost", "LOCALHOST:10249", "127.0.0.1:10249", "[fd00::1]:80", "192.0.2.1"] {
        assert_eq!(ask(pages(), "GET", "/ui/", host).await.0, StatusCode::OK, "{host}");
    }
    for host in ["attacker.example", "localhost.attacker.example:10249", "127.0.0.1.nip.io", "", "a@b c"] {
        let (status, _, body) = ask(pages(), "GET", "/ui/events", host).await;
        assert_eq!(status, StatusCode::FORBIDDEN, "{host}");
        assert!(body.contains("IP address or to") && !body.contains("Last"), "{body}");
    }
}

#[tokio::test]
async fn while_no_loop_runs_the_pages_say_so() {
    let (status, body) = get("/ui/").await;
    assert!(status == StatusCode::OK && body.contains("shunt starts"), "{body}");
    for path in ["/ui/services", "/ui/services/shop/web", "/ui/maps"] {
        let (status, body) = get(path).await;
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{path}");
        assert!(body.contains(&NoAnswer::NotRunning.to_string()), "{path}: {body}");
    }
    assert_eq!(get("/ui/events").await.0, StatusCode::OK);
}

#[tokio::test]
async fn a_page_that_is_not_there_is_missing() {
    assert_eq!(get("/ui/nothing").await.0, StatusCode::NOT_FOUND);
    assert_eq!(get("/ui/services/only-a-namespace").await.0, StatusCode::NOT_FOUND);
    assert_eq!(get("/ui").await.0, StatusCode::PERMANENT_REDIRECT);
}

#[tokio::test]
async fn pages_do_not_use_the_right_to_read_pods() {
    let pods = PodFinder::new(|_| async { panic!("the API server is asked") });
    let node = NodeInspector { pods, ..NodeInspector::without_loop() };
    let Pages { node, .. } = Pages::new(node, NodeEvents::default());
    let name = NamespacedName::parse("kube-system", "dns-0").expect("valid");
    let error = node.pods.find(name).await.expect_err("refused");
    assert!(error.contains("shunt explain"), "{error}");
}

#[tokio::test]
async fn texts_cannot_be_markup() {
    let with_event = pages();
    with_event.events.warning("Broke", MARKUP);
    let (_, _, body) = ask(with_event, "GET", "/ui/events", "localhost").await;
    assert!(body.contains(ESCAPED) && !body.contains(MARKUP), "{body}");
    let report = NodeReport { failing: vec![MARKUP.to_owned()], ..NodeReport::default() };
    let left_out = LeftOutRow {
        port: service("web").port,
        reason: "rejected".to_owned(),
        message: format!("cannot {MARKUP}"),
    };
    let details = NodeDetails { left_out: vec![left_out], ..NodeDetails::default() };
    let page = node::page(&report, Ok(&details)).into_string();
    assert!(page.matches(ESCAPED).count() == 2 && !page.contains(MARKUP), "{page}");
    let form: SearchForm = serde_urlencoded::from_str(&format!("search=\"{MARKUP}")).expect("a query");
    let page = services::page(&form, &FoundServices::default()).into_string();
    assert!(page.contains(&format!("value=\"&quot;{ESCAPED}\"")) && !page.contains(MARKUP), "{page}");
    let question: Question =
        serde_urlencoded::from_str(&format!("from={MARKUP}&to={MARKUP}")).expect("a query");
    let error = question.request().expect("a question").expect_err("wrong");
    let page = service::page("shop", "web", &ServiceDetails::default(), &question, Some(Err(&error)));
    let page = page.into_string();
    assert!(page.contains(ESCAPED) && !page.contains(MARKUP), "{page}");
}

#[test]
fn a_long_list_has_pages_that_keep_the_search() {
    let page = |query: &str, found| {
        let form: SearchForm = serde_urlencoded::from_str(query).expect("a query");
        services::page(&form, &FoundServices { rows: vec![service("web"), service("api")], found })
            .into_string()
    };
    let second = page("search=we%26b&page=2", 250);
    assert!(second.contains("101 to 102 of 250 service ports"), "{second}");
    assert!(second.contains("href=\"services?search=we%26b&amp;page=1\""), "{second}");
    assert!(second.contains("href=\"services?search=we%26b&amp;page=3\""), "{second}");
    assert!(second.contains("href=\"services/shop/web\""), "{second}");
    assert!(!page("", 2).contains("next") && page("page=no", 2).contains("1 to 2 of 2"));
    assert!(page("page=99999999999999999999", 2).contains("1 to 2"), "no number means the first page");
}

#[test]
fn the_fullest_map_comes_first() {
    let map = |name: &str, entries| ReportedMap { name: name.to_owned(), entries, capacity: 200 };
    let page = maps::page(&[map("services", 10), map("flows", 190)], Some("ebpf")).into_string();
    let at = |text: &str| page.find(text).expect("it is shown");
    assert!(at("flows") < at("services") && page.contains("95.0 %"), "{page}");
    let page = maps::page(&[], Some("nftables")).into_string();
    assert!(page.contains("The mode nftables has no maps"), "{page}");
}

#[test]
fn an_empty_form_asks_nothing() {
    assert!(Question::default().request().is_none());
    let wrong: Question = serde_urlencoded::from_str("from=10.0.0&to=10.0.0.1:80").expect("a query");
    let error = wrong.request().expect("a question").expect_err("wrong");
    assert!(error.contains("10.0.0 must be node, the address of the client, or a pod"), "{error}");
}
