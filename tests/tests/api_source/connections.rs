//! The connections to the API server: one for all watches, and the next address when it breaks.

use std::{io::Write as _, time::Duration};

use anyhow::{Context as _, Result};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use proxy_userspace::{
    net::ProxyVariables,
    watch::{ApiSource, Timing, ignore_api_requests, kube_client},
};
use shunt_tests::apiserver::{ApiServer, Fault, Interruption, Verb};
use tempfile::NamedTempFile;
use tokio::time::Instant;

use super::{
    scene::{DEADLINE, Scene, many_services, objects, patient, quick, server_with, service},
    tls_server::{CERTIFICATE, TlsServer},
};

/// Writes a kubeconfig for a server with the certificate of the tests. `user` is YAML.
pub(crate) fn kubeconfig(server: &str, user: &str) -> Result<NamedTempFile> {
    let mut file = NamedTempFile::new()?;
    let certificate = STANDARD.encode(CERTIFICATE);
    write!(
        file,
        "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
        contexts: [{{name: c, context: {{cluster: c, user: u}}}}]\n\
        clusters: [{{name: c, cluster: {{server: '{server}', certificate-authority-data: {certificate}}}}}]\n\
        users: [{{name: u, user: {{{user}}}}}]\n"
    )?;
    Ok(file)
}

/// Watches `server` through these addresses.
pub(crate) async fn watching(
    server: ApiServer,
    urls: &[String],
    user: &str,
    timing: Timing,
) -> Result<Scene> {
    let file = kubeconfig("https://kubeconfig.test", user)?;
    let client =
        kube_client(Some(file.path()), urls, &ProxyVariables::default(), &ignore_api_requests()).await?;
    Ok(Scene::with_source(server, ApiSource::new(client, "node1").with_timing(timing)))
}

#[tokio::test]
async fn all_watches_share_one_connection() -> Result<()> {
    let server = server_with(&objects()).await?;
    let tls = TlsServer::start(server.address(), &["h2", "http/1.1"]).await?;
    let mut scene = watching(server, &[tls.url()], "token: t", patient()).await?;
    scene.synced().await?;
    for times in 1..4 {
        scene.watch_again(times).await?;
    }
    assert_eq!(tls.connections(), 1);
    // After the connection breaks, all watches share the next one.
    tls.cut();
    scene.requested("nodes", Verb::Watch, 4).await?;
    scene.requested("services", Verb::Watch, 4).await?;
    scene.server.put(service("web", 81))?;
    scene.port("web", 81).await?;
    assert_eq!(tls.connections(), 2);
    assert_eq!(scene.requests("services", Verb::WatchList).len(), 1);
    Ok(())
}

#[tokio::test]
async fn a_connection_that_hangs_gets_no_more_requests() -> Result<()> {
    // A connection is set up in less time, even on a machine with much other load.
    let hanging = Timing { idle: DEADLINE, response: Duration::from_secs(8), ..quick() };
    for (fault, connections, timing) in [
        (Fault::Hang, 2, hanging),
        (Fault::HangAfterHead, 2, hanging),
        (Fault::Unavailable, 2, patient()),
        (Fault::InternalError, 1, patient()),
    ] {
        let server = server_with(&objects()).await?;
        server.inject_fault(Some("services"), Some(Verb::WatchList), fault, 1);
        let tls = TlsServer::start(server.address(), &["h2"]).await?;
        let mut scene = watching(server, &[tls.url()], "token: t", timing).await?;
        scene.synced().await?;
        assert_eq!(tls.connections(), connections, "{fault:?}");
        assert_eq!(scene.requests("nodes", Verb::WatchList).len(), 1, "its other responses go on");
    }
    Ok(())
}

#[tokio::test]
async fn a_silent_watch_is_continued_on_another_connection() -> Result<()> {
    let server = server_with(&objects()).await?;
    let tls = TlsServer::start(server.address(), &["h2"]).await?;
    let mut scene = watching(server, &[tls.url()], "token: t", quick()).await?;
    scene.synced().await?;
    scene.server.interrupt(Interruption::Stall);
    scene.server.put(service("web", 81))?;
    scene.port("web", 81).await?;
    assert!(tls.connections() > 1);
    Ok(())
}

