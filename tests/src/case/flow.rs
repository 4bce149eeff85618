//! A flow of a case: which host opens which connections, and what must be the result.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use serde::Deserialize;

use crate::{
    agent::protocol::{ConnectRequest, Protocol, SendRequest},
    world::{Host, RESERVED_PORTS, is_valid_source_port},
};

/// A flow.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(try_from = "FlowKeys")]
pub struct Flow {
    /// The host that acts.
    pub from: Host,
    /// What the host does.
    pub action: Action,
    /// The expected result.
    pub expect: Expectation,
}

/// The action of a flow.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Opens new connections. The runner sets the order and the timeout of the attempts.
    Connect(ConnectRequest),
    /// Uses a connection that an earlier flow kept open.
    Send(Send),
    /// Fetches this URL.
    Get(String),
}

/// Another use of an open connection.
#[derive(Clone, Debug, PartialEq)]
pub struct Send {
    /// The request. The runner sets its timeout.
    pub request: SendRequest,
    /// The number of sends. The expectation holds for all together.
    pub sends: usize,
    /// The pause between two of them.
    pub pause: Duration,
    /// The maximum number of attempts until the expectation holds.
    pub tries: usize,
    /// If true, a prompt error counts as an answer.
    pub or_error: bool,
}

/// The expected result of a flow.
#[derive(Clone, Debug, PartialEq)]
pub enum Expectation {
    /// Every attempt is answered.
    Reach(ExpectedAnswers),
    /// Every attempt is refused.
    Refused,
    /// No attempt is answered.
    Blocked,
    /// No attempt receives anything, not even an error.
    Silent,
    /// Every attempt ends with a reset of its connection.
    Reset,
    /// Every attempt gets the error that its message is too big for the path.
    TooBig,
    /// The page has this content.
    Page(ExpectedPage),
}

/// The hosts that must answer, and how.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpectedAnswers {
    /// Exactly these hosts; with `sticky`, one of them.
    pub hosts: BTreeSet<Host>,
    /// All attempts reach the same host.
    pub sticky: bool,
    /// The share of each host in the answers is in this range.
    pub share: Option<(f64, f64)>,
    /// The client address that the answering hosts must see.
    pub source: Option<Source>,
    /// The destination that the answering hosts must see, before the connection was redirected.
    pub original: Option<SocketAddr>,
    /// The maximum number of TCP segments that all hosts together may retransmit.
    pub retransmits: Option<u64>,
    /// The peer that the socket must report.
    pub peer: Peer,
}

/// The peer that the caller's socket must report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Peer {
    /// The VIP.
    #[default]
    Destination,
    /// Any peer. The socket was connected to an endpoint by a program that no longer exists.
    Any,
}

/// A client address as the answering host sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    /// The caller's own address.
    Client,
    /// An address of node1.
    Node,
}

/// The expected content of a page.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct ExpectedPage {
    /// The status code.
    pub status: Option<u16>,
    /// A part of the body as JSON: every given field must exist with this value.
    pub json: Option<serde_json::Value>,
    /// Headers with their values.
    pub header: BTreeMap<String, String>,
    /// A text that the body contains.
    pub contains: Option<String>,
}

