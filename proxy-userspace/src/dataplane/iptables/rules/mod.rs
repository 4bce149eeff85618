//! The rules of a service port, in the words of iptables-save: what it adds to the chains that all share, and chains of its own. What upstream writes is in `syncProxyRules` of `pkg/proxy/iptables/proxier.go`.

use std::fmt;

mod own;

use super::{
    names::{
        Chain, EXTERNAL_SERVICES, NODE_PORTS, NameHash, PROXY_FIREWALL, Purpose, SERVICES, Table, protocol,
    },
    terms::{Node, Offer},
};
use crate::model::{
    Frontend, FrontendKind, IpFamily, ResolvedPort, ServicePortKey, ServicePortName, TrafficPolicy,
};

/// nfacct objects that count packets; `kubeproxy_` metrics are made of them.
pub(super) const INVALID_DROPPED: &str = "ct_state_invalid_dropped_pkts";
/// See [`INVALID_DROPPED`].
pub(super) const LOCALHOST_ACCEPTED: &str = "localhost_nps_accepted_pkts";

/// Chains that all service ports add rules to.
pub(super) const SHARED: [(Table, Chain); 6] = [
    (Table::Filter, SERVICES),
    (Table::Filter, EXTERNAL_SERVICES),
    (Table::Filter, PROXY_FIREWALL),
    (Table::Filter, NODE_PORTS),
    (Table::Nat, SERVICES),
    (Table::Nat, NODE_PORTS),
];
const FILTER_SERVICES: usize = 0;
const FILTER_EXTERNAL: usize = 1;
const FILTER_FIREWALL: usize = 2;
const FILTER_NODE_PORTS: usize = 3;
const NAT_SERVICES: usize = 4;
const NAT_NODE_PORTS: usize = 5;

/// Rules of one chain, each with its `-A`, chain and line end.
pub(super) type Lines = String;

/// What a service port adds to each of [`SHARED`].
pub(super) type Contributions = [Lines; SHARED.len()];

/// What the rules of all service ports of a family depend on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms<'a> {
    /// The family.
    pub(super) family: IpFamily,
    /// What iptables and the kernel offer.
    pub(super) offer: &'a Offer,
    /// The node.
    pub(super) node: &'a Node,
    /// There are so many endpoints that their rules go without comments.
    pub(super) is_large: bool,
}

/// A service port with what its rules are decided by.
pub(super) struct PortRules<'a> {
    terms: Terms<'a>,
    name: &'a ServicePortName,
    /// As in comments.
    shown: String,
    protocol: &'static str,
    hash: NameHash,
    port: &'a ResolvedPort,
}

impl<'a> PortRules<'a> {
    /// The rules of a service port.
    pub(super) fn new(terms: Terms<'a>, key: &'a ServicePortKey, port: &'a ResolvedPort) -> Self {
        Self {
            terms,
            name: &key.name,
            shown: key.name.to_string(),
            protocol: protocol(key.name.protocol),
            hash: NameHash::of_port(&key.name),
            port,
        }
    }

    fn chain(&self, purpose: Purpose) -> Chain {
        Chain::Of(purpose, self.hash)
    }

    fn frontends(&self, kind: FrontendKind) -> impl Iterator<Item = &Frontend> {
        self.port.frontends.iter().filter(move |frontend| frontend.kind == kind)
    }

    fn has(&self, kind: FrontendKind) -> bool {
        self.frontends(kind).next().is_some()
    }

    fn is_reached_from_outside(&self) -> bool {
        self.port.frontends.iter().any(|frontend| frontend.kind != FrontendKind::ClusterIp)
    }

    /// Who comes under this policy finds an endpoint.
    fn serves(&self, policy: TrafficPolicy) -> bool {
        self.port.has_endpoints && !self.port.endpoints(policy).is_empty()
    }

    fn policy_chain(&self, policy: TrafficPolicy) -> Chain {
        self.chain(match policy {
            TrafficPolicy::Cluster => Purpose::Cluster,
            TrafficPolicy::Local => Purpose::Local,
        })
    }

    fn uses_firewall(&self) -> bool {
        self.port.has_endpoints
            && self.has(FrontendKind::LoadBalancerIp)
            && !self.port.source_ranges.is_empty()
    }

    /// What it adds to the shared chains.
    pub(super) fn contributions(&self) -> Contributions {
        let mut lines = Contributions::default();
        self.port.frontends.iter().for_each(|frontend| self.add_frontend(frontend, &mut lines));
        if let Some(port) = self.port.health_check_node_port {
            let comment = format!("{} health check node port", self.shown);
            rule(
                &mut lines[FILTER_NODE_PORTS],
                NODE_PORTS,
                format_args!("-p tcp -m comment --comment \"{comment}\" -m tcp --dport {port} -j ACCEPT"),
            );
        }
        lines
    }

