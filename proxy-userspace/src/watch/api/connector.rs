//! Connects to the API server through a proxy.

use std::{
    future::ready,
    io::{self, IoSlice},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures::future::BoxFuture;
use http::Uri;
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::{
    client::legacy::connect::{Connected, Connection, proxy::SocksV5},
    rt::TokioIo,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    time::timeout,
};
use tower::{BoxError, Service, ServiceExt as _};

use super::proxy::{Proxy, ProxyProtocol};

/// The longest response to CONNECT, in octets.
const MAX_RESPONSE: usize = 8192;
/// The longest time that a proxy may take to connect to the server.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// Connects through a proxy. `C` makes the connection to the proxy itself.
#[derive(Clone)]
pub(super) struct ProxyConnector<C> {
    inner: C,
    proxy: Arc<Proxy>,
}

#[derive(Debug, thiserror::Error)]
#[error("cannot connect through the proxy {proxy}")]
pub(super) struct ProxyError {
    proxy: String,
    source: BoxError,
}

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

impl<C> ProxyConnector<C> {
    pub(super) fn new(inner: C, proxy: Proxy) -> Self {
        Self { inner, proxy: Arc::new(proxy) }
    }
}

impl<C> Service<Uri> for ProxyConnector<C>
where
    C: Service<Uri> + Clone + Send + 'static,
    C::Response: Read + Write + Unpin + Send + 'static,
    C::Error: Into<BoxError>,
    C::Future: Send,
{
    type Response = ProxyStream<C::Response>;
    type Error = ProxyError;
    type Future = BoxFuture<'static, Result<Self::Response, ProxyError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), ProxyError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, server: Uri) -> Self::Future {
        let (inner, proxy) = (self.inner.clone(), Arc::clone(&self.proxy));
        Box::pin(async move {
            connect(inner, &proxy, &server)
                .await
                .map_err(|source| ProxyError { proxy: proxy.to_string(), source })
        })
    }
}

async fn connect<C>(inner: C, proxy: &Proxy, server: &Uri) -> Result<ProxyStream<C::Response>, BoxError>
where
    C: Service<Uri>,
    C::Response: Read + Write + Unpin + Send + 'static,
    C::Error: Into<BoxError>,
{
    let stream = inner.oneshot(proxy.address.clone()).await.map_err(Into::into)?;
    if proxy.forwards_to(server) {
        return Ok(ProxyStream { stream, is_forwarded: true });
    }
    let default_port = if server.scheme() == Some(&http::uri::Scheme::HTTP) { 80 } else { 443 };
    let port = server.port_u16().unwrap_or(default_port);
    let server = format!("{}:{port}", server.host().unwrap_or_default());
    let connected = async {
        Ok(match proxy.protocol {
            ProxyProtocol::Http => open_tunnel(stream, proxy, server.clone()).await?,
            ProxyProtocol::Socks5 => connect_with_socks(stream, proxy, server.parse()?).await?,
        })
    };
    match timeout(ANSWER_TIMEOUT, connected).await {
        Ok(connected) => connected.map(|stream| ProxyStream { stream, is_forwarded: false }),
        Err(_) => Err(TunnelError::TimedOut { server }.into()),
    }
}

/// Sends CONNECT and waits for the response. hyper-util's `Tunnel` does the same, but its error
/// does not contain the proxy's response.
async fn open_tunnel<S>(stream: S, proxy: &Proxy, server: String) -> Result<S, TunnelError>
where
    S: Read + Write + Unpin,
{
    let mut request = format!("CONNECT {server} HTTP/1.1\r\nHost: {server}\r\n").into_bytes();
    if let Some(credentials) = &proxy.credentials {
        request.extend_from_slice(b"Proxy-Authorization: ");
        request.extend_from_slice(credentials.authorization().as_bytes());
        request.extend_from_slice(b"\r\n");
    }
    request.extend_from_slice(b"\r\n");
    let mut stream = TokioIo::new(stream);
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
        Some("200") => Ok(stream.into_inner()),
        Some("407") => Err(TunnelError::Unauthorized(status)),
        _ => Err(TunnelError::Refused { server, status }),
    }
}

async fn connect_with_socks<S>(stream: S, proxy: &Proxy, server: Uri) -> Result<S, BoxError>
where
    S: Read + Write + Unpin + Send + 'static,
{
    // SocksV5 wants to connect, but its error would not contain the cause. So it gets a connection.
    let mut stream = Some(stream);
    let connected = tower::service_fn(move |_: Uri| {
        ready(stream.take().ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected)))
    });
    let mut socks = SocksV5::new(proxy.address.clone(), connected);
    if let Some(credentials) = &proxy.credentials {
        socks = socks.with_auth(credentials.user.clone(), credentials.password.clone());
    }
    Ok(socks.oneshot(server).await?)
}

/// A connection through a proxy.
pub(super) struct ProxyStream<S> {
    stream: S,
    /// The proxy reads the requests. They then contain the whole URL.
    is_forwarded: bool,
}

impl<S: Connection> Connection for ProxyStream<S> {
    fn connected(&self) -> Connected {
        self.stream.connected().proxy(self.is_forwarded)
    }
}

impl<S: Read + Unpin> Read for ProxyStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: Write + Unpin> Write for ProxyStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, data)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        data: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, data)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::duplex;

    use super::*;
    use crate::causes::with_causes;

    #[tokio::test(start_paused = true)]
    async fn a_proxy_that_does_not_answer_is_named_in_the_error() {
        for url in ["http://192.0.2.1:3128", "socks5://192.0.2.1:1080"] {
            let proxy = Proxy::from_kubeconfig(url).expect("a URL");
            // The other end stays open and sends nothing.
            let (near, _far) = duplex(1024);
            let mut near = Some(TokioIo::new(near));
            let near = tower::service_fn(move |_: Uri| ready(near.take().ok_or("only once")));
            let server = Uri::from_static("https://198.51.100.7:6443");
            let Err(error) = connect(near, &proxy, &server).await else { panic!("it answers nothing") };
            let error = with_causes(&ProxyError { proxy: proxy.to_string(), source: error });
            let expected = format!(
                "cannot connect through the proxy {url}: it does not connect to 198.51.100.7:6443 within 10 s"
            );
            assert_eq!(error, expected);
        }
    }
}
