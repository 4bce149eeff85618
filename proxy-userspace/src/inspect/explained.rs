//! Answers `shunt explain`: asks the model, then the kernel for what only the kernel knows.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::{Path, PathBuf},
    sync::Arc,
};

use axum::{
    Json,
    extract::{Query, State},
    http::StatusCode,
    response::{IntoResponse as _, Response},
};
use serde::{Deserialize, Serialize};

use super::{
    affinity::{self, AffinityFilter, Wanted},
    drift::{Drift, unknown},
    kernel_rows::AffinityRow,
    server::NodeInspector,
};
use crate::{
    causes::with_causes,
    dataplane::{
        AffinityPort, Mode,
        ebpf::{Rehearsed, rehearse},
    },
    explain::{
        AffinityState, Check, ClientKind, Decision, Explanation, Hook, Location, NamedQuestion, Situation,
        Unresolved, Verdict, explain,
    },
    model::{IpFamily, LocalTrafficDetector, NamespacedName, PodPlace, Protocol, ServicePortKey},
    sync::{Inspected, Inspector, NoAnswer},
};

/// The query of `/v1/explain`: a [`NamedQuestion`], and whether to check the kernel.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ExplainQuery {
    from: String,
    client: ClientKind,
    to: String,
    outside_cgroup: bool,
    check: bool,
}

impl ExplainQuery {
    pub(super) fn new(question: &NamedQuestion, check: bool) -> Self {
        let NamedQuestion { from, client, to, outside_cgroup } = question;
        let (from, to) = (from.to_string(), to.to_string());
        Self { from, client: *client, to, outside_cgroup: *outside_cgroup, check }
    }

    fn question(&self) -> Result<NamedQuestion, String> {
        let Self { from, client, to, outside_cgroup, .. } = self;
        let (from, to) = (from.parse()?, to.parse()?);
        Ok(NamedQuestion { from, client: *client, to, outside_cgroup: *outside_cgroup })
    }
}

/// Why nothing is explained.
#[derive(Debug, thiserror::Error)]
pub enum NotExplained {
    /// The sync loop did not answer.
    #[error(transparent)]
    NoAnswer(#[from] NoAnswer),
    /// A name stands for nothing, or for several things.
    #[error("{0}")]
    Unknown(String),
    /// The kernel could not be asked.
    #[error("{0}")]
    Unchecked(String),
}

/// Answers a question. The error of a name that stands for nothing is a text with status 404.
pub(super) async fn answer(State(node): State<NodeInspector>, Query(query): Query<ExplainQuery>) -> Response {
    let question = match query.question() {
        Ok(question) => question,
        Err(error) => return (StatusCode::BAD_REQUEST, error).into_response(),
    };
    match node.explain(question, query.check).await {
        Ok(explanation) => Json(explanation).into_response(),
        Err(NotExplained::NoAnswer(error)) => error.into_response(),
        Err(NotExplained::Unknown(error)) => (StatusCode::NOT_FOUND, error).into_response(),
        Err(NotExplained::Unchecked(error)) => (StatusCode::SERVICE_UNAVAILABLE, error).into_response(),
    }
}

impl NodeInspector {
    /// Explains a connection. With `check`, asks the kernel whether it decides alike.
    pub async fn explain(&self, question: NamedQuestion, check: bool) -> Result<Explanation, NotExplained> {
        let mut answer = asked(&self.inspector, question.clone(), None).await?;
        if let Some(Err(Unresolved::Pod(name))) = answer {
            let place = self.pods.find(name).await.map_err(NotExplained::Unknown)?;
            answer = asked(&self.inspector, question, Some(place)).await?;
        }
        let asked = answer.ok_or(NoAnswer::NotRunning)?;
        let mut asked = match asked {
            Ok(asked) => asked,
            Err(Unresolved::Service(name, why)) => {
                return Err(NotExplained::Unknown(self.unserved(&name).await.unwrap_or(why)));
            }
            Err(error) => return Err(NotExplained::Unknown(error.to_string())),
        };
        asked.read_affinity(&self.pin_directory).await;
        if check {
            asked.check(self).await.map_err(NotExplained::Unchecked)?;
        }
        Ok(asked.explanation)
    }
}

/// What the model says, and what is needed to ask the kernel.
struct Asked {
    explanation: Explanation,
    protocol: Protocol,
    /// The service port of the destination.
    port: Option<AffinityPort>,
    /// Whose programs or rules decide. `None` if nothing sees the connection.
    rules: Option<Mode>,
    local_addresses: Vec<IpAddr>,
    /// Local detection looks at links.
    detects_links: bool,
}

/// Explains a connection. `None` while no mode runs.
async fn asked(
    inspector: &Inspector,
    question: NamedQuestion,
    pod: Option<PodPlace>,
) -> Result<Option<Result<Asked, Unresolved>>, NoAnswer> {
    let read = move |inspected: &Inspected<'_>| {
        let backstop = inspected.backstop.as_ref().map(|backstop| backstop.mode);
        let situation = Situation { model: inspected.model, mode: inspected.mode?, backstop };
        let question = question.resolve(situation.model, pod.as_ref());
        Some(question.map(|question| {
            let explanation = explain(situation, &question);
            let node = &situation.model.snapshot().node;
            Asked {
                protocol: question.protocol,
                port: port_of(situation, &explanation, question.protocol),
                rules: match explanation.hook {
                    Hook::Socket | Hook::Link => Some(Mode::Ebpf),
                    Hook::Netfilter => Some(situation.mode),
                    Hook::Backstop => backstop,
                    Hook::Nothing => None,
                },
                local_addresses: node.local_addresses.iter().copied().collect(),
                detects_links: matches!(
                    node.local_detector,
                    LocalTrafficDetector::BridgeInterface(_) | LocalTrafficDetector::InterfaceNamePrefix(_)
                ),
                explanation,
            }
        }))
    };
    inspector.read(read).await
}

