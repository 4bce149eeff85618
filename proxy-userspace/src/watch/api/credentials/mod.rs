//! What requests to the API server authenticate with, chosen and renewed as client-go does.

mod plugin;
mod running_plugin;
mod token_file;

use std::{io, path::PathBuf, sync::Arc};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use http::HeaderValue;
use kube::config::AuthInfo;
use secrecy::ExposeSecret;

use self::{plugin::Plugin, token_file::TokenFile};

/// A client certificate with its key, both as PEM.
#[derive(PartialEq, Eq)]
pub(super) struct Identity {
    pub(super) certificate: String,
    pub(super) key: String,
}

/// What one request authenticates with.
#[derive(Clone, Default)]
pub(super) struct Credential {
    /// The header `Authorization`.
    pub(super) authorization: Option<HeaderValue>,
    /// The client certificate of a plugin. Those of a kubeconfig belong to the TLS configuration.
    pub(super) identity: Option<Arc<Identity>>,
    /// Counts the renewals.
    pub(super) renewal: u64,
}

/// The source of credentials.
pub(super) enum Credentials {
    Fixed(Credential),
    TokenFile(TokenFile),
    Plugin(Arc<Plugin>),
}

/// Why there are no credentials.
#[derive(Debug, thiserror::Error)]
pub enum CredentialError {
    /// The kubeconfig has both.
    #[error("the kubeconfig has both a token and a user name or password; remove one of them")]
    TokenAndPassword,
    /// client-go has had no such providers since 1.26, except with a build of its own.
    #[error("the kubeconfig has the auth-provider {0:?}, which is not supported; use exec instead")]
    Provider(String),
    /// A token has characters that a header must not have.
    #[error("the token is not a valid header value")]
    Token,
    /// The token file cannot be read.
    #[error("cannot read the token file {}", path.display())]
    TokenFile {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The token file is empty, or has blanks only.
    #[error("the token file {} is empty", .0.display())]
    EmptyTokenFile(PathBuf),
    /// A setting of `exec` is wrong.
    #[error("cannot use exec of the kubeconfig: {0}")]
    PluginSettings(String),
    /// The plugin cannot be run.
    #[error("cannot run the credential plugin {command}")]
    PluginStart {
        /// The command.
        command: String,
        /// The cause.
        source: io::Error,
    },
    /// The plugin failed, or its answer cannot be used.
    #[error("the credential plugin {command} failed: {why}")]
    Plugin {
        /// The command.
        command: String,
        /// What is wrong.
        why: String,
    },
}

impl Credentials {
    /// Chooses the source of credentials: tokens, a password, or a plugin. A plugin is not used
    /// beside another source, a client certificate included (`UpdateTransportConfig` of client-go's
    /// exec).
    pub(super) fn new(user: &AuthInfo) -> Result<Self, CredentialError> {
        if let Some(provider) = &user.auth_provider {
            return Err(CredentialError::Provider(provider.name.clone()));
        }
        let token = user.token.as_ref().map(ExposeSecret::expose_secret).filter(|token| !token.is_empty());
        let file = user.token_file.as_deref().filter(|file| !file.is_empty());
        let has_password = user.username.is_some() || user.password.is_some();
        let has_certificate = user.client_certificate.is_some() || user.client_certificate_data.is_some();
        match (token, file) {
            (Some(_), _) | (_, Some(_)) if has_password => Err(CredentialError::TokenAndPassword),
            (token, Some(file)) => Ok(Self::TokenFile(TokenFile::new(file, token)?)),
            (Some(token), None) => Ok(Self::fixed(Some(bearer(token)?))),
            (None, None) if has_password => Ok(Self::fixed(Some(basic(user)?))),
            (None, None) => match &user.exec {
                Some(exec) if !has_certificate => Ok(Self::Plugin(Arc::new(Plugin::new(exec)?))),
                _ => Ok(Self::fixed(None)),
            },
        }
    }

    fn fixed(authorization: Option<HeaderValue>) -> Self {
        Self::Fixed(Credential { authorization, ..Credential::default() })
    }

    /// Returns the credentials for a request. Renews those that have expired, which has a time
    /// limit of its own.
    pub(super) async fn current(&self) -> Result<Credential, Arc<CredentialError>> {
        match self {
            Self::Fixed(credential) => Ok(credential.clone()),
            Self::TokenFile(file) => Ok(file.current()),
            Self::Plugin(plugin) => plugin.current().await,
        }
    }

    /// The server did not accept `used`: the next request gets new credentials.
    pub(super) async fn reject(&self, used: &Credential) {
        match self {
            Self::Fixed(_) => {}
            Self::TokenFile(file) => file.reject(),
            Self::Plugin(plugin) => plugin.reject(used).await,
        }
    }
}

fn bearer(token: &str) -> Result<HeaderValue, CredentialError> {
    secret_header(format!("Bearer {token}"))
}

fn basic(user: &AuthInfo) -> Result<HeaderValue, CredentialError> {
    let name = user.username.as_deref().unwrap_or_default();
    let password = user.password.as_ref().map_or("", ExposeSecret::expose_secret);
    secret_header(format!("Basic {}", STANDARD.encode(format!("{name}:{password}"))))
}

fn secret_header(text: String) -> Result<HeaderValue, CredentialError> {
    let mut value = HeaderValue::try_from(text).map_err(|_| CredentialError::Token)?;
    value.set_sensitive(true);
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user(yaml: &str) -> AuthInfo {
        serde_yaml_ng::from_str(yaml).expect("a user")
    }

    async fn authorization(yaml: &str) -> Option<String> {
        let credentials = Credentials::new(&user(yaml)).expect("credentials");
        let credential = credentials.current().await.expect("a credential");
        credential.authorization.map(|value| value.to_str().expect("text").to_owned())
    }

    #[tokio::test]
    async fn a_plugin_is_not_run_beside_other_credentials() {
        let exec = "exec: {apiVersion: client.authentication.k8s.io/v1, command: /nonexistent, interactiveMode: Never}";
        assert_eq!(authorization(&format!("token: t\n{exec}")).await.as_deref(), Some("Bearer t"));
        let basic = authorization(&format!("username: u\npassword: p\n{exec}")).await;
        assert_eq!(basic.as_deref(), Some("Basic dTpw"));
        let certificate = format!("client-certificate-data: aGVsbG8K\nclient-key-data: aGVsbG8K\n{exec}");
        assert_eq!(authorization(&certificate).await, None);
    }

    #[test]
    fn contradictory_and_unknown_sources_are_refused() {
        for (yaml, expected) in [
            ("token: t\nusername: u\npassword: p", "both a token and a user name"),
            ("auth-provider: {name: gcp, config: {}}", "auth-provider \"gcp\""),
            ("token: \"a\\nb\"", "not a valid header value"),
            ("tokenFile: /nonexistent", "/nonexistent"),
        ] {
            let error = Credentials::new(&user(yaml)).err().expect(yaml).to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
