//! The HTTP client for the API server.

use std::{fs, io, path::Path, time::Duration};

use http::header::PROXY_AUTHORIZATION;
use hyper::rt::{Read, Write};
use hyper_util::{
    client::legacy::{
        Client as HttpClient,
        connect::{Connection, HttpConnector},
    },
    rt::TokioExecutor,
};
use kube::{
    Config,
    client::ConfigExt as _,
    config::{KubeConfigOptions, Kubeconfig, KubeconfigError},
};
use tower::{BoxError, Service, ServiceBuilder};
use tracing::{info, warn};

use super::{
    connector::ProxyConnector,
    proxy::{Proxy, variable_for, without_credentials},
    requests::{OnApiRequest, Reported},
};
use crate::{
    net::{ProxyVariable, ProxyVariables},
    watch::WatchError,
};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// A connection without traffic for this long is probed. It is closed after three probes without an
/// answer, so that a server that disappeared is noticed within half a minute.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(15);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_PROBES: u32 = 3;

/// Creates a client for the API server, by the rules of client-go's `BuildConfigFromFlags`:
/// `kubeconfig` is a file, and `master` is a URL that replaces the server of that file. Without
/// both, the service account of this pod is used. The `proxy-url` of the kubeconfig is the proxy,
/// or else `proxies` choose one. `on_request` gets each request.
pub async fn kube_client(
    kubeconfig: Option<&Path>,
    master: Option<&str>,
    proxies: &ProxyVariables,
    on_request: &OnApiRequest,
) -> Result<kube::Client, WatchError> {
    let master = master.filter(|master| !master.is_empty());
    let (mut config, proxy) = match (kubeconfig, master) {
        (Some(path), _) => from_kubeconfig(path).await?,
        (None, Some(master)) => (Config::new(server_url(master, "http")?), None),
        (None, None) => (Config::incluster().map_err(|error| WatchError::InCluster(Box::new(error)))?, None),
    };
    if let Some(master) = master {
        let default_scheme = config.cluster_url.scheme_str().unwrap_or("https").to_owned();
        config.cluster_url = server_url(master, &default_scheme)?;
    }
    let proxy = choose_proxy(proxy, proxies, &config.cluster_url);
    client(config, proxy, on_request).map_err(|error| WatchError::Client(Box::new(error)))
}

/// Returns the configuration, and the proxy of its cluster.
async fn from_kubeconfig(path: &Path) -> Result<(Config, Option<Proxy>), WatchError> {
    let failed = |source| WatchError::Kubeconfig { path: path.to_owned(), source: Box::new(source) };
    check_utf16(path).map_err(|error| failed(KubeconfigError::ReadConfig(error, path.to_owned())))?;
    let mut kubeconfig = Kubeconfig::read_from(path).map_err(failed)?;
    let url = take_proxy_url(&mut kubeconfig);
    let proxy = url.as_deref().map(Proxy::from_kubeconfig).transpose().map_err(|source| {
        let url = without_credentials(url.as_deref().unwrap_or_default());
        WatchError::ProxyUrl { path: path.to_owned(), url, source }
    })?;
    let options = KubeConfigOptions::default();
    let mut config = Config::from_custom_kubeconfig(kubeconfig, &options).await.map_err(failed)?;
    // The credential plugin gets the cluster with its own proxy.
    if let Some(cluster) = config.auth_info.exec.as_mut().and_then(|exec| exec.cluster.as_mut()) {
        cluster.proxy_url = url;
    }
    Ok((config, proxy))
}

/// Reads a kubeconfig, and names the API server and the proxy, for fuzz targets. Unlike
/// [`kube_client`], it runs no credential plugin.
#[cfg(feature = "fuzzing")]
pub async fn describe_kubeconfig(path: &Path) -> Result<String, WatchError> {
    let (config, proxy) = from_kubeconfig(path).await?;
    let proxy = choose_proxy(proxy, &ProxyVariables::default(), &config.cluster_url);
    Ok(format!("{} {}", config.cluster_url, proxy.map(|proxy| proxy.to_string()).unwrap_or_default()))
}

/// Returns an error if a UTF-16 file has half a character at its end: kube 5.0 panics on it.
fn check_utf16(path: &Path) -> io::Result<()> {
    let text = fs::read(path)?;
    let is_utf16 = text.starts_with(&[0xff, 0xfe]) || text.starts_with(&[0xfe, 0xff]);
    if is_utf16 && !text.len().is_multiple_of(2) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "invalid UTF-16: an odd number of bytes"));
    }
    Ok(())
}

