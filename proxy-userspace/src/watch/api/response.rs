//! Sends requests and reads responses, with a time limit on each wait.

use std::{io, pin::Pin, time::Duration};

use bytes::{Bytes, BytesMut};
use futures::{
    TryStreamExt as _,
    io::{AsyncBufRead, AsyncBufReadExt as _},
};
use http::header::CONTENT_TYPE;
use http_body_util::{BodyExt as _, Limited};
use kube::client::Body;
use tokio::time::timeout;

use super::{
    failure::Failure,
    request::HttpRequest,
    wire::{MAX_MESSAGE, Status, encoding_of},
};
use crate::{causes::with_causes, net::ContentType};

/// The size of the number before each event of protobuf, its length in big-endian byte order
/// (`LengthDelimitedFramer` in `k8s.io/apimachinery`).
const LENGTH_SIZE: usize = 4;
/// The most bytes that are read of the answer to a request that failed.
const MAX_ERROR: usize = 1 << 20;
/// The most characters of an answer without a `Status` that are shown, as with client-go.
const MAX_ERROR_TEXT: usize = 2048;

/// The body of a response.
pub(super) struct Response {
    encoding: ContentType,
    body: Pin<Box<dyn AsyncBufRead + Send>>,
    /// The present event so far.
    event: BytesMut,
}

/// The result of a read from a watch.
#[derive(Debug)]
pub(super) enum Part {
    /// A complete event: a line of JSON, or a message of protobuf.
    Event(Bytes),
    /// The server ended the response.
    End,
    /// Nothing came within the time limit.
    Timeout,
}

/// Sends a request and waits for the head of the response. Error statuses are failures.
pub(super) async fn send(
    client: &kube::Client,
    request: HttpRequest,
    limit: Duration,
) -> Result<Response, Failure> {
    match timeout(limit, open(client, request)).await {
        Ok(result) => result,
        Err(_) => Err(Failure::timeout(limit)),
    }
}

async fn open(client: &kube::Client, request: HttpRequest) -> Result<Response, Failure> {
    let response = client.send(request.map(Body::from)).await.map_err(|error| Failure::request(&error))?;
    let encoding = encoding_of(response.headers().get(CONTENT_TYPE));
    let code = response.status();
    if code.is_client_error() || code.is_server_error() {
        return Err(failure(code.as_u16(), encoding, response.into_body()).await);
    }
    let body = response.into_body().into_data_stream().map_err(io::Error::other).into_async_read();
    Ok(Response { encoding, body: Box::pin(body), event: BytesMut::new() })
}

/// Reads the answer to a request that failed. An answer without a `Status` may come from a proxy.
async fn failure(code: u16, encoding: ContentType, body: Body) -> Failure {
    let body = match Limited::new(body, MAX_ERROR).collect().await {
        Ok(body) => body.to_bytes(),
        Err(error) => {
            return Failure::status(code, &format!("the answer cannot be read: {}", with_causes(&*error)));
        }
    };
    match Status::of_response(&body, encoding) {
        Ok(status) if status.code != 0 => status.failure(),
        _ => Failure::status(code, &shown(&body)),
    }
}

/// Returns the first part of a text as one line.
fn shown(body: &[u8]) -> String {
    let text = String::from_utf8_lossy(body);
    text.trim().chars().take(MAX_ERROR_TEXT).flat_map(char::escape_debug).collect()
}

impl Response {
    /// Returns how objects in the body are written.
    pub(super) fn encoding(&self) -> ContentType {
        self.encoding
    }

    /// Reads the next bytes and calls `take` with them. Returns false at the end.
    pub(super) async fn read(
        &mut self,
        limit: Duration,
        take: impl FnOnce(&[u8]) -> Result<(), Failure>,
    ) -> Result<bool, Failure> {
        let buffer = match timeout(limit, self.body.fill_buf()).await {
            Ok(Ok(buffer)) => buffer,
            Ok(Err(error)) => return Err(Failure::disconnected(&error)),
            Err(_) => return Err(Failure::timeout(limit)),
        };
        let length = buffer.len();
        take(buffer)?;
        self.body.as_mut().consume(length);
        Ok(length > 0)
    }

    /// Reads the next event of a watch. The future may be dropped and created again: nothing is
    /// lost.
    pub(super) async fn next_event(&mut self, limit: Duration) -> Result<Part, Failure> {
        loop {
            let buffer = match timeout(limit, self.body.fill_buf()).await {
                Ok(Ok(buffer)) => buffer,
                Ok(Err(error)) => return Err(Failure::disconnected(&error)),
                Err(_) => return Ok(Part::Timeout),
            };
            if buffer.is_empty() {
                // An incomplete event is dropped: the next watch sends it again.
                return Ok(Part::End);
            }
            let (length, is_line) = match self.encoding {
                ContentType::Json => line(buffer),
                ContentType::Protobuf => (missing(&self.event)?.min(buffer.len()), false),
            };
            self.event.extend_from_slice(&buffer[..length]);
            self.body.as_mut().consume(length);
            if is_line {
                let line = self.event.split().freeze();
                if !line.trim_ascii().is_empty() {
                    return Ok(Part::Event(line));
                }
            } else if self.encoding == ContentType::Protobuf && missing(&self.event)? == 0 {
                return Ok(Part::Event(self.event.split().freeze().split_off(LENGTH_SIZE)));
            }
        }
    }
}

/// Returns how many bytes of `buffer` belong to the present line, and whether it is complete then.
fn line(buffer: &[u8]) -> (usize, bool) {
    let end = memchr::memchr(b'\n', buffer);
    (end.map_or(buffer.len(), |end| end + 1), end.is_some())
}

