//! TLS with the API server, with certificates and keys that may be replaced while shunt runs.

use std::{
    fs,
    sync::{Arc, Mutex, PoisonError},
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use kube::{Config, client::ConfigExt as _, config::AuthInfo};
use tokio_rustls::{
    TlsConnector,
    rustls::{ClientConfig, pki_types::ServerName},
};
use tower::BoxError;
use tracing::warn;

use super::{credentials::Identity, tunnel::Stream};
use crate::causes::with_causes;

/// The protocols above TLS that the API server may choose from, in the order of preference.
const PROTOCOLS: [&[u8]; 2] = [b"h2", b"http/1.1"];
pub(super) const HTTP2: &[u8] = PROTOCOLS[0];

/// Loads certificates and keys anew for each connection.
pub(super) struct Tls {
    /// Without credentials other than the client certificate.
    config: Config,
    /// The configuration of the last connection.
    last: Mutex<Arc<ClientConfig>>,
}

impl Tls {
    /// Loads all files once, and fails if that is not possible. Without `uses_tls`, no connection
    /// has TLS.
    pub(super) fn new(config: &Config, uses_tls: bool) -> Result<Self, kube::Error> {
        let mut config = with_identity(config, None);
        if !uses_tls {
            leave_out_system_cas(&mut config);
        }
        let last = Mutex::new(Arc::new(config.rustls_client_config()?));
        Ok(Self { config, last })
    }

    /// Opens TLS. `identity` is the client certificate, if it does not come from the kubeconfig.
    /// Returns the stream, and the protocol that the server chose.
    pub(super) async fn connect(
        &self,
        stream: Stream,
        host: &str,
        identity: Option<Arc<Identity>>,
    ) -> Result<(Stream, Option<Vec<u8>>), BoxError> {
        let mut config = (*self.load(identity.as_deref())).clone();
        config.alpn_protocols = PROTOCOLS.map(<[u8]>::to_vec).to_vec();
        let stream = TlsConnector::from(Arc::new(config)).connect(self.server_name(host)?, stream).await?;
        let protocol = stream.get_ref().1.alpn_protocol().map(<[u8]>::to_vec);
        Ok((Box::new(stream), protocol))
    }

    /// Opens TLS with a proxy. As in Go, it uses the certificates of the API server.
    pub(super) async fn connect_to_proxy(&self, stream: Stream, host: &str) -> Result<Stream, BoxError> {
        let connector = TlsConnector::from(self.load(None));
        Ok(Box::new(connector.connect(self.server_name(host)?, stream).await?))
    }

    /// Reads the files of the client certificate and its key. Returns none if they do not come from
    /// files, or cannot be read now.
    pub(super) fn identity_files(&self) -> Option<[Vec<u8>; 2]> {
        let [certificate, key] = self.identity_paths()?;
        Some([fs::read(certificate).ok()?, fs::read(key).ok()?])
    }

    /// Returns the paths of the client certificate and its key, if they come from files.
    pub(super) fn identity_paths(&self) -> Option<[&str; 2]> {
        let AuthInfo {
            client_certificate,
            client_certificate_data: None,
            client_key,
            client_key_data: None,
            ..
        } = &self.config.auth_info
        else {
            return None;
        };
        Some([client_certificate.as_deref()?, client_key.as_deref()?])
    }

    /// Returns true if there are certificate and key now, and they belong together.
    pub(super) fn is_loadable(&self) -> bool {
        self.config.rustls_client_config().is_ok()
    }

    /// Loads all files. While they cannot be used, because they are being replaced for example, the
    /// last ones are used.
    fn load(&self, identity: Option<&Identity>) -> Arc<ClientConfig> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        match with_identity(&self.config, identity).rustls_client_config() {
            Ok(config) => *last = Arc::new(config),
            Err(error) => warn!(
                error = with_causes(&error),
                "cannot load the certificates for the API server; shunt uses the last ones"
            ),
        }
        Arc::clone(&last)
    }

    fn server_name(&self, host: &str) -> Result<ServerName<'static>, BoxError> {
        let host = self.config.tls_server_name.as_deref().unwrap_or(host);
        Ok(host.trim_start_matches('[').trim_end_matches(']').to_owned().try_into()?)
    }
}

/// Returns the configuration with no credentials but the client certificate: kube would run the
/// credential plugin whenever it loads certificates. If the server's certificate is not checked,
/// the CAs of the system are left out.
fn with_identity(config: &Config, identity: Option<&Identity>) -> Config {
    let AuthInfo { client_certificate, client_certificate_data, client_key, client_key_data, .. } =
        &config.auth_info;
    let auth_info = match identity {
        Some(identity) => AuthInfo {
            client_certificate_data: Some(STANDARD.encode(&identity.certificate)),
            client_key_data: Some(STANDARD.encode(&identity.key).into()),
            ..AuthInfo::default()
        },
        None => AuthInfo {
            client_certificate: client_certificate.clone(),
            client_certificate_data: client_certificate_data.clone(),
            client_key: client_key.clone(),
            client_key_data: client_key_data.clone(),
            ..AuthInfo::default()
        },
    };
    let mut config = config.clone();
    config.auth_info = auth_info;
    if config.accept_invalid_certs {
        leave_out_system_cas(&mut config);
    }
    config
}

/// Keeps kube from loading the CAs of the system: there are hundreds of files, and an image may
/// have none.
fn leave_out_system_cas(config: &mut Config) {
    config.root_cert.get_or_insert_default();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unchecked_server_needs_no_ca() {
        let mut config = Config::new("https://127.0.0.1:6443".parse().expect("a URL"));
        assert_eq!(with_identity(&config, None).root_cert, None, "those of the system");
        config.accept_invalid_certs = true;
        let without_ca = with_identity(&config, None);
        assert_eq!(without_ca.root_cert, Some(Vec::new()));
        without_ca.rustls_client_config().expect("TLS without a CA");
        config.root_cert = Some(vec![vec![1]]);
        assert_eq!(with_identity(&config, None).root_cert, config.root_cert);
    }
}
