//! Proxies for tests.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
};

use anyhow::{Context as _, Result};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, copy_bidirectional},
    net::{TcpListener, TcpStream},
    task::JoinHandle,
};
trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// What a proxy expects from its clients.
#[derive(Clone, Copy)]
pub(crate) enum Dialect {
    Http,
    Socks5,
}

/// A proxy that connects to one server, whichever server its clients name. It stops when it is
/// dropped.
pub(crate) struct ProxyServer {
    pub(crate) address: SocketAddr,
    shared: Arc<Shared>,
    serving: JoinHandle<()>,
}

struct Shared {
    server: SocketAddr,
    /// The head of the first request of each connection.
    requests: Mutex<Vec<String>>,
    /// The status with which the proxy refuses requests.
    refusal: Mutex<Option<&'static str>>,
}

impl ProxyServer {
    pub(crate) async fn start(dialect: Dialect, server: SocketAddr) -> Result<Self> {
        let shared = Shared { server, requests: Mutex::default(), refusal: Mutex::default() };
        let (shared, listener) = (Arc::new(shared), TcpListener::bind("127.0.0.1:0").await?);
        let address = listener.local_addr()?;
        let serving = accept(listener, {
            let shared = Arc::clone(&shared);
            move |stream| {
                let shared = Arc::clone(&shared);
                async move {
                    match dialect {
                        Dialect::Http => shared.serve_http(stream).await,
                        Dialect::Socks5 => shared.serve_socks(stream).await,
                    }
                }
            }
        });
        Ok(Self { address, shared, serving })
    }

    /// Refuses requests from now on, with this status, or serves them again.
    pub(crate) fn refuse(&self, status: Option<&'static str>) {
        *self.shared.refusal.lock().unwrap_or_else(PoisonError::into_inner) = status;
    }

    /// Returns the head of the first request of each connection so far.
    pub(crate) fn requests(&self) -> Vec<String> {
        self.shared.requests.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for ProxyServer {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

impl Shared {
    async fn serve_http(&self, mut client: impl Stream) -> Result<()> {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(client.read_u8().await?);
        }
        let text = String::from_utf8_lossy(&head).into_owned();
        let is_connect = text.starts_with("CONNECT ");
        self.requests.lock().unwrap_or_else(PoisonError::into_inner).push(text);
        let refusal = *self.refusal.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(status) = refusal {
            let response = format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
            client.write_all(response.as_bytes()).await?;
            return Ok(client.shutdown().await?);
        }
        let mut server = TcpStream::connect(self.server).await?;
        if is_connect {
            client.write_all(b"HTTP/1.1 200 Connection established\r\nVia: 1.1 test\r\n\r\n").await?;
        } else {
            server.write_all(&head).await?;
        }
        copy_bidirectional(&mut client, &mut server).await?;
        Ok(())
    }

    /// RFC 1928 with RFC 1929, for clients with credentials that connect to a name.
    async fn serve_socks(&self, mut client: impl Stream) -> Result<()> {
        client.read_u8().await?;
        read_text(&mut client).await.context("methods")?;
        client.write_all(&[5, 2]).await?;
        client.read_u8().await?;
        let (user, password) = (read_text(&mut client).await?, read_text(&mut client).await?);
        client.write_all(&[1, 0]).await?;
        let mut request = [0; 4];
        client.read_exact(&mut request).await?;
        let (name, port) = (read_text(&mut client).await?, client.read_u16().await?);
        let request = format!("{request:?} {user}:{password} {name}:{port}");
        self.requests.lock().unwrap_or_else(PoisonError::into_inner).push(request);
        client.write_all(&[5, 0, 0, 1, 0, 0, 0, 0, 0, 0]).await?;
        copy_bidirectional(&mut client, &mut TcpStream::connect(self.server).await?).await?;
        Ok(())
    }
}

/// Reads a text after its length in one octet.
async fn read_text(stream: &mut impl Stream) -> Result<String> {
    let mut text = vec![0; stream.read_u8().await?.into()];
    stream.read_exact(&mut text).await?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// Serves each connection in a task. A connection that breaks does not matter to the others.
fn accept<F>(listener: TcpListener, serve: impl Fn(TcpStream) -> F + Send + 'static) -> JoinHandle<()>
where
    F: Future<Output = Result<()>> + Send + 'static,
{
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(serve(stream));
        }
    })
}
