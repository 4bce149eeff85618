//! Fetches a page over HTTP from a host.

use std::collections::BTreeMap;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::{Request, Uri, client::conn::http1, header::HOST};
use hyper_util::rt::TokioIo;
use tokio::{net::TcpStream, time::timeout};

use super::protocol::{Failure, GetRequest, Page};

/// Larger than any page of the proxy. Without a limit, an answer could be endless.
const LARGEST_BODY: usize = 16 << 20;

/// Fetches a page from the address in the URL, on a new connection.
pub(super) async fn get(get: &GetRequest) -> Result<Page, Failure> {
    timeout(get.timeout, fetch(&get.url))
        .await
        .unwrap_or_else(|_| Err(Failure::timed_out("get the page", get.timeout)))
}

async fn fetch(url: &str) -> Result<Page, Failure> {
    let uri: Uri = url.parse().map_err(|error| Failure::other("read the URL", format!("{url}: {error}")))?;
    let authority =
        uri.authority().ok_or_else(|| Failure::other("read the URL", format!("{url} has no host")))?;
    let address = format!("{}:{}", authority.host(), authority.port_u16().unwrap_or(80));
    let stream = TcpStream::connect(&address).await.map_err(|error| Failure::new("connect", &error))?;
    let (mut sender, connection) =
        http1::handshake(TokioIo::new(stream)).await.map_err(|error| http_failure("connect", &error))?;
    tokio::spawn(connection);
    let path = uri.path_and_query().map_or("/", |path| path.as_str());
    let request = Request::get(path)
        .header(HOST, authority.as_str())
        .body(Empty::<Bytes>::new())
        .map_err(|error| Failure::other("make the request", error.to_string()))?;
    let answer = sender.send_request(request).await.map_err(|error| http_failure("receive", &error))?;
    let (head, body) = answer.into_parts();
    let body = Limited::new(body, LARGEST_BODY).collect().await;
    let body = body.map_err(|error| Failure::other("receive", error.to_string()))?.to_bytes();
    let headers: BTreeMap<_, _> = head
        .headers
        .iter()
        .map(|(name, value)| {
            (name.as_str().to_owned(), String::from_utf8_lossy(value.as_bytes()).into_owned())
        })
        .collect();
    Ok(Page { status: head.status.as_u16(), headers, body: String::from_utf8_lossy(&body).into_owned() })
}

/// Converts an error of hyper to a failure. hyper wraps the socket's error, whose kind decides
/// about the flow.
fn http_failure(operation: &str, error: &hyper::Error) -> Failure {
    let io = std::error::Error::source(error).and_then(|source| source.downcast_ref::<std::io::Error>());
    io.map_or_else(|| Failure::other(operation, error.to_string()), |io| Failure::new(operation, io))
}