/// Takes `proxy-url` out of the cluster that the kubeconfig uses, if it is set and not empty.
fn take_proxy_url(kubeconfig: &mut Kubeconfig) -> Option<String> {
    let current = kubeconfig.current_context.as_deref();
    let context = kubeconfig.contexts.iter().find(|context| Some(&*context.name) == current)?;
    let name = &context.context.as_ref()?.cluster;
    let cluster = kubeconfig.clusters.iter_mut().find(|cluster| cluster.name == *name)?.cluster.as_mut()?;
    // For a cluster without proxy-url, kube reads HTTPS_PROXY, and fails if that is not a URL. A
    // placeholder prevents this. Only `Config::proxy_url` has it then, which is not used here.
    let url = cluster.proxy_url.replace("http://placeholder.invalid".to_owned());
    url.filter(|url| !url.is_empty())
}

/// Returns the proxy of the kubeconfig, or else the proxy of the environment. `NO_PROXY` only
/// counts for the latter, as with client-go.
fn choose_proxy(of_kubeconfig: Option<Proxy>, proxies: &ProxyVariables, server: &http::Uri) -> Option<Proxy> {
    let (proxy, setting) = match of_kubeconfig {
        Some(proxy) => (proxy, "proxy-url of the kubeconfig"),
        None => proxy_of_environment(proxies, server)?,
    };
    info!(%server, %proxy, setting, "connecting to the API server through a proxy");
    Some(proxy)
}

/// Returns the proxy and its variable. Go ignores an unusable value without a word.
fn proxy_of_environment(proxies: &ProxyVariables, server: &http::Uri) -> Option<(Proxy, &'static str)> {
    let ProxyVariable { name, value } = variable_for(proxies, server)?;
    let proxy = Proxy::from_variable(value).inspect_err(|error| {
        let value = without_credentials(value);
        warn!(
            variable = name,
            value,
            "cannot use the variable for the proxy: {error}; shunt connects to the API server directly"
        );
    });
    Some((proxy.ok()?, name))
}

/// Parses what client-go accepts: a URL, or a host with or without a port.
fn server_url(value: &str, default_scheme: &str) -> Result<http::Uri, WatchError> {
    let url = if value.contains("://") { value.to_owned() } else { format!("{default_scheme}://{value}") };
    url.parse().map_err(|source| WatchError::MasterUrl { value: value.to_owned(), source })
}

/// Builds kube's client with TCP keep-alive, through the proxy if there is one.
fn client(
    mut config: Config,
    proxy: Option<Proxy>,
    on_request: &OnApiRequest,
) -> Result<kube::Client, kube::Error> {
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    tcp.set_connect_timeout(Some(CONNECT_TIMEOUT));
    tcp.set_keepalive(Some(KEEPALIVE_IDLE));
    tcp.set_keepalive_interval(Some(KEEPALIVE_INTERVAL));
    tcp.set_keepalive_retries(Some(KEEPALIVE_PROBES));
    let Some(proxy) = proxy else { return client_over(&config, tcp, on_request) };
    // With a tunnel, CONNECT has the credentials instead.
    if proxy.forwards_to(&config.cluster_url)
        && let Some(credentials) = &proxy.credentials
    {
        config.headers.push((PROXY_AUTHORIZATION, credentials.authorization()));
    }
    if proxy.uses_tls() {
        // Go too uses the certificates of the API server for the connection to the proxy.
        let tls = config.rustls_https_connector_with_connector(tcp)?;
        client_over(&config, ProxyConnector::new(tls, proxy), on_request)
    } else {
        client_over(&config, ProxyConnector::new(tcp, proxy), on_request)
    }
}

