//! Sends requests and reads responses, with a time limit on each wait.

use std::{pin::Pin, time::Duration};

use futures::io::{AsyncBufRead, AsyncBufReadExt as _};
use tokio::time::timeout;

use super::{failure::Failure, request::HttpRequest};

/// The body of a response.
pub(super) struct Response {
    body: Pin<Box<dyn AsyncBufRead + Send>>,
    line: Vec<u8>,
}

/// The result of a read from a watch.
#[derive(Debug)]
pub(super) enum Line {
    /// A complete line.
    Complete(Vec<u8>),
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
    match timeout(limit, client.request_stream(request)).await {
        Ok(Ok(body)) => Ok(Response { body: Box::pin(body), line: Vec::new() }),
        Ok(Err(error)) => Err(Failure::request(&error)),
        Err(_) => Err(Failure::timeout(limit)),
    }
}

impl Response {
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

    /// Reads the next line that is not blank. The future may be dropped and created again: nothing
    /// is lost.
    pub(super) async fn next_line(&mut self, limit: Duration) -> Result<Line, Failure> {
        loop {
            let buffer = match timeout(limit, self.body.fill_buf()).await {
                Ok(Ok(buffer)) => buffer,
                Ok(Err(error)) => return Err(Failure::disconnected(&error)),
                Err(_) => return Ok(Line::Timeout),
            };
            if buffer.is_empty() {
                // An incomplete line is dropped: the next watch sends it again.
                return Ok(Line::End);
            }
            let end = memchr::memchr(b'\n', buffer);
            let length = end.map_or(buffer.len(), |end| end + 1);
            self.line.extend_from_slice(buffer.get(..length).unwrap_or_default());
            self.body.as_mut().consume(length);
            if end.is_some() {
                let line = std::mem::take(&mut self.line);
                if !line.trim_ascii().is_empty() {
                    return Ok(Line::Complete(line));
                }
            }
        }
    }
}
