//! Sends requests and reads responses, with a time limit on each wait.

use std::{mem, pin::Pin, time::Duration};

use bytes::{Buf as _, Bytes, BytesMut};
use futures::{Stream, StreamExt as _, TryStreamExt as _};
use http::header::CONTENT_TYPE;
use http_body_util::{BodyExt as _, Limited};
use kube::client::Body;
use serde::de::DeserializeOwned;
use tokio::time::timeout;
use tower::BoxError;

use super::{
    connection::{Origin, ResponseLimit},
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
    /// The server. None in tests that have none.
    origin: Option<Origin>,
    body: Pin<Box<dyn Stream<Item = Result<Bytes, BoxError>> + Send>>,
    /// The bytes that came and are not read yet.
    received: Bytes,
    /// The beginning of an event whose end is not in the bytes that came with it.
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

/// Sends a request and waits for the head of the response. Error statuses are failures. `limit`
/// does not include the time that a credential plugin takes.
pub(super) async fn send(
    client: &kube::Client,
    mut request: HttpRequest,
    limit: Duration,
) -> Result<Response, Failure> {
    request.extensions_mut().insert(ResponseLimit(limit));
    let response = client.send(request.map(Body::from)).await.map_err(|error| Failure::request(&error))?;
    let encoding = encoding_of(response.headers().get(CONTENT_TYPE));
    let code = response.status();
    if code.is_client_error() || code.is_server_error() {
        let failure = failure(code.as_u16(), encoding, response.into_body());
        let late = |_| Failure::status(code.as_u16(), "the text of the answer did not come in time");
        return Err(timeout(limit, failure).await.unwrap_or_else(late));
    }
    let origin = response.extensions().get().cloned();
    let body = response.into_body().into_data_stream().map_err(Into::into);
    Ok(Response { encoding, origin, body: Box::pin(body), received: Bytes::new(), event: BytesMut::new() })
}

/// Sends a request, and decodes the response as JSON. `limit` is for the head of the response, and
/// again for the rest.
pub(super) async fn request<T: DeserializeOwned>(
    client: &kube::Client,
    request: HttpRequest,
    limit: Duration,
) -> Result<T, Failure> {
    let mut response = send(client, request, limit).await?;
    let mut body = Vec::new();
    let read = async {
        while response.read(limit, |bytes| take(&mut body, bytes)).await? {}
        Ok(())
    };
    timeout(limit, read).await.unwrap_or_else(|_| Err(Failure::timeout(limit)))?;
    serde_json::from_slice(&body).map_err(Failure::invalid)
}

fn take(body: &mut Vec<u8>, bytes: &[u8]) -> Result<(), Failure> {
    if body.len() + bytes.len() > MAX_MESSAGE {
        return Err(Failure::invalid(format!("more than {MAX_MESSAGE} bytes, the limit of an object")));
    }
    body.extend_from_slice(bytes);
    Ok(())
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
        match timeout(limit, self.body.next()).await {
            Ok(Some(Ok(bytes))) => take(&bytes).map(|()| true),
            Ok(Some(Err(error))) => Err(Failure::disconnected(&*error)),
            Ok(None) => Ok(false),
            Err(_) => {
                self.leave_server();
                Err(Failure::timeout(limit))
            }
        }
    }

    /// Makes the next requests go to another server, or at least on another connection.
    fn leave_server(&self) {
        if let Some(origin) = &self.origin {
            origin.leave();
        }
    }

    /// Reads the next event of a watch. The future may be dropped and created again: nothing is
    /// lost.
    pub(super) async fn next_event(&mut self, limit: Duration) -> Result<Part, Failure> {
        loop {
            if let Some(event) = self.received_event()? {
                return Ok(Part::Event(event));
            }
            match timeout(limit, self.body.next()).await {
                Ok(Some(Ok(bytes))) => self.received = bytes,
                Ok(Some(Err(error))) => return Err(Failure::disconnected(&*error)),
                // An incomplete event is dropped: the next watch sends it again.
                Ok(None) => return Ok(Part::End),
                Err(_) => {
                    self.leave_server();
                    return Ok(Part::Timeout);
                }
            }
        }
    }

    /// Returns the next event of a watch if all of its bytes came.
    pub(super) fn received_event(&mut self) -> Result<Option<Bytes>, Failure> {
        while !self.received.is_empty() {
            let event = match self.encoding {
                ContentType::Json => self.received_line()?,
                ContentType::Protobuf => self.received_message()?,
            };
            if event.is_some() {
                return Ok(event);
            }
        }
        Ok(None)
    }

    /// Returns the next line if it is complete and not empty.
    fn received_line(&mut self) -> Result<Option<Bytes>, Failure> {
        let Some(end) = memchr::memchr(b'\n', &self.received) else {
            self.event.extend_from_slice(&mem::take(&mut self.received));
            if self.event.len() > MAX_MESSAGE {
                return Err(Failure::invalid(format!("a line has more than {MAX_MESSAGE} bytes, the limit")));
            }
            return Ok(None);
        };
        let mut line = self.received.split_to(end + 1);
        if !self.event.is_empty() {
            self.event.extend_from_slice(&line);
            line = self.event.split().freeze();
        }
        Ok((!line.trim_ascii().is_empty()).then_some(line))
    }

    /// Returns the next message if it is complete.
    fn received_message(&mut self) -> Result<Option<Bytes>, Failure> {
        if self.event.is_empty() {
            let size = message_size(&self.received)?;
            if self.received.len() >= size {
                let mut message = self.received.split_to(size);
                message.advance(LENGTH_SIZE);
                return Ok(Some(message));
            }
        }
        let missing = message_size(&self.event)? - self.event.len();
        let length = missing.min(self.received.len());
        self.event.extend_from_slice(&self.received.split_to(length));
        if self.event.len() < message_size(&self.event)? {
            return Ok(None);
        }
        Ok(Some(self.event.split().freeze().split_off(LENGTH_SIZE)))
    }
}

/// Returns the size of an event of protobuf with its length, from its first bytes. Until the whole
/// length is there, this is the size of the length.
fn message_size(event: &[u8]) -> Result<usize, Failure> {
    let Some(length) = event.first_chunk::<LENGTH_SIZE>() else { return Ok(LENGTH_SIZE) };
    let length = u32::from_be_bytes(*length) as usize;
    if length > MAX_MESSAGE {
        return Err(Failure::invalid(format!("an event has {length} bytes; the limit is {MAX_MESSAGE}")));
    }
    Ok(LENGTH_SIZE + length)
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(5);

    /// Returns a response whose body comes in parts of this size.
    fn response(body: &[u8], size: usize, encoding: ContentType) -> Response {
        let parts: Vec<_> = body.chunks(size).map(|part| Ok(Bytes::copy_from_slice(part))).collect();
        let body = futures::stream::iter(parts);
        Response {
            encoding,
            origin: None,
            body: Box::pin(body),
            received: Bytes::new(),
            event: BytesMut::new(),
        }
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

    #[tokio::test]
    async fn a_line_without_end_is_refused() {
        let endless = vec![b'x'; MAX_MESSAGE + 1];
        let failure = events(response(&endless, 1 << 20, ContentType::Json)).await.expect_err("too long");
        assert!(failure.to_string().contains("a line has more than 16777216 bytes"), "{failure}");
        let longest = events(response(&endless[1..], 1 << 20, ContentType::Json)).await;
        assert_eq!(longest.expect("an incomplete line").len(), 0);
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
