//! Connections that shunt closes because their client certificate was replaced.
//!
//! The server knows a connection by the certificate of its beginning. So client-go closes the
//! connections of a certificate that was replaced, and requests continue with the new one.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use futures::{FutureExt as _, future::BoxFuture};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::watch,
};
use tower::BoxError;

use super::tunnel::Stream;

/// Why a response ended: it is no failure of the server, and a new connection works at once.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the client certificate was replaced, so shunt closed the connection")]
pub(super) struct CertificateReplaced;

/// Breaks one connection. hyper's own handles do not: with HTTP/2, a task of hyper keeps the stream
/// until the last response is over.
#[derive(Clone)]
pub(super) struct Breaker(Arc<watch::Sender<bool>>);

impl Breaker {
    /// Returns the stream to use in place of `stream`, and what breaks it.
    pub(super) fn new(stream: Stream) -> (Self, Stream) {
        let (sender, mut receiver) = watch::channel(false);
        let broken = async move {
            // Without a sender, nothing can break the stream any more.
            if receiver.wait_for(|is_broken| *is_broken).await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        (Self(Arc::new(sender)), Box::new(Breakable { stream, broken: broken.boxed() }))
    }

    /// Breaks the connection, and ends its responses with [`CertificateReplaced`].
    pub(super) fn break_now(&self) {
        self.0.send_replace(true);
    }

    /// Returns true if both are of the same connection.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Returns true if [`Self::break_now`] was called.
    pub(super) fn has_broken(&self) -> bool {
        *self.0.borrow()
    }

    /// Returns true if the stream is closed, for whatever reason.
    pub(super) fn is_over(&self) -> bool {
        self.0.is_closed()
    }

    /// Waits until the stream is closed, for whatever reason.
    pub(super) async fn over(&self) {
        self.0.closed().await;
    }
}

/// A stream that can be broken.
struct Breakable {
    stream: Stream,
    /// Ends when the stream breaks.
    broken: BoxFuture<'static, ()>,
}

impl AsyncRead for Breakable {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        // hyper always reads from an open connection, so it notices at once.
        if self.broken.poll_unpin(context).is_ready() {
            self.broken = futures::future::ready(()).boxed();
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::ConnectionAborted, CertificateReplaced)));
        }
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Breakable {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

/// The body of a response on a connection that can be broken.
pub(super) struct ResponseBody {
    pub(super) body: Incoming,
    pub(super) breaker: Breaker,
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        Poll::Ready(frame.map(|frame| match frame {
            Err(_) if self.breaker.has_broken() => Err(CertificateReplaced.into()),
            frame => frame.map_err(Into::into),
        }))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http::{Request, Response};
    use http_body_util::{BodyExt as _, Empty, StreamBody};
    use hyper::service::service_fn;
    use hyper_util::rt::{TokioExecutor, TokioIo};
    use tokio::io::duplex;

    use super::*;

    /// Serves a response over HTTP/2 that never ends, and returns its body and what breaks it.
    async fn endless_response() -> (ResponseBody, Breaker) {
        let (near, far) = duplex(1 << 16);
        let service = service_fn(async |_: Request<Incoming>| {
            let endless = futures::stream::pending::<Result<Frame<Bytes>, Infallible>>();
            Ok::<_, Infallible>(Response::new(StreamBody::new(endless)))
        });
        let server = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
        tokio::spawn(async move { server.serve_connection(TokioIo::new(far), service).await });
        let (breaker, stream) = Breaker::new(Box::new(near));
        let client = hyper::client::conn::http2::Builder::new(TokioExecutor::new());
        let (mut sender, connection) = client.handshake(TokioIo::new(stream)).await.expect("HTTP/2");
        tokio::spawn(connection);
        let request = Request::new(Empty::<Bytes>::new());
        let body = sender.send_request(request).await.expect("a response").into_body();
        (ResponseBody { body, breaker: breaker.clone() }, breaker)
    }

    #[tokio::test(start_paused = true)]
    async fn a_broken_connection_ends_an_open_response_of_http2() {
        let (mut body, breaker) = endless_response().await;
        assert!(!breaker.is_over() && !breaker.has_broken());
        breaker.break_now();
        let error = body.frame().await.expect("an error").expect_err("the response cannot go on");
        assert!(error.is::<CertificateReplaced>(), "{error}");
        breaker.over().await;
        assert!(breaker.has_broken());
    }

    #[tokio::test(start_paused = true)]
    async fn a_response_goes_on_without_senders_and_breakers() {
        let (mut body, breaker) = endless_response().await;
        drop(breaker);
        let waited = tokio::time::timeout(std::time::Duration::from_mins(10), body.frame()).await;
        assert!(waited.is_err(), "it neither ends nor breaks");
    }
}
