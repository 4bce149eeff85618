//! Compares what `shunt explain` says about a flow with what is expected of the flow.

use std::{collections::BTreeSet, net::IpAddr};

use proxy_userspace::{
    explain::{ClientKind, ClientName, Explanation, NamedQuestion, Source as Seen, Verdict},
    model,
};

use crate::{
    agent::protocol::{ConnectRequest, Protocol},
    case::{Action, Case, Expectation, ExpectedAnswers, Flow, Source},
    world::Host,
};

/// Cases that are not compared, with the reason. In most of them somebody else ends what shunt
/// translates: the explanation is about shunt.
const NOT_COMPARED: &[(&str, &str)] = &[
    ("closed-port-of-endpoint", "the endpoint refuses"),
    ("cluster-ip-of-a-link", "the owner of the link exempts its address from conntrack"),
    ("connection-mark-selects-the-uplink", "a route leads elsewhere"),
    ("detect-local-interface-prefix-of-others", "an address does not say which link its pod has"),
    ("direct-path", "a firewall drops"),
    ("direct-path-and-filters-of-others", "a filter on the pod's link drops"),
    ("dsr-large", "a datagram is too big"),
    ("dsr-return", "a port of the endpoint is closed"),
    ("forward-policy-drop-legacy", "the policy of FORWARD drops"),
    ("forward-policy-drop-nft", "the policy of FORWARD drops"),
    ("maglev", "the port of the client decides"),
    ("original-destination-in-forward", "a rule in FORWARD drops"),
    ("path-mtu-behind-other-node", "a datagram is too big"),
    ("path-mtu-of-local-pod", "a datagram is too big"),
    ("pods-on-a-bridge-with-netfilter", "a datagram is too big"),
    ("raw-drop-of-a-node-port", "a rule in raw drops"),
    ("redirect-in-a-pod", "the pod redirects its own connections"),
];

/// Returns the request for a flow of a case. `None` if it opens no connection, or if its case is
/// not compared.
pub fn request(case: &Case, flow: &Flow) -> Option<NamedQuestion> {
    let Action::Connect(ConnectRequest { to, protocol, sources, .. }) = &flow.action else { return None };
    if NOT_COMPARED.iter().any(|(name, _)| *name == case.name) {
        return None;
    }
    let own = || flow.from.addresses().into_iter().map(|own| own.addr());
    let address = sources.first().copied().or_else(|| own().find(|own| own.is_ipv4() == to.is_ipv4()));
    let from = match (flow.from, address) {
        (Host::Node1, _) | (_, None) => ClientName::Node,
        (_, Some(address)) => ClientName::Address(address),
    };
    let protocol = match protocol {
        Protocol::Tcp => model::Protocol::Tcp,
        Protocol::Udp => model::Protocol::Udp,
        Protocol::Sctp => model::Protocol::Sctp,
    };
    let outside_cgroup = case.outside_cgroup.contains(&flow.from);
    Some(NamedQuestion { from, client: ClientKind::Auto, to: (*to, protocol).into(), outside_cgroup })
}

/// Compares. The error says how they differ.
pub fn check(flow: &Flow, explained: &Explanation) -> Result<(), String> {
    let differs = |what: &str| Err(format!("explained as {what}:\n{explained}"));
    match (&flow.expect, explained.verdict) {
        (Expectation::Reach(answers), Verdict::Translate) => {
            check_hosts(answers, explained)?;
            check_sources(answers, explained)
        }
        (Expectation::Reach(answers), Verdict::Pass) => {
            let owner = Host::every().find(|host| host.owns(explained.destination.ip()));
            match owner {
                Some(owner) if answers.hosts.contains(&owner) => Ok(()),
                _ => differs("not translated"),
            }
        }
        (Expectation::Refused, Verdict::Refuse | Verdict::Pass)
        | (Expectation::Blocked, Verdict::Drop | Verdict::Refuse | Verdict::Pass)
        | (Expectation::Silent, Verdict::Drop | Verdict::Pass) => Ok(()),
        _ => differs(&format!("{:?}", explained.verdict)),
    }
}

fn check_hosts(answers: &ExpectedAnswers, explained: &Explanation) -> Result<(), String> {
    let chosen = || explained.endpoints.iter().filter(|endpoint| endpoint.chosen);
    let hosts: BTreeSet<Host> = chosen().filter_map(|endpoint| owner(endpoint.address.ip())).collect();
    if hosts == answers.hosts { Ok(()) } else { Err(format!("explained with other endpoints:\n{explained}")) }
}

fn owner(address: IpAddr) -> Option<Host> {
    Host::every().find(|host| host.owns(address))
}

fn check_sources(answers: &ExpectedAnswers, explained: &Explanation) -> Result<(), String> {
    let expected = match answers.source {
        None => return Ok(()),
        // The node's own address is an address of the node.
        Some(Source::Client) if explained.client.is_none() => return Ok(()),
        Some(Source::Client) => Seen::Client,
        Some(Source::Node) => Seen::Node,
    };
    let sources = explained.endpoints.iter().filter(|endpoint| endpoint.chosen);
    match sources.map(|endpoint| endpoint.source).find(|source| *source != Some(expected)) {
        None => Ok(()),
        Some(_) => Err(format!("explained with another source:\n{explained}")),
    }
}
