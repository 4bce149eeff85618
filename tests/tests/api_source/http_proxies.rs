//! The API server behind proxies. Its name, `api.test`, has no address, so only a proxy reaches it.

use std::io::Write as _;

use anyhow::{Context as _, Result};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use proxy_userspace::{
    net::ProxyVariables,
    watch::{ApiSource, WatchStatus, ignore_api_requests, kube_client},
};
use shunt_tests::apiserver::ApiServer;
use tempfile::NamedTempFile;

use super::{
    proxy_server::{Dialect, ProxyServer},
    scene::{Scene, objects, patient, quick, server_with, service},
    tls_server::{CERTIFICATE, TlsServer},
};

const SERVER: &str = "api.test:6443";
/// `user:p@ss` in base64, in the head of a request in lower case.
const AUTHORIZATION: &str = "\r\nproxy-authorization: basic dxnlcjpwqhnz\r\n";

/// Returns a server with objects, and TLS with HTTP/2 in front of it.
async fn server_with_tls() -> Result<(ApiServer, TlsServer)> {
    let server = server_with(&objects()).await?;
    let tls = TlsServer::start(server.address(), &["h2", "http/1.1"]).await?;
    Ok((server, tls))
}

/// Writes a kubeconfig for [`SERVER`].
fn kubeconfig(proxy_url: &str) -> Result<NamedTempFile> {
    let mut file = NamedTempFile::new()?;
    let certificate = STANDARD.encode(CERTIFICATE);
    write!(
        file,
        "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts: [{{name: c, context: {{cluster: c}}}}]\n\
        clusters: [{{name: c, cluster: {{server: 'https://{SERVER}', proxy-url: '{proxy_url}', \
        certificate-authority-data: {certificate}}}}}]\n"
    )?;
    Ok(file)
}

/// Watches `server` with a kubeconfig that has this proxy.
async fn watching(server: ApiServer, proxy_url: &str) -> Result<Scene> {
    let source = source(proxy_url, &ProxyVariables::default()).await?;
    Ok(Scene::with_source(server, source.with_timing(patient())))
}

async fn source(proxy_url: &str, proxies: &ProxyVariables) -> Result<ApiSource> {
    let file = kubeconfig(proxy_url)?;
    Ok(ApiSource::new(kube_client(Some(file.path()), &[], proxies, &ignore_api_requests()).await?, "node1"))
}

fn variables(name: &'static str, value: &str) -> ProxyVariables {
    ProxyVariables::read(|asked| (asked == name).then(|| value.to_owned()))
}

/// Waits for all objects and one change of them.
async fn check_objects(scene: &mut Scene) -> Result<()> {
    scene.synced().await?;
    scene.server.put(service("web", 81))?;
    scene.port("web", 81).await
}

/// Asserts that all watches share one connection, through a tunnel with credentials.
fn assert_tunnels(proxy: &ProxyServer) {
    let requests = proxy.requests();
    assert_eq!(requests.len(), 1, "{requests:?}");
    for request in requests {
        assert!(
            request.starts_with("CONNECT api.test:6443 HTTP/1.1\r\nHost: api.test:6443\r\n"),
            "{request}"
        );
        assert!(request.to_lowercase().contains(AUTHORIZATION), "{request}");
        assert!(!request.contains("/api"), "{request}");
    }
}

#[tokio::test]
async fn objects_come_through_the_proxy_of_the_kubeconfig() -> Result<()> {
    let (server, tls) = server_with_tls().await?;
    let proxy = ProxyServer::start(Dialect::Http, tls.address).await?;
    let mut scene = watching(server, &format!("http://user:p%40ss@{}", proxy.address)).await?;
    check_objects(&mut scene).await?;
    assert_tunnels(&proxy);
    Ok(())
}

#[tokio::test]
async fn objects_come_through_a_proxy_with_tls() -> Result<()> {
    let (server, tls) = server_with_tls().await?;
    let proxy = ProxyServer::start(Dialect::Http, tls.address).await?;
    let outside = TlsServer::start(proxy.address, &["h2", "http/1.1"]).await?;
    let mut scene = watching(server, &format!("https://user:p%40ss@{}", outside.address)).await?;
    check_objects(&mut scene).await?;
    assert_tunnels(&proxy);
    Ok(())
}

