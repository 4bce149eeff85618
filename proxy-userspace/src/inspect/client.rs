//! The command's side: asks the daemon of this network namespace.

use std::{
    io,
    marker::PhantomData,
    os::{
        linux::net::SocketAddrExt as _,
        unix::net::{SocketAddr as UnixAddress, UnixStream as StdStream},
    },
    time::Duration,
};

use http::{Request, StatusCode, header::HOST};
use http_body_util::{BodyExt as _, Empty};
use hyper::{
    body::{Bytes, Incoming},
    client::conn::http1::{self, SendRequest},
};
use hyper_util::rt::TokioIo;
use memchr::memchr;
use serde::{Serialize, de::DeserializeOwned};
use tokio::{net::UnixStream, time::timeout};

use super::{CountedPort, EndpointFlows, Resource, Row, SOCKET, ServiceName, explained::ExplainQuery};
use crate::{
    explain::{Explanation, NamedQuestion},
    health::{NodeReport, ReportedMap, is_trusted},
    trace::{TraceFilter, TraceRecord},
};

/// How long an answer, or the next part of it, may take. The daemon gives up earlier.
const PATIENCE: Duration = Duration::from_secs(30);

/// The daemon did not answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No daemon listens.
    #[error(
        "no shunt runs in this network namespace: run the command on the node, or in the pod of shunt with kubectl exec"
    )]
    NotRunning(#[source] io::Error),
    /// Another process has the name of the socket.
    #[error(
        "a process of the user {0} has the socket @shunt/inspect, and shunt runs as root or as the own user"
    )]
    Impostor(u32),
    /// The daemon answers no processes of this user.
    #[error("shunt ended the connection: it answers only processes of root and of its own user")]
    Refused(#[source] hyper::Error),
    /// The daemon cannot answer now.
    #[error("{0}")]
    Unavailable(String),
    /// The answer broke off, or is of another version.
    #[error("cannot read the answer of shunt")]
    Broken(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// Nothing came for too long.
    #[error("shunt does not answer within {} s", PATIENCE.as_secs())]
    Late,
}

/// A connection to the daemon.
#[derive(Debug)]
pub struct Client {
    sender: SendRequest<Empty<Bytes>>,
}

impl Client {
    /// Connects to the daemon of this thread's network namespace.
    pub async fn connect() -> Result<Self, ClientError> {
        let stream = connect().map_err(ClientError::NotRunning)?;
        let user = stream.peer_cred().map_err(ClientError::NotRunning)?.uid();
        if !is_trusted(user) {
            return Err(ClientError::Impostor(user));
        }
        let (sender, connection) =
            http1::handshake(TokioIo::new(stream)).await.map_err(ClientError::Refused)?;
        tokio::spawn(connection);
        Ok(Self { sender })
    }

    /// Reads a list, and hands over each row as it comes.
    pub async fn list<T: Row>(
        &mut self,
        resource: Resource,
        filter: &impl Serialize,
        mut on_row: impl FnMut(T),
    ) -> Result<(), ClientError> {
        let mut lines = self.lines(&format!("/v1/get/{}", resource.path()), filter).await?;
        while let Some(rows) = lines.next().await? {
            rows.into_iter().for_each(&mut on_row);
        }
        Ok(())
    }

    /// Begins a trace. The daemon ends it when this connection ends.
    pub async fn trace(&mut self, filter: &TraceFilter) -> Result<Lines<TraceRecord>, ClientError> {
        self.lines("/v1/trace", filter).await
    }

    async fn lines<T>(&mut self, path: &str, query: &impl Serialize) -> Result<Lines<T>, ClientError> {
        Ok(Lines { body: self.get(path, query).await?, rest: Vec::new(), document: PhantomData })
    }

    /// Explains a connection. With `check`, the answer says where model and kernel differ.
    pub async fn explain(
        &mut self,
        question: &NamedQuestion,
        check: bool,
    ) -> Result<Explanation, ClientError> {
        self.one("/v1/explain", &ExplainQuery::new(question, check)).await
    }

    /// Says why a Service is not served. `None` if that is not known.
    pub async fn unserved(&mut self, service: &ServiceName) -> Option<String> {
        let mut body = self.get("/v1/unserved", service).await.ok()?;
        let mut text = Vec::new();
        while let Some(part) = next_part(&mut body).await.ok()? {
            text.extend_from_slice(&part);
        }
        String::from_utf8(text).ok()
    }

    /// Returns what the process reports about itself.
    pub async fn node(&mut self) -> Result<NodeReport, ClientError> {
        self.one("/v1/node", &()).await
    }

    /// Returns an answer as it is, at most `limit` bytes of it.
    pub async fn text(&mut self, path: &str, limit: usize) -> Result<Vec<u8>, ClientError> {
        let mut body = self.get(path, &()).await?;
        let mut text = Vec::new();
        while text.len() < limit
            && let Some(part) = next_part(&mut body).await?
        {
            text.extend_from_slice(&part);
        }
        text.truncate(limit);
        Ok(text)
    }

    /// Returns the counts of the service ports that are counted.
    pub async fn counts(&mut self) -> Result<Vec<CountedPort>, ClientError> {
        self.one("/v1/counts", &()).await
    }

    /// Returns how full maps are. Empty in modes without maps.
    pub async fn maps(&mut self) -> Result<Vec<ReportedMap>, ClientError> {
        self.one("/v1/maps", &()).await
    }

    /// Returns the open flows of a Service by endpoint.
    pub async fn open_flows(&mut self, service: &ServiceName) -> Result<Vec<EndpointFlows>, ClientError> {
        self.one("/v1/open-flows", service).await
    }

    async fn one<T: DeserializeOwned>(
        &mut self,
        path: &str,
        query: &impl Serialize,
    ) -> Result<T, ClientError> {
        let mut body = self.get(path, query).await?;
        let mut text = Vec::new();
        while let Some(part) = next_part(&mut body).await? {
            text.extend_from_slice(&part);
        }
        decode(&text)
    }

    async fn get(&mut self, path: &str, query: &impl Serialize) -> Result<Incoming, ClientError> {
        let broken = |error: Box<dyn std::error::Error + Send + Sync>| ClientError::Broken(error);
        let query = serde_urlencoded::to_string(query).map_err(|error| broken(error.into()))?;
        let separator = if path.contains('?') { '&' } else { '?' };
        let request =
            Request::get(format!("{path}{separator}{query}")).header(HOST, "shunt").body(Empty::new());
        let request = request.map_err(|error| broken(error.into()))?;
        let sent = async {
            self.sender.ready().await?;
            self.sender.send_request(request).await
        };
        let answer = timeout(PATIENCE, sent).await.map_err(|_| ClientError::Late)?;
        let answer = answer.map_err(ClientError::Refused)?;
        let status = answer.status();
        let mut body = answer.into_body();
        if status == StatusCode::OK {
            return Ok(body);
        }
        let mut text = Vec::new();
        while let Some(part) = next_part(&mut body).await? {
            text.extend_from_slice(&part);
        }
        let why = String::from_utf8_lossy(&text);
        Err(ClientError::Unavailable(if why.is_empty() {
            format!("shunt answers {status}")
        } else {
            why.into()
        }))
    }
}

/// Documents that come one a line.
#[derive(Debug)]
pub struct Lines<T> {
    body: Incoming,
    /// The beginning of a line whose end has not come.
    rest: Vec<u8>,
    document: PhantomData<T>,
}

impl<T: DeserializeOwned> Lines<T> {
    /// Waits for the next documents. Returns `None` at the end.
    pub async fn next(&mut self) -> Result<Option<Vec<T>>, ClientError> {
        let Some(part) = next_part(&mut self.body).await? else { return Ok(None) };
        self.rest.extend_from_slice(&part);
        let (mut documents, mut read) = (Vec::new(), 0);
        while let Some(length) = memchr(b'\n', &self.rest[read..]) {
            documents.push(decode(&self.rest[read..read + length])?);
            read += length + 1;
        }
        self.rest.drain(..read);
        Ok(Some(documents))
    }
}

fn connect() -> io::Result<UnixStream> {
    let stream = StdStream::connect_addr(&UnixAddress::from_abstract_name(SOCKET)?)?;
    stream.set_nonblocking(true)?;
    UnixStream::from_std(stream)
}

/// Returns the next bytes of an answer. `None` at its end.
async fn next_part(body: &mut Incoming) -> Result<Option<Bytes>, ClientError> {
    loop {
        let frame = timeout(PATIENCE, body.frame()).await.map_err(|_| ClientError::Late)?;
        match frame.transpose().map_err(|error| ClientError::Broken(error.into()))? {
            None => return Ok(None),
            Some(frame) => {
                if let Ok(data) = frame.into_data() {
                    return Ok(Some(data));
                }
            }
        }
    }
}

fn decode<T: DeserializeOwned>(text: &[u8]) -> Result<T, ClientError> {
    serde_json::from_slice(text).map_err(|error| ClientError::Broken(error.into()))
}