/// The keys of a flow in the case file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FlowKeys {
    from: Host,
    to: Option<SocketAddr>,
    proto: Option<Protocol>,
    mode: Option<Mode>,
    n: Option<usize>,
    size: Option<usize>,
    answer: Option<usize>,
    retransmits: Option<u64>,
    peer: Option<Peer>,
    sport: Option<u16>,
    sources: Option<Vec<IpAddr>>,
    pause: Option<f64>,
    hold: Option<String>,
    send: Option<String>,
    tries: Option<usize>,
    or_error: Option<bool>,
    http: Option<String>,
    reach: Option<BTreeSet<Host>>,
    result: Option<ResultKey>,
    source: Option<Source>,
    original: Option<SocketAddr>,
    share: Option<(f64, f64)>,
    sticky: Option<bool>,
    status: Option<u16>,
    json: Option<serde_json::Value>,
    header: Option<BTreeMap<String, String>>,
    contains: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Mode {
    Connected,
    Unconnected,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum ResultKey {
    Refused,
    Blocked,
    Silent,
    Reset,
    TooBig,
}

impl TryFrom<FlowKeys> for Flow {
    type Error = String;

    fn try_from(mut keys: FlowKeys) -> Result<Self, String> {
        let from = keys.from;
        let action = match (keys.to.take(), keys.send.take(), keys.http.take()) {
            (Some(to), None, None) => Action::Connect(keys.connect(to)?),
            (None, Some(id), None) => Action::Send(keys.send(id)?),
            (None, None, Some(url)) => Action::Get(url),
            _ => return Err("a flow has exactly one of `to`, `send` and `http`".to_owned()),
        };
        let expect = match &action {
            Action::Get(_) => keys.expect_page()?,
            Action::Connect(_) | Action::Send(_) => keys.expect_answers()?,
        };
        if let Some(key) = keys.unused_key() {
            return Err(format!("`{key}` has no meaning together with the flow's other keys"));
        }
        Ok(Self { from, action, expect })
    }
}

impl FlowKeys {
    fn connect(&mut self, to: SocketAddr) -> Result<ConnectRequest, String> {
        let protocol = self.proto.take().ok_or("a flow with `to` needs `proto`: tcp or udp")?;
        let unconnected = self.mode.take() == Some(Mode::Unconnected);
        if unconnected && protocol != Protocol::Udp {
            return Err("`mode: unconnected` needs `proto: udp`".to_owned());
        }
        let n = at_least_one("n", self.n.take())?;
        let hold = self.hold.take();
        if hold.is_some() && n > 1 {
            return Err(format!("`hold` keeps one connection, `n` is {n}"));
        }
        let sources = self.sources.take().unwrap_or_default();
        if let Some(source) = sources.iter().find(|source| source.is_ipv4() != to.is_ipv4()) {
            return Err(format!("`sources`: {source} is of another family than {to}"));
        }
        let pause = self.pause()?;
        let size = at_least_one("size", self.size.take())?;
        let answer = self.answer.take().unwrap_or(0);
        let source_port = self.sport.take();
        if let Some(port) = source_port.filter(|port| !is_valid_source_port(*port)) {
            return Err(format!(
                "`sport` {port} may be in use by a socket without a fixed port: use one below 32768 or in {RESERVED_PORTS:?}"
            ));
        }
        let request = ConnectRequest::new(to, protocol, n);
        Ok(ConnectRequest { unconnected, size, answer, source_port, sources, pause, hold, ..request })
    }

    fn pause(&mut self) -> Result<Duration, String> {
        let seconds = self.pause.take().unwrap_or(0.0);
        Duration::try_from_secs_f64(seconds).map_err(|error| format!("`pause` {seconds}: {error}"))
    }

    fn send(&mut self, id: String) -> Result<Send, String> {
        let size = at_least_one("size", self.size.take())?;
        let tries = at_least_one("tries", self.tries.take())?;
        let answer = self.answer.take().unwrap_or(0);
        let request = SendRequest { id, size, answer, timeout: Duration::ZERO };
        let (sends, pause) = (at_least_one("n", self.n.take())?, self.pause()?);
        Ok(Send { request, sends, pause, tries, or_error: self.or_error.take().unwrap_or(false) })
    }

    fn expect_answers(&mut self) -> Result<Expectation, String> {
        match (self.reach.take(), self.result.take()) {
            (None, Some(outcome)) => Ok(outcome.into()),
            (Some(hosts), None) if !hosts.is_empty() => {
                let share = self.share.take();
                let sticky = self.sticky.take().unwrap_or(false);
                let (source, retransmits) = (self.source.take(), self.retransmits.take());
                let (original, peer) = (self.original.take(), self.peer.take().unwrap_or_default());
                let answers = ExpectedAnswers { hosts, sticky, share, source, original, retransmits, peer };
                Ok(Expectation::Reach(answers))
            }
            (Some(_), None) => Err("`reach` names no host".to_owned()),
            _ => Err("a flow needs exactly one of `reach` and `result`".to_owned()),
        }
    }

    fn expect_page(&mut self) -> Result<Expectation, String> {
        let page = ExpectedPage {
            status: self.status.take(),
            json: self.json.take(),
            header: self.header.take().unwrap_or_default(),
            contains: self.contains.take(),
        };
        match self.result.take() {
            Some(outcome) if page == ExpectedPage::default() => Ok(outcome.into()),
            Some(_) => Err("`result` means that there is no answer; `status`, `json`, `header` and `contains` ask for one".to_owned()),
            None if page == ExpectedPage::default() => {
                Err("a flow with `http` needs `status`, `json`, `header`, `contains` or `result`".to_owned())
            }
            None => Ok(Expectation::Page(page)),
        }
    }

    /// Returns a key that the flow does not use.
    fn unused_key(&self) -> Option<&'static str> {
        let keys = [
            ("proto", self.proto.is_some()),
            ("mode", self.mode.is_some()),
            ("n", self.n.is_some()),
            ("size", self.size.is_some()),
            ("answer", self.answer.is_some()),
            ("retransmits", self.retransmits.is_some()),
            ("peer", self.peer.is_some()),
            ("sport", self.sport.is_some()),
            ("sources", self.sources.is_some()),
            ("pause", self.pause.is_some()),
            ("hold", self.hold.is_some()),
            ("tries", self.tries.is_some()),
            ("or_error", self.or_error.is_some()),
            ("reach", self.reach.is_some()),
            ("source", self.source.is_some()),
            ("original", self.original.is_some()),
            ("share", self.share.is_some()),
            ("sticky", self.sticky.is_some()),
            ("status", self.status.is_some()),
            ("json", self.json.is_some()),
            ("header", self.header.is_some()),
            ("contains", self.contains.is_some()),
        ];
        keys.into_iter().find_map(|(key, given)| given.then_some(key))
    }
}