fn port_of(situation: Situation<'_>, explanation: &Explanation, protocol: Protocol) -> Option<AffinityPort> {
    let of = explanation.service.as_ref()?;
    let service = NamespacedName::parse(&of.namespace, &of.name).ok()?;
    let is_v4 = explanation.destination.ip().to_canonical().is_ipv4();
    let is_it = |key: &&ServicePortKey| {
        *key.name.port == *of.port_name
            && key.name.protocol == protocol
            && (key.family == IpFamily::V4) == is_v4
    };
    let mut ports = situation.model.ports_of_service(&service);
    let (key, port) = ports.find(|(key, _)| is_it(key))?;
    Some(AffinityPort { key: key.clone(), port: Arc::clone(port) })
}

impl Asked {
    /// Asks the kernel which endpoint the client holds.
    async fn read_affinity(&mut self, pins: &Path) {
        let (Some(port), Some(mode)) = (&self.port, self.rules) else { return };
        if self.explanation.affinity_seconds.is_none() {
            return;
        }
        let wanted = Wanted::of_port(port.clone(), mode, pins);
        let read = tokio::task::spawn_blocking(move || affinity::read(&wanted, &AffinityFilter::default()));
        let state = match read.await {
            Ok(Ok(rows)) => self.holder(&rows),
            Ok(Err(error)) => AffinityState::Unknown(with_causes(&error)),
            Err(error) => AffinityState::Unknown(error.to_string()),
        };
        self.explanation.set_affinity(state);
    }

    /// Returns the endpoint that the client holds; of several, the one that it holds for longest.
    fn holder(&self, rows: &[AffinityRow]) -> AffinityState {
        let of = if self.explanation.hook == Hook::Socket { "sockets" } else { "packets" };
        let own = rows.iter().filter(|row| row.of == of && self.is_client(&row.client));
        match own.max_by_key(|row| row.remaining_seconds) {
            None => AffinityState::HoldsNone,
            Some(row) => {
                AffinityState::Holds { endpoint: row.endpoint, remaining_seconds: row.remaining_seconds }
            }
        }
    }