#[tokio::test]
async fn a_server_without_http2_gets_a_connection_for_each_watch() -> Result<()> {
    let server = server_with(&objects()).await?;
    let tls = TlsServer::start(server.address(), &["http/1.1"]).await?;
    let mut scene = watching(server, &[tls.url()], "token: t", patient()).await?;
    scene.synced().await?;
    for times in 1..4 {
        scene.watch_again(times).await?;
    }
    assert_eq!(tls.connections(), 3);
    Ok(())
}

#[tokio::test]
async fn large_lists_are_compressed() -> Result<()> {
    let server = server_with(&many_services(1500)).await?;
    server.inject_fault(None, Some(Verb::WatchList), Fault::RefuseStreaming, usize::MAX);
    let mut scene = Scene::watching(server, patient()).await?;
    scene.synced().await?;
    assert_eq!(scene.services.len(), 1500);
    let list = scene.requests("services", Verb::List).pop().context("a list")?;
    assert_eq!(list.headers.get("accept-encoding").map(String::as_str), Some("gzip"));
    Ok(())
}

#[tokio::test]
async fn another_address_takes_over_within_ten_seconds() -> Result<()> {
    for is_frozen in [true, false] {
        // A machine that stands still adds to the time.
        let mut last = Duration::MAX;
        for _ in 0..3 {
            if last > TAKEN_OVER_WITHIN {
                last = time_of_takeover(is_frozen).await?;
            }
        }
        assert!(last < TAKEN_OVER_WITHIN, "{last:?}");
    }
    Ok(())
}

const TAKEN_OVER_WITHIN: Duration = Duration::from_secs(10);

/// Returns how long changes do not arrive after an address has frozen or is gone.
async fn time_of_takeover(is_frozen: bool) -> Result<Duration> {
    let server = server_with(&objects()).await?;
    let mut tls = Vec::new();
    for _ in 0..3 {
        tls.push(TlsServer::start(server.address(), &["h2", "http/1.1"]).await?);
    }
    let urls: Vec<_> = tls.iter().map(TlsServer::url).collect();
    let timing = Timing { response: DEADLINE, idle: DEADLINE, ..Timing::default() };
    let mut scene = watching(server, &urls, "token: t", timing).await?;
    scene.synced().await?;
    let used = tls.iter().position(|tls| tls.connections() == 1).context("a connection")?;
    tokio::time::sleep(timing.settled).await;
    let began = Instant::now();
    if is_frozen {
        // The next address is dead too.
        tls[used].freeze();
        tls[(used + 1) % 3].freeze();
    } else {
        tls.remove(used);
    }
    scene.server.put(service("web", 81))?;
    scene.port("web", 81).await?;
    let took = began.elapsed();
    assert_eq!(scene.requests("services", Verb::WatchList).len(), 1, "the watch continues");
    Ok(took)
}

#[tokio::test]
async fn an_address_that_refuses_connections_is_skipped_at_the_start() -> Result<()> {
    for _ in 0..4 {
        let server = server_with(&objects()).await?;
        let dead = server_with(&[]).await?.url();
        let urls = [dead, server.url()];
        let client = kube_client(None, &urls, &ProxyVariables::default(), &ignore_api_requests()).await?;
        let source = ApiSource::new(client, "node1").with_timing(patient());
        let mut scene = Scene::with_source(server, source);
        scene.synced().await?;
        assert_eq!(scene.status.borrow().services.last_error, None);
    }
    Ok(())
}

#[tokio::test]
async fn each_address_is_named_if_none_answers() -> Result<()> {
    let server = server_with(&[]).await?;
    let (first, second) = (server_with(&[]).await?.url(), server_with(&[]).await?.url());
    let client = kube_client(
        None,
        &[first.clone(), second.clone()],
        &ProxyVariables::default(),
        &ignore_api_requests(),
    )
    .await?;
    let mut scene = Scene::with_source(server, ApiSource::new(client, "node1").with_timing(patient()));
    let status = scene.status(|status| status.services.last_error.is_some()).await?;
    let error = status.services.last_error.context("an error")?;
    assert!(error.contains(&first) && error.contains(&second), "{error}");
    assert!(error.contains("Connection refused"), "{error}");
    Ok(())
}
