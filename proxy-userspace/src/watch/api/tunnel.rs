//! Connects to the API server through a proxy.

use std::{
    future::{Ready, ready},
    io,
    task::{Context, Poll},
    time::Duration,
};

use http::Uri;
use hyper_util::{client::legacy::connect::proxy::SocksV5, rt::TokioIo};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    time::timeout,
};
use tower::{BoxError, Service, ServiceExt as _};

use super::proxy::{Proxy, ProxyProtocol};

/// The longest response to CONNECT, in octets.
const MAX_RESPONSE: usize = 8192;
/// The longest time that a proxy may take to connect to the server.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// A connection, or one through a proxy or TLS.
pub(super) type Stream = Box<dyn ReadWrite>;

/// Both directions of a connection.
pub(super) trait ReadWrite: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> ReadWrite for T {}

/// Why the proxy does not connect to the server.
#[derive(Debug, thiserror::Error)]
enum TunnelError {
    #[error("it requires credentials, or others than those in its URL: {0:?}")]
    Unauthorized(String),
    #[error("it refuses CONNECT {server}: {status:?}")]
    Refused { server: String, status: String },
    #[error("its response to CONNECT has more than {MAX_RESPONSE} octets")]
    TooLong,
    #[error("it does not connect to {server} within {} s", ANSWER_TIMEOUT.as_secs())]
    TimedOut { server: String },
    #[error("the connection broke during CONNECT")]
    Broken(#[from] io::Error),
}

/// Makes a proxy connect to a server. `stream` is the connection to the proxy.
pub(super) async fn open(stream: Stream, proxy: &Proxy, server: Uri) -> Result<Stream, BoxError> {
    let default_port = if server.scheme() == Some(&http::uri::Scheme::HTTP) { 80 } else { 443 };
    let port = server.port_u16().unwrap_or(default_port);
    let server = format!("{}:{port}", server.host().unwrap_or_default());
    let connected = async {
        match proxy.protocol {
            ProxyProtocol::Http => Ok(open_tunnel(stream, proxy, server.clone()).await?),
            ProxyProtocol::Socks5 => connect_with_socks(stream, proxy, server.parse()?).await,
        }
    };
    match timeout(ANSWER_TIMEOUT, connected).await {
        Ok(connected) => connected,
        Err(_) => Err(TunnelError::TimedOut { server }.into()),
    }
}

/// Sends CONNECT and waits for the response. hyper-util's `Tunnel` does the same, but its error
/// does not contain the proxy's response.
async fn open_tunnel(mut stream: Stream, proxy: &Proxy, server: String) -> Result<Stream, TunnelError> {
    let mut request = format!("CONNECT {server} HTTP/1.1\r\nHost: {server}\r\n").into_bytes();
    if let Some(credentials) = &proxy.credentials {
        request.extend_from_slice(b"Proxy-Authorization: ");
        request.extend_from_slice(credentials.authorization().as_bytes());
        request.extend_from_slice(b"\r\n");
    }
    request.extend_from_slice(b"\r\n");
    stream.write_all(&request).await?;
    stream.flush().await?;
    let mut response = Vec::new();
    // Byte by byte, because what follows the head belongs to the tunnel.
    while !response.ends_with(b"\r\n\r\n") {
        if response.len() == MAX_RESPONSE {
            return Err(TunnelError::TooLong);
        }
        response.push(stream.read_u8().await?);
    }
    let response = String::from_utf8_lossy(&response);
    let status = response.lines().next().unwrap_or_default().to_owned();
    match status.split_whitespace().nth(1) {
        Some("200") => Ok(stream),
        Some("407") => Err(TunnelError::Unauthorized(status)),
        _ => Err(TunnelError::Refused { server, status }),
    }
}

async fn connect_with_socks(stream: Stream, proxy: &Proxy, server: Uri) -> Result<Stream, BoxError> {
    let connected = Connected(Some(TokioIo::new(stream)));
    let mut socks = SocksV5::new(proxy.address.clone(), connected);
    if let Some(credentials) = &proxy.credentials {
        socks = socks.with_auth(credentials.user.clone(), credentials.password.clone());
    }
    Ok(socks.oneshot(server).await?.into_inner())
}

/// A connection in place of a connector: with a connector, the error of `SocksV5` would not contain
/// the cause.
struct Connected(Option<TokioIo<Stream>>);

impl Service<Uri> for Connected {
    type Response = TokioIo<Stream>;
    type Error = io::Error;
    type Future = Ready<io::Result<TokioIo<Stream>>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        ready(self.0.take().ok_or_else(|| io::ErrorKind::NotConnected.into()))
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::duplex;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_proxy_that_does_not_answer_is_an_error() {
        for url in ["http://192.0.2.1:3128", "socks5://192.0.2.1:1080"] {
            let proxy = Proxy::from_kubeconfig(url).expect("a URL");
            // The other end stays open and sends nothing.
            let (near, _far) = duplex(1024);
            let server = Uri::from_static("https://198.51.100.7:6443");
            let Err(error) = open(Box::new(near), &proxy, server).await else { panic!("it answers nothing") };
            assert_eq!(error.to_string(), "it does not connect to 198.51.100.7:6443 within 10 s");
        }
    }
}
