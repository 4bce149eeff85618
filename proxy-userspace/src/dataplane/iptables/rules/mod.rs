//! The rules of a service port, as upstream writes them in `syncProxyRules` of
//! `pkg/proxy/iptables/proxier.go`: its rules in shared chains, and its own chains.

mod own_chains;

use super::node::{Node, RuleOptions};
use crate::{
    dataplane::iptables_text::{
        Chain, ChainRules, EXTERNAL_SERVICES, NODE_PORTS, NameHash, PROXY_FIREWALL, Purpose, SERVICES, Table,
        host_bits, port_unreachable,
    },
    model::{Frontend, FrontendKind, IpFamily, ResolvedPort, ServicePortKey, ServicePortName, TrafficPolicy},
};

/// An nfacct object that counts packets, for a `kubeproxy_` metric.
pub(super) const INVALID_DROPPED: &str = "ct_state_invalid_dropped_pkts";
/// See [`INVALID_DROPPED`].
pub(super) const LOCALHOST_ACCEPTED: &str = "localhost_nps_accepted_pkts";

/// The chains to which all service ports add rules.
pub(super) const SHARED_CHAINS: [(Table, Chain); 6] = [
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

/// Rules of each of [`SHARED_CHAINS`].
pub(super) type SharedRules = [ChainRules; SHARED_CHAINS.len()];

pub(super) fn empty_shared_rules() -> SharedRules {
    SHARED_CHAINS.map(|(_, chain)| ChainRules::new(chain))
}

/// What the rules of all service ports of a family depend on.
#[derive(Clone, Copy, Debug)]
pub(super) struct RuleContext<'a> {
    pub(super) family: IpFamily,
    pub(super) options: &'a RuleOptions,
    pub(super) node: &'a Node,
    /// There are so many endpoints that their rules have no comments.
    pub(super) is_large: bool,
}

/// Writes the rules of a service port.
pub(super) struct PortRules<'a> {
    context: RuleContext<'a>,
    name: &'a ServicePortName,
    /// The name as comments show it.
    display_name: String,
    protocol: &'static str,
    hash: NameHash,
    port: &'a ResolvedPort,
}

impl<'a> PortRules<'a> {
    /// The rules of this service port.
    pub(super) fn new(context: RuleContext<'a>, key: &'a ServicePortKey, port: &'a ResolvedPort) -> Self {
        Self {
            context,
            name: &key.name,
            display_name: key.name.to_string(),
            protocol: key.name.protocol.lowercase_name(),
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

    /// Returns true if the policy's endpoint list is not empty.
    fn has_endpoints_for(&self, policy: TrafficPolicy) -> bool {
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

    /// Returns its rules in the shared chains.
    pub(super) fn shared_rules(&self) -> SharedRules {
        let mut shared = empty_shared_rules();
        self.port.frontends.iter().for_each(|frontend| self.add_frontend(frontend, &mut shared));
        if let Some(port) = self.port.health_check_node_port {
            let comment = format!("{} health check node port", self.display_name);
            shared[FILTER_NODE_PORTS].add(format_args!(
                "-p tcp -m comment --comment \"{comment}\" -m tcp --dport {port} -j ACCEPT"
            ));
        }
        shared
    }

    fn add_frontend(&self, frontend: &Frontend, shared: &mut SharedRules) {
        let (comment, target) = match frontend.kind {
            FrontendKind::ClusterIp => return self.add_cluster_ip(frontend, shared),
            FrontendKind::NodePort => return self.add_node_port(frontend, shared),
            FrontendKind::ExternalIp => ("external IP", Purpose::External),
            FrontendKind::LoadBalancerIp if self.uses_firewall() => ("loadbalancer IP", Purpose::Firewall),
            FrontendKind::LoadBalancerIp => ("loadbalancer IP", Purpose::External),
        };
        let chain = self.chain(target);
        if self.port.has_endpoints {
            let matches = self.destination(frontend, comment);
            shared[NAT_SERVICES].add(format_args!("{matches} -j {chain}"));
        }
        if target == Purpose::Firewall {
            let matches = self.destination(frontend, &format!("traffic not accepted by {chain}"));
            shared[FILTER_FIREWALL].add(format_args!("{matches} -j DROP"));
        }
        if !self.has_endpoints_for(self.port.external_policy) {
            let matches = self.destination(frontend, self.refusal_comment());
            shared[FILTER_EXTERNAL].add(format_args!("{matches} -j {}", self.refusal()));
        }
    }

    fn add_cluster_ip(&self, frontend: &Frontend, shared: &mut SharedRules) {
        let policy = self.port.internal_policy;
        if self.has_endpoints_for(policy) {
            let matches = self.destination(frontend, "cluster IP");
            shared[NAT_SERVICES].add(format_args!("{matches} -j {}", self.policy_chain(policy)));
        } else {
            let matches = self.destination(frontend, self.refusal_comment());
            shared[FILTER_SERVICES].add(format_args!("{matches} -j {}", self.refusal()));
        }
    }

    fn add_node_port(&self, frontend: &Frontend, shared: &mut SharedRules) {
        let Self { protocol, display_name, .. } = self;
        let port = frontend.port;
        let external = self.chain(Purpose::External);
        if self.port.has_endpoints {
            let matches =
                format!("-p {protocol} -m comment --comment \"{display_name}\" -m {protocol} --dport {port}");
            if self.context.options.counters && self.context.node.localhost_node_ports {
                shared[NAT_NODE_PORTS].add(format_args!(
                    "-d 127.0.0.0/8 {matches} -m nfacct --nfacct-name {LOCALHOST_ACCEPTED} -j {external}"
                ));
            }
            shared[NAT_NODE_PORTS].add(format_args!("{matches} -j {external}"));
        }
        if !self.has_endpoints_for(self.port.external_policy) {
            shared[FILTER_EXTERNAL].add(format_args!(
                "-p {protocol} -m comment --comment \"{display_name} {}\" -m addrtype --dst-type LOCAL -m {protocol} --dport {port} -j {}",
                self.refusal_comment(),
                self.refusal()
            ));
        }
    }

    fn refusal_comment(&self) -> &'static str {
        if self.port.has_endpoints { "has no local endpoints" } else { "has no endpoints" }
    }

    fn refusal(&self) -> String {
        if self.port.has_endpoints {
            "DROP".into()
        } else {
            format!("REJECT --reject-with {}", port_unreachable(self.context.family))
        }
    }

    /// Matches packets to a frontend.
    fn destination(&self, frontend: &Frontend, comment: &str) -> String {
        self.destination_with("", "", frontend, comment)
    }

    /// Matches packets to a frontend, with other matches before and after the destination.
    fn destination_with(&self, before: &str, after: &str, frontend: &Frontend, comment: &str) -> String {
        let Self { protocol, display_name, .. } = self;
        let Frontend { address, port, .. } = frontend;
        let to = address.map_or_else(String::new, |to| format!("-d {to}/{} ", host_bits(to)));
        format!(
            "{before}{to}{after}-p {protocol} -m comment --comment \"{display_name} {comment}\" -m {protocol} --dport {port}"
        )
    }
}

impl RuleContext<'_> {
    const fn host_mask(&self) -> &'static str {
        match self.family {
            IpFamily::V4 => "255.255.255.255",
            IpFamily::V6 => "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
        }
    }
}