    fn add_frontend(&self, frontend: &Frontend, lines: &mut Contributions) {
        let (what, target) = match frontend.kind {
            FrontendKind::ClusterIp => {
                self.add_cluster_ip(frontend, lines);
                return;
            }
            FrontendKind::NodePort => {
                self.add_node_port(frontend, lines);
                return;
            }
            FrontendKind::ExternalIp => ("external IP", Purpose::External),
            FrontendKind::LoadBalancerIp if self.uses_firewall() => ("loadbalancer IP", Purpose::Firewall),
            FrontendKind::LoadBalancerIp => ("loadbalancer IP", Purpose::External),
        };
        if self.port.has_endpoints {
            let matches = self.destination(frontend, what);
            rule(&mut lines[NAT_SERVICES], SERVICES, format_args!("{matches} -j {}", self.chain(target)));
        }
        if target == Purpose::Firewall {
            let comment = format!("traffic not accepted by {}", self.chain(Purpose::Firewall));
            let matches = self.destination(frontend, &comment);
            rule(&mut lines[FILTER_FIREWALL], PROXY_FIREWALL, format_args!("{matches} -j DROP"));
        }
        if !self.serves(self.port.external_policy) {
            let matches = self.destination(frontend, self.why_not());
            rule(
                &mut lines[FILTER_EXTERNAL],
                EXTERNAL_SERVICES,
                format_args!("{matches} -j {}", self.refusal()),
            );
        }
    }

    fn add_cluster_ip(&self, frontend: &Frontend, lines: &mut Contributions) {
        let policy = self.port.internal_policy;
        if self.serves(policy) {
            let matches = self.destination(frontend, "cluster IP");
            rule(
                &mut lines[NAT_SERVICES],
                SERVICES,
                format_args!("{matches} -j {}", self.policy_chain(policy)),
            );
        } else {
            let matches = self.destination(frontend, self.why_not());
            rule(&mut lines[FILTER_SERVICES], SERVICES, format_args!("{matches} -j {}", self.refusal()));
        }
    }

    fn add_node_port(&self, frontend: &Frontend, lines: &mut Contributions) {
        let Self { protocol, shown, .. } = self;
        let port = frontend.port;
        let external = self.chain(Purpose::External);
        if self.port.has_endpoints {
            let comment =
                format!("-p {protocol} -m comment --comment \"{shown}\" -m {protocol} --dport {port}");
            let lines = &mut lines[NAT_NODE_PORTS];
            if self.terms.offer.counters && self.terms.node.has_localhost_node_ports() {
                let counted = format_args!(
                    "-d 127.0.0.0/8 {comment} -m nfacct --nfacct-name {LOCALHOST_ACCEPTED} -j {external}"
                );
                rule(lines, NODE_PORTS, counted);
            }
            rule(lines, NODE_PORTS, format_args!("{comment} -j {external}"));
        }
        if !self.serves(self.port.external_policy) {
            let refused = format_args!(
                "-p {protocol} -m comment --comment \"{shown} {}\" -m addrtype --dst-type LOCAL -m {protocol} --dport {port} -j {}",
                self.why_not(),
                self.refusal()
            );
            rule(&mut lines[FILTER_EXTERNAL], EXTERNAL_SERVICES, refused);
        }
    }

    fn why_not(&self) -> &'static str {
        if self.port.has_endpoints { "has no local endpoints" } else { "has no endpoints" }
    }

    fn refusal(&self) -> &'static str {
        match (self.port.has_endpoints, self.terms.family) {
            (true, _) => "DROP",
            (false, IpFamily::V4) => "REJECT --reject-with icmp-port-unreachable",
            (false, IpFamily::V6) => "REJECT --reject-with icmp6-port-unreachable",
        }
    }

    /// Matches what is sent to an address of the service port.
    fn destination(&self, frontend: &Frontend, comment: &str) -> String {
        self.destination_but(frontend, comment, "", "")
    }

    /// The same, with matches before and after the destination.
    fn destination_but(&self, frontend: &Frontend, comment: &str, source: &str, link: &str) -> String {
        let Self { protocol, shown, .. } = self;
        let Frontend { address, port, .. } = frontend;
        let to =
            address.map_or_else(String::new, |address| format!("-d {address}/{} ", self.terms.host_bits()));
        format!(
            "{source}{to}{link}-p {protocol} -m comment --comment \"{shown} {comment}\" -m {protocol} --dport {port}"
        )
    }
}

impl Terms<'_> {
    const fn host_bits(&self) -> u8 {
        match self.family {
            IpFamily::V4 => 32,
            IpFamily::V6 => 128,
        }
    }

    const fn host_mask(&self) -> &'static str {
        match self.family {
            IpFamily::V4 => "255.255.255.255",
            IpFamily::V6 => "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
        }
    }
}

/// Adds a rule to the lines of a chain.
pub(super) fn rule(lines: &mut Lines, chain: Chain, text: fmt::Arguments<'_>) {
    // Writing to a String cannot fail.
    let _ = fmt::Write::write_fmt(lines, format_args!("-A {chain} {text}\n"));
}