/// Returns how many bytes are missing to an event of protobuf, whose first bytes are given. Until
/// its length is there, these are the bytes of the length.
fn missing(event: &[u8]) -> Result<usize, Failure> {
    let Some(length) = event.first_chunk::<LENGTH_SIZE>() else { return Ok(LENGTH_SIZE - event.len()) };
    let length = u32::from_be_bytes(*length) as usize;
    if length > MAX_MESSAGE {
        return Err(Failure::invalid(format!("an event has {length} bytes; the limit is {MAX_MESSAGE}")));
    }
    Ok(LENGTH_SIZE + length - event.len())
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(5);

    /// Returns a response whose body comes in parts of this size.
    fn response(body: &[u8], size: usize, encoding: ContentType) -> Response {
        let parts: Vec<_> = body.chunks(size).map(|part| Ok(part.to_vec())).collect();
        let body = futures::stream::iter(parts).into_async_read();
        Response { encoding, body: Box::pin(body), event: BytesMut::new() }
    }

    async fn events(mut response: Response) -> Result<Vec<Bytes>, Failure> {
        let mut events = Vec::new();
        loop {
            match response.next_event(LIMIT).await? {
                Part::Event(event) => events.push(event),
                Part::End => return Ok(events),
                Part::Timeout => panic!("nothing comes from memory"),
            }
        }
    }

    #[tokio::test]
    async fn events_are_found_however_the_bytes_are_split() {
        let lines = b"{\"a\":1}\n\n \r\n{\"b\":2}\r\n{\"incomplete\":";
        let messages = b"\0\0\0\x03one\0\0\0\0\0\0\0\x05four\n\0\0\0\x09incompl";
        for size in [1, 2, 3, 7, 100] {
            let read = events(response(lines, size, ContentType::Json)).await.expect("lines");
            assert_eq!(read, [&b"{\"a\":1}\n"[..], b"{\"b\":2}\r\n"], "{size}");
            let read = events(response(messages, size, ContentType::Protobuf)).await.expect("messages");
            assert_eq!(read, [&b"one"[..], b"", b"four\n"], "{size}");
        }
    }

    /// Requests something from a server that gives this answer.
    async fn answered(code: u16, content_type: &'static str, body: &[u8]) -> Result<Response, Failure> {
        let body = body.to_vec();
        let service = tower::service_fn(move |_: http::Request<Body>| {
            let answer = http::Response::builder().status(code).header(CONTENT_TYPE, content_type);
            let answer = answer.body(Body::from(body.clone())).expect("a response");
            async move { Ok::<_, std::convert::Infallible>(answer) }
        });
        let request = http::Request::get("/api/v1/services").body(Vec::new()).expect("a request");
        send(&kube::Client::new(service, "default"), request, LIMIT).await
    }

    /// Returns the failure that an answer means.
    async fn refused(code: u16, content_type: &'static str, body: &[u8]) -> String {
        match answered(code, content_type, body).await {
            Ok(_) => panic!("{code} is no success"),
            Err(failure) => failure.to_string(),
        }
    }

    #[tokio::test]
    async fn a_refusal_is_read_in_every_encoding_and_a_page_of_a_proxy_is_cut() {
        const JSON: &str = "application/json";
        const PROTOBUF: &str = "application/vnd.kubernetes.protobuf";
        let status = Status { code: 410, message: "too old".to_owned() }.encode_to_vec();
        let envelope = [b"k8s\0\x12", &[u8::try_from(status.len()).expect("short")][..], &status].concat();
        let expired = "the requested resource version has expired (410): too old";
        assert_eq!(refused(410, PROTOBUF, &envelope).await, expired);
        assert_eq!(refused(410, JSON, br#"{"code": 410, "message": "too old"}"#).await, expired);
        let forbidden = "the credentials do not permit this (403): ";
        for (content_type, body, shown) in [
            ("text/html", &b"<p>\nno\n</p>\n"[..], "<p>\\nno\\n</p>"),
            (JSON, br#"{"message":"no route"}"#, r#"{\"message\":\"no route\"}"#),
            (PROTOBUF, b"<html>", "<html>"),
            (PROTOBUF, b"k8s\0", "k8s\\0"),
        ] {
            assert_eq!(refused(403, content_type, body).await, format!("{forbidden}{shown}"));
        }
        let long = refused(502, "text/html", &[b'x'; 9000]).await;
        assert!(long.ends_with('x') && long.len() < 3000, "{}", long.len());
        let endless = refused(502, "text/html", &vec![b'x'; 2 << 20]).await;
        assert!(endless.contains("(502): the answer cannot be read: "), "{endless}");
    }

    #[tokio::test]
    async fn the_server_chooses_the_encoding() {
        for (content_type, encoding) in [
            ("application/json", ContentType::Json),
            ("application/json;stream=watch", ContentType::Json),
            ("application/vnd.kubernetes.protobuf", ContentType::Protobuf),
            ("Application/Vnd.Kubernetes.Protobuf; stream=watch", ContentType::Protobuf),
            ("text/plain", ContentType::Json),
        ] {
            let response = answered(200, content_type, b"").await.expect("a response");
            assert_eq!(response.encoding(), encoding, "{content_type}");
        }
    }

    #[tokio::test]
    async fn a_body_without_lengths_is_refused() {
        let html = response(b"<html>no protobuf</html>", 9, ContentType::Protobuf);
        let failure = events(html).await.expect_err("a length of 1 GB");
        assert!(failure.to_string().contains("an event has 1013478509 bytes"), "{failure}");
    }
}