/// Builds kube's client without kube's retries: they would hide errors from the reflector.
fn client_over<C>(
    config: &Config,
    connector: C,
    on_request: &OnApiRequest,
) -> Result<kube::Client, kube::Error>
where
    C: Service<http::Uri> + Clone + Send + Sync + 'static,
    C::Response: Connection + Read + Write + Send + Unpin,
    C::Future: Send,
    C::Error: Into<BoxError>,
{
    let tls = config.rustls_https_connector_with_connector(connector)?;
    let service = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(config.auth_layer()?)
        .layer(config.extra_headers_layer()?)
        .map_err(BoxError::from)
        .service(Reported::new(HttpClient::builder(TokioExecutor::new()).build(tls), on_request));
    Ok(kube::Client::new(service, config.default_namespace.clone()))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tempfile::TempPath;

    use super::{super::requests::ignore_api_requests, *};
    use crate::causes::with_causes;

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
        let path = Path::new("/nonexistent/kubeconfig");
        let error = kube_client(Some(path), None, &ProxyVariables::default(), &ignore_api_requests()).await;
        let error = error.err().expect("there is no such file").to_string();
        assert!(error.contains("/nonexistent/kubeconfig"), "{error}");
    }

    #[tokio::test]
    async fn a_kubeconfig_that_ends_in_half_a_character_is_an_error() {
        for text in [&b"\xff\xfea"[..], b"\xfe\xff\0a\0"] {
            let file = tempfile::NamedTempFile::new().expect("a file");
            fs::write(&file, text).expect("written");
            let error = from_kubeconfig(file.path()).await.err().expect("half a character");
            let text = with_causes(&error);
            assert!(text.contains("invalid UTF-16: an odd number of bytes"), "{text}");
        }
    }

    /// Writes a kubeconfig whose cluster has this `proxy-url`, after another cluster.
    fn kubeconfig(proxy_url: &str) -> TempPath {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let text = format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
            contexts: [{{name: c, context: {{cluster: c, user: u}}}}]\n\
            clusters: [{{name: a, cluster: {{server: 'https://192.0.2.9', proxy-url: 'no URL'}}}},\n  \
            {{name: c, cluster: {{server: 'https://192.0.2.1:6443', proxy-url: '{proxy_url}'}}}}]\n\
            users: [{{name: u, user: {{token: t}}}}]\n"
        );
        fs::write(&file, text).expect("written");
        file.into_temp_path()
    }

    #[tokio::test]
    async fn a_master_replaces_the_server_of_the_kubeconfig() {
        let path = kubeconfig("");
        let (config, proxy) = from_kubeconfig(&path).await.expect("a good kubeconfig");
        assert_eq!(config.cluster_url, "https://192.0.2.1:6443/");
        assert!(proxy.is_none());
        let proxies = ProxyVariables::default();
        kube_client(Some(&path), Some("192.0.2.2:6443"), &proxies, &ignore_api_requests())
            .await
            .expect("a client");
    }

    #[tokio::test]
    async fn an_unusable_proxy_url_is_named_in_the_error_without_credentials() {
        let path = kubeconfig("user:secret@proxy:3128");
        let error = from_kubeconfig(&path).await.err().expect("no scheme");
        let text = with_causes(&error);
        assert!(text.contains("proxy-url \"***@proxy:3128\" of kubeconfig /"), "{text}");
        assert!(text.contains("must be http, https or socks5"), "{text}");
    }

    #[tokio::test]
    async fn the_kubeconfig_comes_before_the_environment() {
        let set = [("HTTPS_PROXY", "env:1"), ("NO_PROXY", "192.0.2.0/24")];
        let variables = |number| {
            let set = &set[..number];
            ProxyVariables::read(|name| {
                set.iter().find(|(set, _)| *set == name).map(|(_, v)| (*v).to_owned())
            })
        };
        let server = "https://192.0.2.1:6443".parse().expect("a URL");
        let (_, own) = from_kubeconfig(&kubeconfig("socks5://own:2")).await.expect("a good kubeconfig");
        let chosen =
            |own, number| choose_proxy(own, &variables(number), &server).map(|proxy| proxy.to_string());
        assert_eq!(chosen(own, 2).as_deref(), Some("socks5://own:2"));
        assert_eq!(chosen(None, 1).as_deref(), Some("http://env:1"));
        assert_eq!(chosen(None, 2), None);
    }

    #[test]
    fn an_unusable_variable_is_logged_without_credentials_and_ignored() {
        let variables =
            ProxyVariables::read(|name| (name == "HTTPS_PROXY").then(|| "u:secret@a b".to_owned()));
        let server = "https://192.0.2.1:6443".parse().expect("a URL");
        let (log, writer) = io::pipe().expect("a pipe");
        let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(Arc::new(writer)).finish();
        tracing::subscriber::with_default(subscriber, || {
            assert!(choose_proxy(None, &variables, &server).is_none());
        });
        let log = io::read_to_string(log).expect("the log");
        assert!(log.contains("variable=\"HTTPS_PROXY\" value=\"***@a b\""), "{log}");
        assert!(log.contains("not a URL like http://192.0.2.1:3128; shunt connects"), "{log}");
        assert_eq!(log.lines().count(), 1, "{log}");
    }
}
