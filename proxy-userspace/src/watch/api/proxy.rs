//! The proxy for connections to the API server, chosen as client-go chooses it.

use std::fmt;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use http::{HeaderValue, Uri};
use percent_encoding::percent_decode_str;

use super::no_proxy::is_exempt;
use crate::net::{ProxyVariable, ProxyVariables};

/// A proxy. [`fmt::Display`] shows its URL without credentials.
#[derive(Clone)]
pub(super) struct Proxy {
    pub(super) protocol: ProxyProtocol,
    /// Where the proxy listens: `http://HOST:PORT`, or `https://HOST:PORT` for TLS.
    pub(super) address: Uri,
    pub(super) credentials: Option<Credentials>,
    url: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProxyProtocol {
    Http,
    Socks5,
}

#[derive(Clone, PartialEq, Eq)]
pub(super) struct Credentials {
    pub(super) user: String,
    pub(super) password: String,
}

/// Why the URL of a proxy cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProxyUrlError {
    /// The value is not a URL with a host, or the port or the credentials are invalid.
    #[error("it is not a URL like http://192.0.2.1:3128")]
    Syntax,
    /// The scheme is unknown or missing.
    #[error("its scheme must be http, https or socks5, as in http://192.0.2.1:3128")]
    Scheme,
}

impl Proxy {
    /// Parses the value of an environment variable. Without a scheme it is an HTTP proxy.
    pub(super) fn from_variable(value: &str) -> Result<Self, ProxyUrlError> {
        if value.contains("://") { Self::parse(value) } else { Self::parse(&format!("http://{value}")) }
    }

    /// Parses `proxy-url` of a kubeconfig, where client-go requires one of these schemes.
    pub(super) fn from_kubeconfig(value: &str) -> Result<Self, ProxyUrlError> {
        let scheme = value.split_once("://").map(|(scheme, _)| scheme.to_lowercase());
        match scheme.as_deref() {
            Some("http" | "https" | "socks5") => Self::parse(value),
            _ => Err(ProxyUrlError::Scheme),
        }
    }

    fn parse(value: &str) -> Result<Self, ProxyUrlError> {
        let uri: Uri = value.parse().map_err(|_| ProxyUrlError::Syntax)?;
        let (protocol, transport, default_port) =
            match uri.scheme_str().unwrap_or_default().to_lowercase().as_str() {
                "http" => (ProxyProtocol::Http, "http", 80),
                "https" => (ProxyProtocol::Http, "https", 443),
                // With both, the proxy resolves the server's name, as with Go.
                "socks5" | "socks5h" => (ProxyProtocol::Socks5, "http", 1080),
                _ => return Err(ProxyUrlError::Scheme),
            };
        let authority = uri.authority().ok_or(ProxyUrlError::Syntax)?.as_str();
        let (userinfo, address) =
            authority.rsplit_once('@').map_or((None, authority), |(user, address)| (Some(user), address));
        let host = uri.host().filter(|host| !host.is_empty()).ok_or(ProxyUrlError::Syntax)?;
        let port: u16 = match address.strip_prefix(host).and_then(|rest| rest.strip_prefix(':')) {
            None | Some("") => default_port,
            Some(port) => port.parse().map_err(|_| ProxyUrlError::Syntax)?,
        };
        let address = format!("{transport}://{host}:{port}").parse().map_err(|_| ProxyUrlError::Syntax)?;
        let credentials = userinfo.map(Credentials::decode).transpose()?;
        Ok(Self { protocol, address, credentials, url: without_credentials(value) })
    }

    /// Returns true if the connection to the proxy itself uses TLS.
    pub(super) fn uses_tls(&self) -> bool {
        self.address.scheme() == Some(&http::uri::Scheme::HTTPS)
    }

    /// Returns true if requests to this server are sent to the proxy as they are, instead of
    /// through a tunnel. Go does so for servers with `http`: many proxies only permit tunnels to
    /// port 443.
    pub(super) fn forwards_to(&self, server: &Uri) -> bool {
        self.protocol == ProxyProtocol::Http && server.scheme() == Some(&http::uri::Scheme::HTTP)
    }
}

impl fmt::Display for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.url)
    }
}

impl Credentials {
    fn decode(userinfo: &str) -> Result<Self, ProxyUrlError> {
        let (user, password) = userinfo.split_once(':').unwrap_or((userinfo, ""));
        let decode = |text| {
            let text = percent_decode_str(text).decode_utf8().map_err(|_| ProxyUrlError::Syntax)?;
            Ok(text.into_owned())
        };
        Ok(Self { user: decode(user)?, password: decode(password)? })
    }

    /// Returns the value of the header `Proxy-Authorization`.
    pub(super) fn authorization(&self) -> HeaderValue {
        let encoded = STANDARD.encode(format!("{}:{}", self.user, self.password));
        let mut value = HeaderValue::try_from(format!("Basic {encoded}")).expect("base64 is ASCII");
        value.set_sensitive(true);
        value
    }
}

/// Replaces the credentials of a URL, which need not be valid, with `***`.
pub(super) fn without_credentials(url: &str) -> String {
    let Some((before, address)) = url.rsplit_once('@') else { return url.to_owned() };
    let scheme = before.find("://").map_or("", |end| &before[..end + "://".len()]);
    format!("{scheme}***@{address}")
}