    /// Returns true if the client has the name: `node`, an address, or several addresses of a pod.
    fn is_client(&self, name: &str) -> bool {
        let mut addresses = name.split(',').filter_map(|text| text.parse::<IpAddr>().ok());
        match self.explanation.client {
            Some(address) => addresses.any(|own| own == address),
            None => name == "node" || addresses.any(|own| self.local_addresses.contains(&own)),
        }
    }

    /// Asks the kernel whether it does what the model says.
    ///
    /// # Errors
    /// Returns an error if the kernel cannot be read.
    async fn check(&mut self, node: &NodeInspector) -> Result<(), String> {
        let mut check = Check::default();
        let drift = Drift::read(&node.inspector).await.map_err(|error| error.to_string())?;
        let key = self.port.as_ref().map(|port| port.key.clone());
        let compare = move |inspected: &Inspected<'_>| compared(inspected, &drift, key.as_ref());
        let (name, differences) = node.inspector.read(compare).await.map_err(|error| error.to_string())?;
        if differences.is_empty() {
            check.compared.push(format!("the kernel holds what shunt wrote for {name}"));
        }
        check.differences = differences;
        if self.explanation.hook == Hook::Link {
            self.rehearse(&node.pin_directory, &mut check).await;
        }
        self.explanation.check = Some(check);
        Ok(())
    }

    /// Runs a packet through a copy of the link program.
    async fn rehearse(&self, pins: &Path, check: &mut Check) {
        if self.explanation.location == Location::Pod && self.detects_links {
            let why = "no packet was run through the link program: local detection looks at the pod's link";
            check.compared.push(why.to_owned());
            return;
        }
        let (pins, to, protocol) = (PathBuf::from(pins), self.explanation.destination, self.protocol);
        let to = SocketAddr::new(to.ip().to_canonical(), to.port());
        let from = SocketAddr::new(self.explanation.client.unwrap_or(any(to.ip())), CLIENT_PORT);
        let run = tokio::task::spawn_blocking(move || rehearse(&pins, from, to, protocol)).await;
        let decided = match run {
            Ok(Ok(Rehearsed::Sent(destination))) => {
                let verdict = if destination == to { Verdict::Pass } else { Verdict::Translate };
                Decision { verdict, destination }
            }
            Ok(Ok(Rehearsed::Refused)) => Decision { verdict: Verdict::Refuse, destination: to },
            Ok(Ok(Rehearsed::Dropped)) => Decision { verdict: Verdict::Drop, destination: to },
            Ok(Err(error)) => {
                let why = with_causes(&error);
                check.differences.push(format!("the link program cannot be asked: {why}"));
                return;
            }
            Err(error) => {
                check.differences.push(format!("the link program cannot be asked: {error}"));
                return;
            }
        };
        self.explanation.compare(decided, check);
    }
}

/// The port of the client's packet. The copy of the program knows no other connection.
const CLIENT_PORT: u16 = 40_000;

const fn any(of: IpAddr) -> IpAddr {
    match of {
        IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    }
}

/// Returns what was compared, and the differences: of a service port, and of what all share.
fn compared(inspected: &Inspected<'_>, drift: &Drift, key: Option<&ServicePortKey>) -> (String, Vec<String>) {
    let mut differences = drift.of_node(inspected);
    let families = key.map_or(IpFamily::ALL.to_vec(), |key| vec![key.family]);
    differences.extend(families.into_iter().filter_map(|family| unknown(inspected, family)));
    let Some(key) = key else { return ("all service ports".to_owned(), differences) };
    if let Some((reason, message)) = inspected.left_out().get(key) {
        differences.push(format!("the service port is left out ({reason}): {message}"));
    } else if inspected.programmed(key).is_none() {
        differences.push("the service port is not programmed yet".to_owned());
    } else if !inspected.is_failing(key.family) {
        match drift.of(inspected, key) {
            Some(of_port) => differences.extend(of_port),
            None => differences.push("the service port changed meanwhile: ask again".to_owned()),
        }
    }
    (format!("{} ({})", key.name, key.family.name()), differences)
}
