//! Credentials that are replaced while the source runs.

use std::{fs, path::Path, time::Duration};

use anyhow::{Context as _, Result};
use proxy_userspace::{
    model::NamespacedName,
    net::ProxyVariables,
    watch::{ApiSource, KindStatus, ObjectReader, Timing, ignore_api_requests, kube_client},
};
use shunt_tests::apiserver::{Fault, Verb};
use tempfile::TempDir;

use super::{
    connections::{kubeconfig, watching},
    scene::{Scene, objects, patient, quick, server_with, service},
    tls_server::{CLIENTS, TlsServer},
};

/// Writes a certificate and its key to two files.
fn write_identity(directory: &Path, pem: &str) -> Result<()> {
    let (certificate, key) = pem.split_once("-----BEGIN PRIVATE").context("certificate and key")?;
    fs::write(directory.join("tls.crt"), certificate)?;
    fs::write(directory.join("tls.key"), format!("-----BEGIN PRIVATE{key}"))?;
    Ok(())
}

/// Writes a plugin that returns the status in the file `status`, after as many seconds as the file
/// `delay` says, and counts its runs in `runs`.
fn write_plugin(directory: &Path) -> Result<String> {
    use std::os::unix::fs::PermissionsExt as _;

    let plugin = directory.join("plugin");
    let text = r#"#!/bin/sh
cd "$(dirname "$0")" || exit 1
echo "$KUBERNETES_EXEC_INFO $COLOUR $1" >> runs
if [ -e delay ]; then sleep "$(cat delay)"; fi
echo '{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status":'
cat status
echo '}'
"#;
    fs::write(&plugin, text)?;
    fs::set_permissions(&plugin, fs::Permissions::from_mode(0o755))?;
    Ok(format!(
        "exec: {{apiVersion: client.authentication.k8s.io/v1, command: {}, args: [blue], \
        env: [{{name: COLOUR, value: green}}], interactiveMode: IfAvailable, provideClusterInfo: true}}",
        plugin.display()
    ))
}