impl From<ResultKey> for Expectation {
    fn from(outcome: ResultKey) -> Self {
        match outcome {
            ResultKey::Refused => Self::Refused,
            ResultKey::Blocked => Self::Blocked,
            ResultKey::Silent => Self::Silent,
            ResultKey::Reset => Self::Reset,
            ResultKey::TooBig => Self::TooBig,
        }
    }
}

fn at_least_one(key: &str, value: Option<usize>) -> Result<usize, String> {
    match value.unwrap_or(1) {
        0 => Err(format!("`{key}` is 0; it must be at least 1")),
        value => Ok(value),
    }
}

fn write_count(f: &mut fmt::Formatter<'_>, count: usize) -> fmt::Result {
    if count > 1 { write!(f, " x{count}") } else { Ok(()) }
}

/// Formats a flow as in "a2 tcp 10.96.0.10:80 x24".
impl fmt::Display for Flow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ", self.from)?;
        match &self.action {
            Action::Get(url) => write!(f, "GET {url}"),
            Action::Send(send) => {
                write!(f, "send {}", send.request.id)?;
                write_count(f, send.sends)
            }
            Action::Connect(connect) => {
                let protocol = connect.protocol;
                let mode = if connect.unconnected { " unconnected" } else { "" };
                write!(f, "{protocol}{mode} {}", connect.to)?;
                write_count(f, connect.attempts)?;
                connect.hold.iter().try_for_each(|id| write!(f, " hold {id}"))
            }
        }
    }
}

/// Formats an expectation as in "reach a1 b1, seeing the caller's own address".
impl fmt::Display for Expectation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused => write!(f, "every attempt refused"),
            Self::Blocked => write!(f, "no attempt answered"),
            Self::Silent => write!(f, "every attempt without an answer or an error"),
            Self::Reset => write!(f, "every attempt reset"),
            Self::TooBig => write!(f, "every attempt too big"),
            Self::Reach(answers) => answers.fmt(f),
            Self::Page(page) => page.fmt(f),
        }
    }
}

impl fmt::Display for ExpectedAnswers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hosts: Vec<_> = self.hosts.iter().map(|host| host.name()).collect();
        let how = if self.sticky { "always the same one of" } else { "reach" };
        write!(f, "{how} {}", hosts.join(" "))?;
        if let Some((low, high)) = self.share {
            write!(f, ", each with {low} to {high} of the answers")?;
        }
        match self.source {
            Some(Source::Client) => write!(f, ", seeing the caller's own address"),
            Some(Source::Node) => write!(f, ", seeing an address of node1"),
            None => Ok(()),
        }?;
        self.original
            .iter()
            .try_for_each(|original| write!(f, ", seeing the original destination {original}"))?;
        self.retransmits.iter().try_for_each(|most| write!(f, ", at most {most} segments retransmitted"))
    }
}

impl fmt::Display for ExpectedPage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = Vec::new();
        parts.extend(self.status.map(|status| format!("status {status}")));
        parts.extend(self.header.iter().map(|(name, value)| format!("header {name}: {value}")));
        parts.extend(self.json.iter().map(|json| format!("JSON with {json}")));
        parts.extend(self.contains.iter().map(|text| format!("a body with {text:?}")));
        f.write_str(&parts.join(", "))
    }
}
