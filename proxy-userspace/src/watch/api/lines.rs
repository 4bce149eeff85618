//! Sends requests and reads answers, never waiting for longer than it should.

use std::{pin::Pin, time::Duration};

use futures::io::{AsyncBufRead, AsyncBufReadExt as _, AsyncReadExt as _};
use tokio::time::timeout;

use super::{failure::Failure, kind::HttpRequest};

type Body = Pin<Box<dyn AsyncBufRead + Send>>;

/// The body of an answer.
pub(super) struct Answer {
    body: Body,
    line: Vec<u8>,
}

/// How a read from a watch ended.
#[derive(Debug)]
pub(super) enum Line {
    /// A complete line.
    Text(Vec<u8>),
    /// The server has ended the answer between two lines.
    End,
    /// Nothing came for too long.
    Idle,
}

/// Sends a request and waits for the head of the answer. Error statuses are failures.
pub(super) async fn send(
    client: &kube::Client,
    request: Result<HttpRequest, kube::Error>,
    limit: Duration,
) -> Result<Answer, Failure> {
    let request = request.map_err(|error| Failure::request(&error))?;
    match timeout(limit, client.request_stream(request)).await {
        Ok(Ok(body)) => Ok(Answer { body: Box::pin(body), line: Vec::new() }),
        Ok(Err(error)) => Err(Failure::request(&error)),
        Err(_) => Err(Failure::slow(limit)),
    }
}

impl Answer {
    /// The whole body.
    pub(super) async fn read_to_end(mut self, limit: Duration) -> Result<Vec<u8>, Failure> {
        let mut bytes = Vec::new();
        let mut part = vec![0; 64 << 10];
        loop {
            match timeout(limit, self.body.read(&mut part)).await {
                Ok(Ok(0)) => return Ok(bytes),
                Ok(Ok(length)) => bytes.extend_from_slice(part.get(..length).unwrap_or_default()),
                Ok(Err(error)) => return Err(Failure::cut(&error)),
                Err(_) => return Err(Failure::slow(limit)),
            }
        }
    }

    /// The next line. May be dropped and called again without loss.
    pub(super) async fn next(&mut self, limit: Duration) -> Result<Line, Failure> {
        loop {
            let buffer = match timeout(limit, self.body.fill_buf()).await {
                Ok(Ok(buffer)) => buffer,
                Ok(Err(error)) => return Err(Failure::cut(&error)),
                Err(_) => return Ok(Line::Idle),
            };
            if buffer.is_empty() {
                // What was begun is incomplete; it is sent again by the next watch.
                return Ok(Line::End);
            }
            let end = buffer.iter().position(|byte| *byte == b'\n');
            let length = end.map_or(buffer.len(), |end| end + 1);
            self.line.extend_from_slice(buffer.get(..length).unwrap_or_default());
            self.body.as_mut().consume(length);
            if end.is_some() {
                let line = std::mem::take(&mut self.line);
                if !line.trim_ascii().is_empty() {
                    return Ok(Line::Text(line));
                }
            }
        }
    }
}
