//! All requests of a start, in order. docs/differences.md shows them beside kube-proxy's.

use anyhow::Result;
use proxy_userspace::{
    net::ProxyVariables,
    watch::{ApiSource, ignore_api_requests, kube_client},
};
use shunt_tests::apiserver::{Fault, Request, Verb};

use super::{
    connections::kubeconfig,
    scene::{Scene, objects, patient, server_with},
    tls_server::TlsServer,
};

const SERVICES: &str = "fieldSelector=spec.clusterIP%21%3DNone\
    &labelSelector=%21service.kubernetes.io%2Fservice-proxy-name";
const SLICES: &str = "labelSelector=%21service.kubernetes.io%2Fheadless";
const NODES: &str = "fieldSelector=metadata.name%3Dnode1";

/// Returns path and query with `N` for the random duration of a watch and the version it starts from.
fn target(request: &Request) -> String {
    let mut target = request.target.clone();
    if let Some(seconds) = request.query.get("timeoutSeconds") {
        let number: u32 = seconds.parse().expect("a number of seconds");
        assert!((300..600).contains(&number), "{number} s");
        target = target.replace(&format!("timeoutSeconds={seconds}"), "timeoutSeconds=N");
    }
    match request.query.get("resourceVersion") {
        None | Some("0") => target,
        Some(version) => target.replace(&format!("resourceVersion={version}"), "resourceVersion=N"),
    }
}

/// Starts a source, and returns the targets of all requests up to its sync and the first watches.
async fn requests_of_a_start(is_streaming: bool) -> Result<Vec<String>> {
    let server = server_with(&objects()).await?;
    if !is_streaming {
        server.inject_fault(None, Some(Verb::WatchList), Fault::RefuseStreaming, usize::MAX);
    }
    let tls = TlsServer::start(server.address(), &["h2", "http/1.1"]).await?;
    let file = kubeconfig(&tls.url(), "token: t")?;
    let client =
        kube_client(Some(file.path()), &[], &ProxyVariables::default(), &ignore_api_requests()).await?;
    let source = ApiSource::new(client, "node1").with_timing(patient()).with_service_cidrs();
    let mut scene = Scene::with_source(server, source);
    scene.synced().await?;
    if !is_streaming {
        for kind in ["services", "endpointslices", "nodes", "servicecidrs"] {
            scene.requested(kind, Verb::Watch, 1).await?;
        }
    }
    assert_eq!(tls.connections(), 1);
    let requests = scene.server.requests();
    for Request { headers, .. } in &requests {
        let header = |name: &str| headers.get(name).map_or("", String::as_str);
        assert_eq!(header("accept"), "application/vnd.kubernetes.protobuf, application/json");
        assert_eq!(header("accept-encoding"), "gzip");
        assert_eq!(header("authorization"), "Bearer t");
        assert!(header("user-agent").starts_with("shunt/"), "{headers:?}");
    }
    Ok(requests.iter().map(target).collect())
}

#[tokio::test]
async fn a_start_streams_each_kind_once() -> Result<()> {
    let stream = |path: &str, selectors: &str| {
        format!(
            "{path}?allowWatchBookmarks=true{selectors}&resourceVersionMatch=NotOlderThan\
             &sendInitialEvents=true&timeoutSeconds=N&watch=true"
        )
    };
    let expected = [
        stream("/api/v1/nodes", &format!("&{NODES}")),
        stream("/api/v1/services", &format!("&{SERVICES}")),
        stream("/apis/discovery.k8s.io/v1/endpointslices", &format!("&{SLICES}")),
        stream("/apis/networking.k8s.io/v1/servicecidrs", ""),
    ];
    assert_eq!(requests_of_a_start(true).await?, expected);
    Ok(())
}

#[tokio::test]
async fn a_start_without_streaming_lists_each_kind_once_from_the_cache() -> Result<()> {
    let mut requests = requests_of_a_start(false).await?;
    let kinds = [
        ("/api/v1/services", format!("&{SERVICES}")),
        ("/apis/discovery.k8s.io/v1/endpointslices", format!("&{SLICES}")),
        ("/api/v1/nodes", format!("&{NODES}")),
        ("/apis/networking.k8s.io/v1/servicecidrs", String::new()),
    ];
    for (path, selectors) in kinds {
        let (of_kind, others): (Vec<_>, Vec<_>) =
            requests.into_iter().partition(|target| target.starts_with(&format!("{path}?")));
        requests = others;
        let list = format!("{selectors}&limit=500&resourceVersion=0");
        let expected = [
            format!(
                "{path}?allowWatchBookmarks=true{selectors}&resourceVersionMatch=NotOlderThan\
                 &sendInitialEvents=true&timeoutSeconds=N&watch=true"
            ),
            format!("{path}?{}", list.trim_start_matches('&')),
            format!(
                "{path}?allowWatchBookmarks=true{selectors}&resourceVersion=N&timeoutSeconds=N&watch=true"
            ),
        ];
        assert_eq!(of_kind, expected);
    }
    assert!(requests.is_empty(), "{requests:?}");
    Ok(())
}
