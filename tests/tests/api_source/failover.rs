//! Several addresses of the API server, of which one is reachable but does not serve.

use std::time::Duration;

use anyhow::{Context as _, Result};
use proxy_userspace::{
    model::DsrAnnouncement,
    net::ProxyVariables,
    watch::{ApiSource, Timing, WatchStatus, announce_dsr, ignore_api_requests, kube_client},
};
use shunt_tests::apiserver::{ApiServer, Fault, Verb};
use tokio::{sync::watch, time::timeout};

use super::{
    connections::kubeconfig,
    scene::{DEADLINE, Scene, objects, patient, quick, server_with, service},
    tls_server::TlsServer,
};

/// A server with the objects of the tests. Each request meets this fault.
async fn failing(fault: Fault) -> Result<ApiServer> {
    let server = server_with(&objects()).await?;
    server.inject_fault(None, None, fault, usize::MAX);
    Ok(server)
}

/// Watches through a failing and a healthy address until all is listed. Returns what watches, and
/// the failing server. Which address comes first is random.
async fn synced_beside(fault: Fault, protocol: &str, timing: Timing) -> Result<(Scene, ApiServer)> {
    let (broken, healthy) = (failing(fault).await?, server_with(&objects()).await?);
    let first = TlsServer::start(broken.address(), &[protocol]).await?;
    let second = TlsServer::start(healthy.address(), &[protocol]).await?;
    let file = kubeconfig("https://kubeconfig.test", "token: t")?;
    let urls = [first.url(), second.url()];
    let client =
        kube_client(Some(file.path()), &urls, &ProxyVariables::default(), &ignore_api_requests()).await?;
    let mut scene = Scene::with_source(healthy, ApiSource::new(client, "node1").with_timing(timing));
    scene.synced().await?;
    scene.server.put(service("web", 81))?;
    scene.port("web", 81).await?;
    Ok((scene, broken))
}

#[tokio::test]
async fn an_address_that_answers_with_errors_is_left_at_once() -> Result<()> {
    for protocol in ["h2", "http/1.1"] {
        let mut was_asked = false;
        // The first address is random: in 20 starts, each is the first one of some.
        for _ in 0..20 {
            let slow_retries = Timing { first_retry: Duration::from_mins(1), ..patient() };
            let (scene, broken) = synced_beside(Fault::InternalError, protocol, slow_retries).await?;
            assert_eq!(scene.status.borrow().services.last_error, None, "{protocol}");
            was_asked |= !broken.requests().is_empty();
        }
        assert!(was_asked, "{protocol}");
    }
    Ok(())
}

#[tokio::test]
async fn an_address_that_does_not_answer_is_left() -> Result<()> {
    for fault in [Fault::Hang, Fault::HangAfterHead] {
        for _ in 0..4 {
            let (scene, _broken) = synced_beside(fault, "h2", quick()).await?;
            drop(scene);
        }
    }
    Ok(())
}

#[tokio::test]
async fn errors_of_all_addresses_are_reported_and_retried_with_pauses() -> Result<()> {
    let servers = [failing(Fault::InternalError).await?, failing(Fault::InternalError).await?];
    let urls = servers.each_ref().map(ApiServer::url);
    let client = kube_client(None, &urls, &ProxyVariables::default(), &ignore_api_requests()).await?;
    let timing =
        Timing { first_retry: Duration::from_mins(1), last_retry: Duration::from_mins(1), ..patient() };
    let source = ApiSource::new(client, "node1").with_timing(timing);
    let mut scene = Scene::with_source(server_with(&[]).await?, source);
    let failed = |status: &WatchStatus| {
        [&status.services, &status.endpoint_slices, &status.nodes]
            .iter()
            .all(|kind| kind.last_error.is_some())
    };
    let error = scene.status(failed).await?.services.last_error.context("an error")?;
    assert!(error.contains("the API server returned an error (500)"), "{error}");
    tokio::time::sleep(Duration::from_millis(300)).await;
    for kind in ["services", "endpointslices", "nodes"] {
        let requests = servers.iter().flat_map(ApiServer::requests);
        assert_eq!(
            requests.filter(|request| request.plural == kind).count(),
            2,
            "{kind}: one for each address"
        );
    }
    Ok(())
}

#[tokio::test]
async fn watches_of_an_address_that_is_left_go_on() -> Result<()> {
    for protocol in ["h2", "http/1.1"] {
        let servers = [server_with(&objects()).await?, server_with(&objects()).await?];
        let tls = [
            TlsServer::start(servers[0].address(), &[protocol]).await?,
            TlsServer::start(servers[1].address(), &[protocol]).await?,
        ];
        let file = kubeconfig("https://kubeconfig.test", "token: t")?;
        let urls = tls.each_ref().map(TlsServer::url);
        let client =
            kube_client(Some(file.path()), &urls, &ProxyVariables::default(), &ignore_api_requests()).await?;
        let source = ApiSource::new(client.clone(), "node1").with_timing(patient());
        let mut scene = Scene::with_source(server_with(&[]).await?, source);
        scene.synced().await?;
        let used = tls.iter().position(|tls| tls.connections() > 0).context("a connection")?;
        servers[used].inject_fault(None, Some(Verb::Patch), Fault::Unavailable, usize::MAX);
        let addresses = vec!["192.0.2.11:4790".parse()?];
        let announcement = DsrAnnouncement { addresses, ..DsrAnnouncement::default() };
        let (wanted, receiver) = watch::channel(Some(announcement));
        let announcing = tokio::spawn(async move { announce_dsr(&client, "node1", quick(), receiver).await });
        let patched = async {
            while !servers[1 - used].requests().iter().any(|request| request.verb == Verb::Patch) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(DEADLINE, patched).await.context("the other address gets the next attempt")?;
        drop(wanted);
        announcing.await?;
        // The watches stay where they are.
        servers[used].put(service("web", 81))?;
        scene.port("web", 81).await?;
        let watches = servers[1 - used].requests().into_iter().filter(|request| request.verb != Verb::Patch);
        assert_eq!(watches.count(), 0, "{protocol}");
    }
    Ok(())
}
