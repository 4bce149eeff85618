//! The client for the API server, from a kubeconfig or the service account of the pod.

use std::{fs, io, path::Path};

use http::Uri;
use kube::{
    Config,
    client::ConfigExt as _,
    config::{Cluster, Context, KubeConfigOptions, Kubeconfig, KubeconfigError},
};
use tower::{ServiceBuilder, util::MapRequestLayer};
use tracing::{info, warn};

use super::{
    connection::ApiConnection,
    credentials::Credentials,
    dial::{Dialer, Target},
    empty_values::remove_empty,
    gzip,
    proxy::{Proxy, variable_for, without_credentials},
    requests::OnApiRequest,
    tls::Tls,
};
use crate::{
    net::{ProxyVariable, ProxyVariables},
    watch::WatchError,
};

/// Creates a client for the API server, by the rules of client-go's `BuildConfigFromFlags`:
/// `kubeconfig` is a file, and `servers` are URLs of one API server that replace the server of that
/// file. Without both, the service account of this pod is used. The `proxy-url` of the kubeconfig is
/// the proxy, or else `proxies` choose one. `on_request` gets each request.
pub async fn kube_client(
    kubeconfig: Option<&Path>,
    servers: &[String],
    proxies: &ProxyVariables,
    on_request: &OnApiRequest,
) -> Result<kube::Client, WatchError> {
    let (mut config, proxy) = match (kubeconfig, servers) {
        (Some(path), _) => from_kubeconfig(path, servers).await?,
        (None, [server, ..]) => (Config::new(server_url(server, "http")?), None),
        (None, []) => (Config::incluster().map_err(|error| WatchError::InCluster(Box::new(error)))?, None),
    };
    let default_scheme = config.cluster_url.scheme_str().unwrap_or("https").to_owned();
    let urls = servers.iter().map(|server| server_url(server, &default_scheme));
    let mut urls = urls.collect::<Result<Vec<_>, _>>()?;
    if let Some(first) = urls.first() {
        // The credential plugin gets the server that replaces the one of the file, as with client-go.
        if let Some(cluster) = config.auth_info.exec.as_mut().and_then(|exec| exec.cluster.as_mut()) {
            cluster.server = Some(first.to_string());
        }
    } else {
        urls.push(config.cluster_url.clone());
    }
    let targets = urls.into_iter().map(|url| {
        let proxy = choose_proxy(proxy.clone(), proxies, &url);
        Target { url, proxy }
    });
    client(&config, targets.collect(), on_request)
}

