//! The page of one Service: its ports and endpoints, and what happens to a connection.

use maud::{Markup, html};
use serde::Deserialize;

use super::{
    layout::table,
    services::{addresses, counts, state},
};
use crate::{
    explain::{
        ClientKind, ClientName, DEFAULT_NAMESPACE, DestinationName, Explanation, NamedQuestion, Verdict,
    },
    inspect::{EndpointRow, MOST_ENDPOINTS, ServiceDetails, ServiceRow},
};

/// The query of the page: a question about a connection. Empty fields ask nothing.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Question {
    from: String,
    to: String,
    client: String,
}

/// Where the client is: the value of the form, its meaning, and its text.
const CLIENTS: [(&str, ClientKind, &str); 3] = [
    ("auto", ClientKind::Auto, "shunt finds out"),
    ("pod", ClientKind::Pod, "a pod of this node"),
    ("outside", ClientKind::Outside, "outside this node"),
];

impl Question {
    /// Returns the question, or what is wrong with it. `None` if nothing is asked.
    pub(super) fn request(&self) -> Option<Result<NamedQuestion, String>> {
        if self.from.is_empty() && self.to.is_empty() {
            return None;
        }
        let kind = CLIENTS.into_iter().find(|(value, ..)| *value == self.client);
        let kind = kind.map_or(ClientKind::Auto, |(_, kind, _)| kind);
        Some(question(self.from.trim(), self.to.trim(), kind))
    }
}

fn question(from: &str, to: &str, client: ClientKind) -> Result<NamedQuestion, String> {
    let from = from.parse::<ClientName>().map_err(|error| format!("{from} {error}"))?;
    let to = to.parse::<DestinationName>()?;
    let (from, to) = (from.in_namespace(DEFAULT_NAMESPACE), to.in_namespace(DEFAULT_NAMESPACE));
    Ok(NamedQuestion { from, client, to, outside_cgroup: false })
}

const PORTS: [&str; 11] = [
    "Port",
    "Protocol",
    "Family",
    "Addresses",
    "Internal policy",
    "External policy",
    "Endpoints",
    "Connections",
    "Refused",
    "Dropped",
    "State",
];
const ENDPOINTS: [&str; 6] = ["Address", "Port", "Node", "State", "Used", "Why not"];

/// Returns the content.
pub(super) fn page(
    namespace: &str,
    name: &str,
    details: &ServiceDetails,
    question: &Question,
    explained: Option<Result<&Explanation, &str>>,
) -> Markup {
    let ServiceDetails { ports, endpoints, .. } = details;
    let total: usize = ports.iter().map(|port| port.total_endpoints).sum();
    html! {
        h1 { (namespace) "/" (name) }
        (table("Ports", &PORTS, &html! { @for port in ports { (port_row(port)) } }))
        h2 { "What happens to a connection?" }
        (form(details, question))
        @match explained {
            Some(Ok(explanation)) => (explanation_table(explanation)),
            Some(Err(error)) => p.trouble role="status" { (error) },
            None => {}
        }
        @if endpoints.is_empty() { p { "It has no endpoints." } } @else {
            (table("Endpoints", &ENDPOINTS, &html! { @for endpoint in endpoints { (endpoint_row(endpoint)) } }))
            @if total > MOST_ENDPOINTS { p { "The first " (MOST_ENDPOINTS) " of " (total) " endpoints are shown." } }
        }
    }
}

fn port_row(row: &ServiceRow) -> Markup {
    let port = &row.port;
    html! {
        tr {
            th scope="row" { (if port.port_name.is_empty() { "-" } else { &port.port_name }) }
            td { (port.protocol) } td { (port.family) }
            td { (addresses(row)) }
            td { (row.internal_traffic_policy) } td { (row.external_traffic_policy) }
            td.number { (row.eligible_endpoints) "/" (row.total_endpoints) }
            (counts(row.counts.as_ref()))
            (state(row))
        }
    }
}

fn endpoint_row(row: &EndpointRow) -> Markup {
    html! {
        tr {
            td { (row.address) } td { (row.port.port_name) }
            td { (row.node.as_deref().unwrap_or("-")) @if row.local { " (this)" } }
            td { (row.conditions.name()) }
            td.good[row.eligible].warn[!row.eligible] { (row.used()) }
            td { (row.reason().unwrap_or_default()) }
        }
    }
}

fn form(details: &ServiceDetails, question: &Question) -> Markup {
    let from = if question.from.is_empty() { "node" } else { &question.from };
    let is_listed = question.to.is_empty() || details.destinations.contains(&question.to);
    html! {
        form method="get" {
            label { "From (node, an address, or a pod)" input name="from" value=(from) required; }
            label { "Where that is"
                select name="client" {
                    @for (value, _, text) in CLIENTS { option value=(value) selected[question.client == value] { (text) } }
                }
            }
            label { "To"
                select name="to" {
                    @if !is_listed { option selected { (question.to) } }
                    @for to in &details.destinations { option selected[*to == question.to] { (to) } }
                }
            }
            button type="submit" { "Explain" }
        }
    }
}

fn explanation_table(explanation: &Explanation) -> Markup {
    let class = match explanation.verdict {
        Verdict::Translate => "good",
        Verdict::Pass => "warn",
        Verdict::Refuse | Verdict::Drop => "bad",
    };
    let rows = explanation.lines();
    html! {
        table #explanation {
            caption { "Explanation" }
            tbody {
                @for (name, text) in &rows {
                    tr { th scope="row" { (name) } td class=[(*name == "Verdict").then_some(class)] { (text) } }
                }
            }
        }
    }
}
