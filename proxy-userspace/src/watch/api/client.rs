//! The HTTP client for the API server.

use std::{path::Path, time::Duration};

use hyper_util::{
    client::legacy::{Client as HttpClient, connect::HttpConnector},
    rt::TokioExecutor,
};
use kube::{
    Config,
    client::ConfigExt as _,
    config::{KubeConfigOptions, Kubeconfig},
};
use tower::{BoxError, ServiceBuilder};

use crate::watch::WatchError;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// A connection without traffic for this long is probed. It is closed after three probes without an
/// answer, so that a server that disappeared is noticed within half a minute.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(15);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_PROBES: u32 = 3;

/// Creates a client for the API server, by the rules of client-go's `BuildConfigFromFlags`:
/// `kubeconfig` is a file, and `master` is a URL that replaces the server of that file. Without
/// both, the service account of this pod is used.
pub async fn kube_client(
    kubeconfig: Option<&Path>,
    master: Option<&str>,
) -> Result<kube::Client, WatchError> {
    let master = master.filter(|master| !master.is_empty());
    let mut config = match (kubeconfig, master) {
        (Some(path), _) => from_kubeconfig(path).await?,
        (None, Some(master)) => Config::new(server_url(master, "http")?),
        (None, None) => Config::incluster().map_err(|error| WatchError::InCluster(Box::new(error)))?,
    };
    if let Some(master) = master {
        let default_scheme = config.cluster_url.scheme_str().unwrap_or("https").to_owned();
        config.cluster_url = server_url(master, &default_scheme)?;
    }
    client(config).map_err(|error| WatchError::Client(Box::new(error)))
}

async fn from_kubeconfig(path: &Path) -> Result<Config, WatchError> {
    let failed = |source| WatchError::Kubeconfig { path: path.to_owned(), source: Box::new(source) };
    let kubeconfig = Kubeconfig::read_from(path).map_err(failed)?;
    Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.map_err(failed)
}

/// Parses what client-go accepts: a URL, or a host with or without a port.
fn server_url(value: &str, default_scheme: &str) -> Result<http::Uri, WatchError> {
    let url = if value.contains("://") { value.to_owned() } else { format!("{default_scheme}://{value}") };
    url.parse().map_err(|source| WatchError::MasterUrl { value: value.to_owned(), source })
}

/// Builds kube's client with TCP keep-alive, and without kube's retries: they would hide errors
/// from the reflector.
fn client(config: Config) -> Result<kube::Client, kube::Error> {
    if config.proxy_url.is_some() {
        // Only kube supports proxies.
        return kube::Client::try_from(config);
    }
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    tcp.set_connect_timeout(Some(CONNECT_TIMEOUT));
    tcp.set_keepalive(Some(KEEPALIVE_IDLE));
    tcp.set_keepalive_interval(Some(KEEPALIVE_INTERVAL));
    tcp.set_keepalive_retries(Some(KEEPALIVE_PROBES));
    let tls = config.rustls_https_connector_with_connector(tcp)?;
    let service = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(config.auth_layer()?)
        .layer(config.extra_headers_layer()?)
        .map_err(BoxError::from)
        .service(HttpClient::builder(TokioExecutor::new()).build(tls));
    Ok(kube::Client::new(service, config.default_namespace))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_master_without_scheme_gets_the_default_scheme() {
        assert_eq!(server_url("192.0.2.1:8080", "http").expect("a URL"), "http://192.0.2.1:8080/");
        assert_eq!(server_url("https://api.test", "http").expect("a URL"), "https://api.test/");
    }

    #[test]
    fn an_invalid_master_is_named_in_the_error() {
        let error = server_url("http://a b", "http").expect_err("a blank is not allowed");
        assert!(error.to_string().contains("\"http://a b\""), "{error}");
    }

    #[tokio::test]
    async fn a_missing_kubeconfig_is_named_in_the_error() {
        let error = kube_client(Some(Path::new("/nonexistent/kubeconfig")), None).await;
        let error = error.err().expect("there is no such file").to_string();
        assert!(error.contains("/nonexistent/kubeconfig"), "{error}");
    }

    #[tokio::test]
    async fn a_master_replaces_the_server_of_the_kubeconfig() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("kubeconfig");
        let text = "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
                    contexts: [{name: c, context: {cluster: c, user: u}}]\n\
                    clusters: [{name: c, cluster: {server: 'https://192.0.2.1:6443'}}]\n\
                    users: [{name: u, user: {token: t}}]\n";
        std::fs::write(&path, text).expect("a file");
        let config = from_kubeconfig(&path).await.expect("a good kubeconfig");
        assert_eq!(config.cluster_url, "https://192.0.2.1:6443/");
        kube_client(Some(&path), Some("192.0.2.2:6443")).await.expect("a client");
    }
}