#[tokio::test]
async fn objects_come_through_the_proxy_of_the_environment() -> Result<()> {
    let (server, tls) = server_with_tls().await?;
    let proxy = ProxyServer::start(Dialect::Http, tls.address).await?;
    let value = format!("user:p%40ss@{}", proxy.address);
    let source = source("", &variables("HTTPS_PROXY", &value)).await?;
    let mut scene = Scene::with_source(server, source.with_timing(patient()));
    check_objects(&mut scene).await?;
    assert_tunnels(&proxy);
    Ok(())
}

#[tokio::test]
async fn objects_come_through_a_socks_proxy() -> Result<()> {
    let (server, tls) = server_with_tls().await?;
    let proxy = ProxyServer::start(Dialect::Socks5, tls.address).await?;
    let mut scene = watching(server, &format!("socks5://user:p%40ss@{}", proxy.address)).await?;
    check_objects(&mut scene).await?;
    let requests = proxy.requests();
    assert_eq!(requests.len(), 1, "{requests:?}");
    // Version 5, connect, and a name, which the proxy resolves.
    assert!(requests.iter().all(|request| request == "[5, 1, 0, 3] user:p@ss api.test:6443"), "{requests:?}");
    Ok(())
}

#[tokio::test]
async fn requests_to_a_server_without_tls_are_forwarded() -> Result<()> {
    let server = server_with(&objects()).await?;
    let proxy = ProxyServer::start(Dialect::Http, server.address()).await?;
    let proxies = variables("http_proxy", &format!("http://user:p%40ss@{}", proxy.address));
    let client =
        kube_client(None, &["http://api.test:8080".to_owned()], &proxies, &ignore_api_requests()).await?;
    let source = ApiSource::new(client, "node1").with_timing(patient());
    let mut scene = Scene::with_source(server, source);
    check_objects(&mut scene).await?;
    let requests = proxy.requests();
    assert!(!requests.is_empty());
    for request in requests {
        assert!(request.starts_with("GET http://api.test:8080/api"), "{request}");
        assert!(request.contains("\r\nhost: api.test:8080\r\n"), "{request}");
        assert!(request.to_lowercase().contains(AUTHORIZATION), "{request}");
    }
    Ok(())
}

#[tokio::test]
async fn a_refusing_proxy_is_named_and_tried_again() -> Result<()> {
    let (server, tls) = server_with_tls().await?;
    let proxy = ProxyServer::start(Dialect::Http, tls.address).await?;
    let url = format!("http://user:p%40ss@{}", proxy.address);
    let source = source(&url, &ProxyVariables::default()).await?;
    let name = format!("cannot connect through the proxy http://***@{}", proxy.address);
    proxy.refuse(Some("407 Proxy Authentication Required"));
    let mut scene = Scene::with_source(server, source.with_timing(quick()));
    for status in ["407 Proxy Authentication Required", "502 Bad Gateway"] {
        proxy.refuse(Some(status));
        let error = error(&mut scene, status).await?;
        assert!(error.contains(&name), "{error}");
        assert!(!error.contains("p@ss") && !error.contains("p%40ss"), "{error}");
    }
    proxy.refuse(None);
    check_objects(&mut scene).await
}

#[tokio::test]
async fn an_unreachable_proxy_is_named_with_the_cause() -> Result<()> {
    for (scheme, dialect) in [("http", Dialect::Http), ("socks5", Dialect::Socks5)] {
        let server = server_with(&[]).await?;
        // The port of a proxy that has ended.
        let proxy = ProxyServer::start(dialect, server.address()).await?.address;
        let mut scene = watching(server, &format!("{scheme}://{proxy}")).await?;
        let error = error(&mut scene, "Connection refused").await?;
        assert!(error.contains(&format!("through the proxy {scheme}://{proxy}: ")), "{error}");
    }
    Ok(())
}

/// Waits until the watch of Services fails with an error that contains `text`.
async fn error(scene: &mut Scene, text: &str) -> Result<String> {
    let contains =
        |status: &WatchStatus| status.services.last_error.as_ref().is_some_and(|error| error.contains(text));
    let status = scene.status(contains).await.with_context(|| format!("{text:?}: {:?}", scene.status))?;
    status.services.last_error.context("an error")
}