/// Returns the environment variable that sets the proxy for a server, if the server has one. These
/// are the rules of Go's `http.ProxyFromEnvironment`.
pub(super) fn variable_for<'a>(variables: &'a ProxyVariables, server: &Uri) -> Option<&'a ProxyVariable> {
    let (variable, default_port) = match server.scheme_str()? {
        "https" => (variables.https.as_ref()?, 443),
        "http" => (variables.http.as_ref()?, 80),
        _ => return None,
    };
    let no_proxy = variables.no_proxy.as_ref().map_or("", |variable| &variable.value);
    let is_exempt = is_exempt(no_proxy, server.host()?, server.port_u16().unwrap_or(default_port));
    (!is_exempt).then_some(variable)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variables(set: &[(&str, &str)]) -> ProxyVariables {
        ProxyVariables::read(|name| {
            set.iter().find(|(set, _)| *set == name).map(|(_, value)| (*value).to_owned())
        })
    }

    /// Returns the proxy for a server, as its URL and the URL to connect to.
    fn chosen(set: &[(&str, &str)], server: &str) -> Option<String> {
        let variables = variables(set);
        let variable = variable_for(&variables, &server.parse().expect("a URL"))?;
        let proxy = Proxy::from_variable(&variable.value).ok()?;
        Some(format!("{} {} {}", variable.name, proxy.address, proxy.url))
    }

    /// The cases of Go's `TestProxyForURL`, without those of CGI and of names that are not ASCII.
    #[test]
    fn the_environment_chooses_as_in_go() {
        let secure = "https://secure.tld/";
        let both = [("HTTP_PROXY", "http.proxy.tld"), ("HTTPS_PROXY", "secure.proxy.tld")];
        let cases = [
            (&[][..], secure, None),
            (
                &both,
                "http://insecure.tld/",
                Some("HTTP_PROXY http://http.proxy.tld:80/ http://http.proxy.tld"),
            ),
            (&both, secure, Some("HTTPS_PROXY http://secure.proxy.tld:80/ http://secure.proxy.tld")),
            (&both[..1], secure, None),
            (&both[1..], "http://insecure.tld/", None),
            (&both, "ftp://insecure.tld/", None),
            (&both, "https://localhost:6443", None),
            (&both, "https://[::1]:6443", None),
            (&[both[1], ("NO_PROXY", "secure.tld:443")], secure, None),
            (&[both[1], ("no_proxy", ".secure.tld")], "https://api.secure.tld:6443", None),
            (
                &[("HTTPS_PROXY", ""), ("https_proxy", "socks5://p"), ("NO_PROXY", "10.0.0.0/8")],
                "https://ten.tld",
                Some("https_proxy http://p:1080/ socks5://p"),
            ),
        ];
        for (set, server, expected) in cases {
            assert_eq!(chosen(set, server).as_deref(), expected, "{set:?} {server}");
        }
    }

    #[test]
    fn values_of_variables_are_read_as_in_go() {
        use ProxyUrlError::{Scheme, Syntax};
        let cases = [
            ("127.0.0.1:8080", Ok("http://127.0.0.1:8080/")),
            ("cache.corp.example.com:1234", Ok("http://cache.corp.example.com:1234/")),
            ("localhost", Ok("http://localhost:80/")),
            ("https://cache.corp.example.com", Ok("https://cache.corp.example.com:443/")),
            ("HTTP://127.0.0.1:8080/path", Ok("http://127.0.0.1:8080/")),
            ("http://[2001:db8::1]:3128", Ok("http://[2001:db8::1]:3128/")),
            ("http://[2001:db8::1]", Ok("http://[2001:db8::1]:80/")),
            ("socks5://127.0.0.1", Ok("http://127.0.0.1:1080/")),
            ("socks5h://user@proxy:9", Ok("http://proxy:9/")),
            ("foo://host", Err(Scheme)),
            ("http://", Err(Syntax)),
            ("http://:3128", Err(Syntax)),
            ("http://proxy:http", Err(Syntax)),
            ("http://proxy:65536", Err(Syntax)),
            ("http://a b", Err(Syntax)),
            ("http://user:%ff@proxy", Err(Syntax)),
        ];
        for (value, expected) in cases {
            let address = Proxy::from_variable(value).map(|proxy| proxy.address.to_string());
            assert_eq!(address.as_deref().map_err(|error| *error), expected, "{value}");
        }
    }

    #[test]
    fn a_kubeconfig_needs_a_scheme_that_client_go_knows() {
        for value in ["http://p:1", "https://p:1", "socks5://p:1"] {
            assert_eq!(Proxy::from_kubeconfig(value).expect(value).url, value);
        }
        for value in ["p:1", "proxy", "socks5h://p:1", "ftp://p", ""] {
            assert_eq!(Proxy::from_kubeconfig(value).err(), Some(ProxyUrlError::Scheme), "{value}");
        }
    }

    #[test]
    fn credentials_are_decoded_and_never_shown() {
        let cases = [
            ("http://user:pass@p:3128", "user:pass", "http://***@p:3128"),
            ("user:p%40ss%3Aword@p:3128", "user:p@ss:word", "http://***@p:3128"),
            ("https://user@p", "user:", "https://***@p"),
            ("http://:pass@p", ":pass", "http://***@p"),
        ];
        for (value, plain, shown) in cases {
            let proxy = Proxy::from_variable(value).expect(value);
            let expected = format!("Basic {}", STANDARD.encode(plain));
            let credentials = proxy.credentials.as_ref().expect("credentials");
            assert_eq!(credentials.authorization(), expected.as_str(), "{value}");
            assert_eq!(proxy.to_string(), shown);
        }
        assert!(Proxy::from_variable("http://p:3128").expect("a URL").credentials.is_none());
        assert_eq!(without_credentials("http://user:pa/s s@p@x:99999"), "http://***@x:99999");
        assert_eq!(format!("{:?}", variables(&[("HTTP_PROXY", "u:p@x")])), "ProxyVariables { .. }");
    }
}