fn runs(directory: &Path) -> Vec<String> {
    let text = fs::read_to_string(directory.join("runs")).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

/// Watches with the certificate of the first client, which is in a file of this directory.
async fn watching_with_certificate_in(directory: &Path) -> Result<(Scene, TlsServer)> {
    write_identity(directory, CLIENTS[0])?;
    let server = server_with(&objects()).await?;
    let tls = TlsServer::start(server.address(), &["h2"]).await?;
    let path = directory.display();
    let user = format!("client-certificate: {path}/tls.crt, client-key: {path}/tls.key");
    let mut scene = watching(server, &[tls.url()], &user, patient()).await?;
    scene.synced().await?;
    Ok((scene, tls))
}

#[tokio::test]
async fn a_new_connection_has_the_client_certificate_of_the_moment() -> Result<()> {
    let directory = TempDir::new()?;
    let (mut scene, tls) = watching_with_certificate_in(directory.path()).await?;
    write_identity(directory.path(), CLIENTS[1])?;
    tls.cut();
    scene.server.put(service("web", 81))?;
    scene.port("web", 81).await?;
    // While the files cannot be used, the last certificate stays.
    fs::write(directory.path().join("tls.key"), "")?;
    tls.cut();
    scene.server.put(service("web", 82))?;
    scene.port("web", 82).await?;
    assert_eq!(tls.clients()?, [Some(0), Some(1), Some(1)]);
    Ok(())
}

#[tokio::test]
async fn a_rejected_client_certificate_is_read_from_its_files_again() -> Result<()> {
    let directory = TempDir::new()?;
    let (scene, tls) = watching_with_certificate_in(directory.path()).await?;
    write_identity(directory.path(), CLIENTS[1])?;
    scene.server.inject_fault(Some("services"), Some(Verb::Watch), Fault::Unauthorized, 1);
    scene.watch_again(1).await?;
    scene.requested("services", Verb::Watch, 2).await?;
    assert_eq!(tls.clients()?, [Some(0), Some(1)]);
    Ok(())
}

#[tokio::test]
async fn a_rejected_token_is_read_from_its_file_again() -> Result<()> {
    let directory = TempDir::new()?;
    let file = directory.path().join("token");
    fs::write(&file, "one\n")?;
    let server = server_with(&objects()).await?;
    server.require_token("one");
    let tls = TlsServer::start(server.address(), &["h2"]).await?;
    let user = format!("tokenFile: {}", file.display());
    let mut scene = watching(server, &[tls.url()], &user, patient()).await?;
    scene.synced().await?;
    scene.server.require_token("two");
    fs::write(&file, "two\n")?;
    scene.watch_again(1).await?;
    scene.server.put(service("web", 81))?;
    scene.port("web", 81).await?;
    assert_eq!(tls.connections(), 1);
    Ok(())
}

#[tokio::test]
async fn a_plugin_runs_once_and_again_after_a_rejection() -> Result<()> {
    let directory = TempDir::new()?;
    let user = write_plugin(directory.path())?;
    let status = directory.path().join("status");
    fs::write(&status, r#"{"token": "one"}"#)?;
    let server = server_with(&objects()).await?;
    server.require_token("one");
    let tls = TlsServer::start(server.address(), &["h2"]).await?;
    let mut scene = watching(server, &[tls.url()], &user, patient()).await?;
    scene.synced().await?;
    let first = runs(directory.path());
    assert_eq!(first.len(), 1, "{first:?}");
    let input = first[0].strip_suffix(" green blue").context("a variable and an argument")?;
    let input: serde_json::Value = serde_json::from_str(input)?;
    assert_eq!(input["spec"]["interactive"], false);
    assert_eq!(input["spec"]["cluster"]["server"], format!("{}/", tls.url()));
    assert!(input["spec"]["cluster"]["certificate-authority-data"].is_string(), "{input}");
    scene.server.require_token("two");
    fs::write(&status, r#"{"token": "two"}"#)?;
    scene.watch_again(1).await?;
    scene.server.put(service("web", 81))?;
    scene.port("web", 81).await?;
    assert_eq!(runs(directory.path()).len(), 2);
    Ok(())
}

#[tokio::test]
async fn a_plugin_runs_again_when_its_credentials_have_expired() -> Result<()> {
    let directory = TempDir::new()?;
    let user = write_plugin(directory.path())?;
    let status = directory.path().join("status");
    fs::write(&status, r#"{"token": "one", "expirationTimestamp": "2001-01-01T00:00:00Z"}"#)?;
    let server = server_with(&objects()).await?;
    let tls = TlsServer::start(server.address(), &["h2"]).await?;
    let mut scene = watching(server, &[tls.url()], &user, patient()).await?;
    scene.synced().await?;
    assert_eq!(runs(directory.path()).len(), 3);
    fs::write(&status, r#"{"token": "two", "expirationTimestamp": "2901-01-01T00:00:00Z"}"#)?;
    scene.watch_again(1).await?;
    assert_eq!(runs(directory.path()).len(), 4);
    let request = scene.requests("services", Verb::Watch).pop().context("a watch")?;
    assert_eq!(request.headers.get("authorization").map(String::as_str), Some("Bearer two"));
    Ok(())
}

#[tokio::test]
async fn a_slow_plugin_may_take_longer_than_a_response() -> Result<()> {
    let directory = TempDir::new()?;
    let user = write_plugin(directory.path())?;
    fs::write(directory.path().join("status"), r#"{"token": "one"}"#)?;
    fs::write(directory.path().join("delay"), "1.5")?;
    let server = server_with(&objects()).await?;
    server.require_token("one");
    let tls = TlsServer::start(server.address(), &["h2"]).await?;
    let mut scene = watching(server, &[tls.url()], &user, quick()).await?;
    scene.synced().await?;
    assert_eq!(runs(directory.path()).len(), 1);
    Ok(())
}

#[tokio::test]
async fn a_failure_of_the_plugin_is_not_one_of_the_server() -> Result<()> {
    let directory = TempDir::new()?;
    let user = write_plugin(directory.path())?;
    let server = server_with(&objects()).await?;
    let tls = TlsServer::start(server.address(), &["h2"]).await?;
    let timing = Timing { first_retry: Duration::from_mins(1), ..patient() };
    let mut scene = watching(server, &[tls.url()], &user, timing).await?;
    let status = scene.status(|status| status.services.last_error.is_some()).await?;
    let error = status.services.last_error.context("an error")?;
    let start = "there are no credentials for the API server: the credential plugin /";
    assert!(error.starts_with(start) && error.ends_with("its answer has no status"), "{error}");
    scene
        .status(|status| status.nodes.last_error.is_some() && status.endpoint_slices.last_error.is_some())
        .await?;
    assert_eq!(runs(directory.path()).len(), 1, "all kinds wait for the same run");
    Ok(())
}

/// Makes the plugin return this client certificate.
fn write_plugin_identity(directory: &Path, pem: &str, expires: &str) -> Result<()> {
    let (certificate, key) = pem.split_once("-----BEGIN PRIVATE").context("certificate and key")?;
    let status = serde_json::json!({
        "clientCertificateData": certificate,
        "clientKeyData": format!("-----BEGIN PRIVATE{key}"),
        "expirationTimestamp": expires,
    });
    Ok(fs::write(directory.join("status"), status.to_string())?)
}

#[tokio::test]
async fn a_new_client_certificate_of_a_plugin_replaces_the_connection() -> Result<()> {
    let directory = TempDir::new()?;
    let user = write_plugin(directory.path())?;
    write_plugin_identity(directory.path(), CLIENTS[0], "2001-01-01T00:00:00Z")?;
    let server = server_with(&objects()).await?;
    let tls = TlsServer::start(server.address(), &["h2"]).await?;
    let mut scene = watching(server, &[tls.url()], &user, patient()).await?;
    scene.synced().await?;
    assert_eq!(tls.clients()?, [Some(0)], "an equal certificate keeps the connection");
    write_plugin_identity(directory.path(), CLIENTS[1], "2901-01-01T00:00:00Z")?;
    scene.watch_again(1).await?;
    scene.server.put(service("web", 81))?;
    scene.port("web", 81).await?;
    assert_eq!(tls.clients()?, [Some(0), Some(1)]);
    Ok(())
}

#[tokio::test]
async fn watches_with_a_replaced_certificate_continue_at_once_on_a_new_connection() -> Result<()> {
    for protocol in ["h2", "http/1.1"] {
        let directory = TempDir::new()?;
        let user = write_plugin(directory.path())?;
        write_plugin_identity(directory.path(), CLIENTS[0], "2001-01-01T00:00:00Z")?;
        let server = server_with(&objects()).await?;
        let tls = TlsServer::start(server.address(), &[protocol]).await?;
        let file = kubeconfig("https://kubeconfig.test", &user)?;
        let proxies = ProxyVariables::default();
        let client = kube_client(Some(file.path()), &[tls.url()], &proxies, &ignore_api_requests()).await?;
        let timing = Timing { first_retry: Duration::from_mins(1), ..patient() };
        let mut scene =
            Scene::with_source(server, ApiSource::new(client.clone(), "node1").with_timing(timing));
        scene.synced().await?;
        let before = scene.status(|status| status.nodes.connected_since.is_some()).await?;
        write_plugin_identity(directory.path(), CLIENTS[1], "2901-01-01T00:00:00Z")?;
        // Only this request makes the plugin run.
        let reader = ObjectReader::default();
        reader.set_client(&client);
        reader.read_pod(NamespacedName::new("default", "web-0")).await.expect_err("the server has no pods");
        for kind in ["nodes", "services", "endpointslices"] {
            scene.requested(kind, Verb::Watch, 1).await.context(protocol)?;
        }
        scene.server.put(service("web", 81))?;
        scene.port("web", 81).await?;
        let after = scene.status.borrow().clone();
        for (before, after) in [(before.nodes, after.nodes), (before.services, after.services)] {
            let state = |kind: KindStatus| (kind.last_error, kind.connected_since);
            assert_eq!(state(before), state(after), "no failure was reported");
        }
    }
    Ok(())
}