/// Returns the configuration, and the proxy of its cluster. `servers` replace the server of the
/// file.
async fn from_kubeconfig(path: &Path, servers: &[String]) -> Result<(Config, Option<Proxy>), WatchError> {
    let failed = |source| WatchError::Kubeconfig { path: path.to_owned(), source: Box::new(source) };
    check_utf16(path).map_err(|error| failed(KubeconfigError::ReadConfig(error, path.to_owned())))?;
    let mut kubeconfig = Kubeconfig::read_from(path).map_err(failed)?;
    remove_empty(&mut kubeconfig, path);
    override_server(&mut kubeconfig, servers);
    if current_cluster(&mut kubeconfig).is_some_and(|cluster| cluster.server.is_none()) {
        return Err(WatchError::NoServer { path: path.to_owned() });
    }
    let url = take_proxy_url(&mut kubeconfig);
    let proxy = url.as_deref().map(Proxy::from_kubeconfig).transpose().map_err(|source| {
        let url = without_credentials(url.as_deref().unwrap_or_default());
        WatchError::ProxyUrl { path: path.to_owned(), url, source }
    })?;
    add_scheme(&mut kubeconfig);
    let options = KubeConfigOptions::default();
    let authority = certificate_authority(&mut kubeconfig);
    let mut config = Config::from_custom_kubeconfig(kubeconfig, &options).await.map_err(failed)?;
    config.root_cert_file = authority.map(Into::into);
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
    let (config, proxy) = from_kubeconfig(path, &[]).await?;
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

/// Applies the servers of `--master` to the cluster that the kubeconfig uses: its certificate name
/// belongs to its own server (`getCluster` in client-go's `client_config.go`), which may be missing
/// then.
fn override_server(kubeconfig: &mut Kubeconfig, servers: &[String]) {
    let Some(first) = servers.first() else { return };
    let Some(cluster) = current_cluster(kubeconfig) else { return };
    cluster.tls_server_name = None;
    cluster.server.get_or_insert_with(|| first.clone());
}

/// Takes `proxy-url` out of the cluster that the kubeconfig uses, if it is set.
fn take_proxy_url(kubeconfig: &mut Kubeconfig) -> Option<String> {
    let cluster = current_cluster(kubeconfig)?;
    // For a cluster without proxy-url, kube reads HTTPS_PROXY, and fails if that is not a URL. A
    // placeholder prevents this. Only `Config::proxy_url` has it then, which is not used here.
    cluster.proxy_url.replace("http://placeholder.invalid".to_owned())
}

/// Adds the scheme to a server without one, as client-go's `DefaultServerURL` does: TLS if the
/// kubeconfig has anything about it.
fn add_scheme(kubeconfig: &mut Kubeconfig) {
    let user = current_context(kubeconfig).and_then(|context| context.user.clone());
    let user = kubeconfig.auth_infos.iter().find(|info| Some(&info.name) == user.as_ref());
    let has_certificate = user
        .and_then(|user| user.auth_info.as_ref())
        .is_some_and(|user| user.client_certificate.is_some() || user.client_certificate_data.is_some());
    let Some(cluster) = current_cluster(kubeconfig) else { return };
    let has_tls = has_certificate
        || cluster.certificate_authority.is_some()
        || cluster.certificate_authority_data.is_some()
        || cluster.insecure_skip_tls_verify == Some(true);
    if let Some(server) = cluster.server.as_mut().filter(|server| !server.contains("://")) {
        *server = format!("{}://{server}", if has_tls { "https" } else { "http" });
    }
}

/// Returns the file with the certificates of the authority, unless the kubeconfig has them itself.
fn certificate_authority(kubeconfig: &mut Kubeconfig) -> Option<String> {
    let cluster = current_cluster(kubeconfig)?;
    cluster.certificate_authority.clone().filter(|_| cluster.certificate_authority_data.is_none())
}

/// Returns the cluster that the kubeconfig uses.
fn current_cluster(kubeconfig: &mut Kubeconfig) -> Option<&mut Cluster> {
    let name = current_context(kubeconfig)?.cluster.clone();
    kubeconfig.clusters.iter_mut().find(|cluster| cluster.name == name)?.cluster.as_mut()
}

fn current_context(kubeconfig: &Kubeconfig) -> Option<&Context> {
    let current = kubeconfig.current_context.as_deref();
    kubeconfig.contexts.iter().find(|context| Some(&*context.name) == current)?.context.as_ref()
}

/// Returns the proxy of the kubeconfig, or else the proxy of the environment. `NO_PROXY` only
/// counts for the latter, as with client-go.
fn choose_proxy(of_kubeconfig: Option<Proxy>, proxies: &ProxyVariables, server: &Uri) -> Option<Proxy> {
    let (proxy, setting) = match of_kubeconfig {
        Some(proxy) => (proxy, "proxy-url of the kubeconfig"),
        None => proxy_of_environment(proxies, server)?,
    };
    info!(%server, %proxy, setting, "connecting to the API server through a proxy");
    Some(proxy)
}

/// Returns the proxy and its variable. Go ignores an unusable value without a word.
fn proxy_of_environment(proxies: &ProxyVariables, server: &Uri) -> Option<(Proxy, &'static str)> {
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
fn server_url(value: &str, default_scheme: &str) -> Result<Uri, WatchError> {
    let url = if value.contains("://") { value.to_owned() } else { format!("{default_scheme}://{value}") };
    url.parse().map_err(|source| WatchError::MasterUrl { value: value.to_owned(), source })
}

/// Builds kube's client without kube's retries: they would hide errors from the reflector.
fn client(
    config: &Config,
    targets: Vec<Target>,
    on_request: &OnApiRequest,
) -> Result<kube::Client, WatchError> {
    let failed = |error| WatchError::Client(Box::new(error));
    let credentials = Credentials::new(&config.auth_info).map_err(WatchError::Credentials)?;
    let tls = Tls::new(config, targets.iter().any(Target::uses_tls)).map_err(failed)?;
    let dialer = Dialer::new(targets, tls);
    // The headers that impersonate a user.
    let headers = config.extra_headers_layer().map_err(failed)?;
    // Servers compress large lists, and from Kubernetes 1.37 on streaming lists.
    let gzip = (!config.disable_compression).then(|| MapRequestLayer::new(gzip::accept));
    let connection = ApiConnection::new(dialer, credentials, on_request);
    let service = ServiceBuilder::new()
        .layer(headers)
        .option_layer(gzip)
        .map_response(gzip::decode)
        .service(connection);
    Ok(kube::Client::new(service, config.default_namespace.clone()))
}

#[cfg(test)]
mod tests {
    use tempfile::TempPath;

    use super::{super::requests::ignore_api_requests, *};
    use crate::{captured_log::logged, causes::with_causes};

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
        let error = kube_client(Some(path), &[], &ProxyVariables::default(), &ignore_api_requests()).await;
        let error = error.err().expect("there is no such file").to_string();
        assert!(error.contains("/nonexistent/kubeconfig"), "{error}");
    }

    #[tokio::test]
    async fn a_kubeconfig_that_ends_in_half_a_character_is_an_error() {
        for text in [&b"\xff\xfea"[..], b"\xfe\xff\0a\0"] {
            let file = tempfile::NamedTempFile::new().expect("a file");
            fs::write(&file, text).expect("written");
            let error = from_kubeconfig(file.path(), &[]).await.err().expect("half a character");
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
        let (config, proxy) = from_kubeconfig(&path, &[]).await.expect("a good kubeconfig");
        assert_eq!(config.cluster_url, "https://192.0.2.1:6443/");
        assert!(proxy.is_none());
        let proxies = ProxyVariables::default();
        kube_client(Some(&path), &["192.0.2.2:6443".to_owned()], &proxies, &ignore_api_requests())
            .await
            .expect("a client");
    }

    /// Writes a kubeconfig whose cluster and user have these settings.
    fn kubeconfig_with(cluster: &str, user: &str) -> TempPath {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let text = format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
            contexts: [{{name: c, context: {{cluster: c, user: u}}}}]\n\
            clusters: [{{name: c, cluster: {{{cluster}}}}}]\nusers: [{{name: u, user: {{{user}}}}}]\n"
        );
        fs::write(&file, text).expect("written");
        file.into_temp_path()
    }

    #[tokio::test]
    async fn empty_settings_are_as_missing_ones() {
        let server = "server: 'https://192.0.2.1', insecure-skip-tls-verify: true";
        for (cluster, user) in [
            ("certificate-authority: ''", "token: ''"),
            ("certificate-authority-data: ''", "tokenFile: ''"),
            ("tls-server-name: ''", "client-certificate: '', client-key: ''"),
            ("proxy-url: ''", "client-certificate-data: '', client-key-data: ''"),
            ("", "username: '', password: '', token: t"),
            ("", "as: '', as-uid: ''"),
        ] {
            let path = kubeconfig_with(&format!("{server}, {cluster}"), user);
            let proxies = ProxyVariables::default();
            let client = kube_client(Some(&path), &[], &proxies, &ignore_api_requests()).await;
            assert!(client.is_ok(), "{cluster} {user}: {}", with_causes(&client.err().expect("an error")));
        }
    }

    #[tokio::test]
    async fn an_empty_server_is_an_error_unless_a_master_replaces_it() {
        for cluster in ["server: ''", "insecure-skip-tls-verify: true"] {
            let path = kubeconfig_with(cluster, "token: t");
            let text = with_causes(&from_kubeconfig(&path, &[]).await.err().expect("no server"));
            assert!(text.contains("its cluster has no server; set it to a URL like https://"), "{text}");
            let master = ["https://192.0.2.2:6443".to_owned()];
            let (config, _) = from_kubeconfig(&path, &master).await.expect("a server");
            assert_eq!(config.cluster_url, "https://192.0.2.2:6443/");
        }
    }

    #[tokio::test]
    async fn a_master_clears_the_certificate_name_of_the_kubeconfig() {
        let path = kubeconfig_with("server: 'https://192.0.2.1', tls-server-name: api.test", "token: t");
        let (config, _) = from_kubeconfig(&path, &[]).await.expect("a good kubeconfig");
        assert_eq!(config.tls_server_name.as_deref(), Some("api.test"));
        let (config, _) = from_kubeconfig(&path, &["192.0.2.2".to_owned()]).await.expect("a good kubeconfig");
        assert_eq!(config.tls_server_name, None);
    }

    #[tokio::test]
    async fn an_unusable_proxy_url_is_named_in_the_error_without_credentials() {
        let path = kubeconfig("user:secret@proxy:3128");
        let error = from_kubeconfig(&path, &[]).await.err().expect("no scheme");
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
        let (_, own) = from_kubeconfig(&kubeconfig("socks5://own:2"), &[]).await.expect("a good kubeconfig");
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
        let log = logged(|| assert!(choose_proxy(None, &variables, &server).is_none()));
        assert!(log.contains("variable=\"HTTPS_PROXY\" value=\"***@a b\""), "{log}");
        assert!(log.contains("not a URL like http://192.0.2.1:3128; shunt connects"), "{log}");
        assert_eq!(log.lines().count(), 1, "{log}");
    }

    #[test]
    fn a_server_without_a_scheme_gets_https_only_with_settings_of_tls() {
        let server = |cluster: &str, user: &str| {
            let text = format!(
                "current-context: a\ncontexts: [{{name: a, context: {{cluster: b, user: c}}}}]\n\
                 clusters: [{{name: b, cluster: {{{cluster}}}}}]\nusers: [{{name: c, user: {{{user}}}}}]\n"
            );
            let mut kubeconfig = Kubeconfig::from_yaml(&text).expect("a kubeconfig");
            add_scheme(&mut kubeconfig);
            current_cluster(&mut kubeconfig).and_then(|cluster| cluster.server.clone())
        };
        for (cluster, user, expected) in [
            ("server: \"127.0.0.1:1\"", "", Some("http://127.0.0.1:1")),
            ("server: \"[fd00::1]:1\"", "token: x", Some("http://[fd00::1]:1")),
            ("server: api, certificate-authority: /ca", "", Some("https://api")),
            ("server: api, insecure-skip-tls-verify: true", "", Some("https://api")),
            ("server: api", "client-certificate: /c", Some("https://api")),
            ("server: \"https://api\"", "", Some("https://api")),
            ("", "", None),
        ] {
            assert_eq!(server(cluster, user).as_deref(), expected, "{cluster} {user}");
        }
    }
}
