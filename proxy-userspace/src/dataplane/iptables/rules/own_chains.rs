//! The chains of one service port: for external addresses, source ranges, traffic policies and
//! endpoints.

use std::{collections::BTreeSet, fmt, net::SocketAddr};

use super::PortRules;
use crate::{
    dataplane::{
        iptables::node::Node,
        iptables_text::{
            Chain, ChainRules, LocalMatch, MARK_MASQ, NameHash, PROXY_FIREWALL, Purpose, host_bits,
        },
    },
    model::{FrontendKind, TrafficPolicy},
};

impl PortRules<'_> {
    /// Returns its own chains.
    pub(in crate::dataplane::iptables) fn own_chains(&self) -> Vec<ChainRules> {
        let mut chains = Vec::new();
        if !self.port.has_endpoints {
            return chains;
        }
        if self.port.frontends.iter().any(|frontend| frontend.kind != FrontendKind::ClusterIp) {
            chains.push(self.external());
        }
        if self.uses_firewall() {
            chains.push(self.firewall());
        }
        for policy in [TrafficPolicy::Cluster, TrafficPolicy::Local] {
            if !self.port.endpoints(policy).is_empty() {
                chains.push(self.policy(policy));
            }
        }
        let both = self.port.cluster_endpoints.iter().chain(&self.port.local_endpoints);
        let endpoints: BTreeSet<SocketAddr> = both.map(|endpoint| endpoint.address).collect();
        chains.extend(endpoints.into_iter().map(|endpoint| self.endpoint(endpoint)));
        chains
    }

    fn external(&self) -> ChainRules {
        let mut rules = ChainRules::new(self.chain(Purpose::External));
        let comment = |text: &str| {
            format!("-m comment --comment \"{text} for {} external destinations\"", self.display_name)
        };
        if self.port.external_policy == TrafficPolicy::Cluster {
            // The packet may leave by another node than the one that received it.
            rules.add(format_args!("{} -j {MARK_MASQ}", comment("masquerade traffic")));
        } else if !self.port.cluster_endpoints.is_empty() {
            let cluster = self.chain(Purpose::Cluster);
            if let Some(local) = &self.context.node.local {
                rules.add(format_args!("{local} {} -j {cluster}", comment("pod traffic")));
            }
            let from_node = "-m addrtype --src-type LOCAL";
            let masquerade = comment("masquerade LOCAL traffic");
            rules.add(format_args!("{masquerade} {from_node} -j {MARK_MASQ}"));
            rules.add(format_args!("{} {from_node} -j {cluster}", comment("route LOCAL traffic")));
        }
        if self.has_endpoints_for(self.port.external_policy) {
            rules.add(format_args!("-j {}", self.policy_chain(self.port.external_policy)));
        }
        rules
    }

    fn firewall(&self) -> ChainRules {
        let mut rules = ChainRules::new(self.chain(Purpose::Firewall));
        let (name, external) = (&self.display_name, self.chain(Purpose::External));
        let mut allow = |source: &dyn fmt::Display| {
            rules.add(format_args!(
                "-s {source} -m comment --comment \"{name} loadbalancer IP\" -j {external}"
            ));
        };
        let ranges = &self.port.source_ranges;
        for range in ranges {
            allow(range);
        }
        let primary = self.context.node.primary;
        if ranges.iter().any(|range| primary.is_some_and(|address| range.contains(&address))) {
            // If the load-balancer IP is an address of the node, the node's own packets to it have
            // it as source.
            let addresses =
                self.frontends(FrontendKind::LoadBalancerIp).filter_map(|frontend| frontend.address);
            addresses.for_each(|address| allow(&format_args!("{address}/{}", host_bits(address))));
        }
        rules.add(format_args!(
            "-m comment --comment \"other traffic to {name} will be dropped by {PROXY_FIREWALL}\""
        ));
        rules
    }

    /// The chain of a traffic policy: marks packets to be masqueraded, and selects an endpoint.
    fn policy(&self, policy: TrafficPolicy) -> ChainRules {
        let mut rules = ChainRules::new(self.policy_chain(policy));
        if policy == self.port.internal_policy {
            self.masquerade_cluster_ip(&mut rules);
        }
        let endpoints = self.port.endpoints(policy).iter().map(|endpoint| endpoint.address);
        let comment = |endpoint| self.comment(format_args!("{} -> {endpoint}", self.display_name));
        let targets: Vec<(String, Chain)> =
            endpoints.map(|endpoint| (comment(endpoint), self.endpoint_chain(endpoint))).collect();
        if let Some(timeout) = self.port.affinity_timeout {
            let mask = self.context.host_mask();
            for (comment, to) in &targets {
                rules.add(format_args!(
                    "{comment}-m recent --rcheck --seconds {timeout} --reap --name {to} --mask {mask} --rsource -j {to}"
                ));
            }
        }
        for (index, (comment, to)) in targets.iter().enumerate() {
            match targets.len() - index {
                1 => rules.add(format_args!("{comment}-j {to}")),
                remaining => rules.add(format_args!(
                    "{comment}-m statistic --mode random --probability {} -j {to}",
                    probability(remaining)
                )),
            }
        }
        rules
    }

    fn masquerade_cluster_ip(&self, rules: &mut ChainRules) {
        let Node { local, masquerade_all, .. } = self.context.node;
        let not_local = local.as_ref().map(|local| format!("! {local} ")).unwrap_or_default();
        let (before, after) = match local {
            _ if *masquerade_all => ("", ""),
            None => return,
            Some(LocalMatch::Source(_)) => (&*not_local, ""),
            Some(LocalMatch::Link(_) | LocalMatch::LinkPrefix(_)) => ("", &*not_local),
        };
        for frontend in self.frontends(FrontendKind::ClusterIp) {
            let matches = self.destination_with(before, after, frontend, "cluster IP");
            rules.add(format_args!("{matches} -j {MARK_MASQ}"));
        }
    }

    fn endpoint_chain(&self, endpoint: SocketAddr) -> Chain {
        Chain::Of(Purpose::Endpoint, NameHash::of_endpoint(self.name, endpoint))
    }

    /// A comment in rules of endpoints; empty in a large cluster.
    fn comment(&self, text: impl fmt::Display) -> String {
        if self.context.is_large { String::new() } else { format!("-m comment --comment \"{text}\" ") }
    }

    fn endpoint(&self, endpoint: SocketAddr) -> ChainRules {
        let mut rules = ChainRules::new(self.endpoint_chain(endpoint));
        let (protocol, comment, address) = (self.protocol, self.comment(&self.display_name), endpoint.ip());
        // The reply to a pod that is its own endpoint has to come back through the node.
        rules.add(format_args!("-s {address}/{} {comment}-j {MARK_MASQ}", host_bits(address)));
        let affinity = if self.port.affinity_timeout.is_some() {
            format!("-m recent --set --name {} --mask {} --rsource ", rules.chain, self.context.host_mask())
        } else {
            String::new()
        };
        rules.add(format_args!(
            "-p {protocol} {comment}{affinity}-m {protocol} -j DNAT --to-destination {endpoint}"
        ));
        rules
    }
}

/// Returns the probability 1/`n` as iptables-save prints it. Upstream writes ten decimals; the
/// kernel keeps 31 bits of them, which iptables-save prints with eleven.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    reason = "endpoints are far fewer than 2^52, and the result is below 2^31"
)]
fn probability(n: usize) -> String {
    const ONE: f64 = 2_147_483_648.0;
    let written = (1e10 / n as f64).round() / 1e10;
    let kept = (written * ONE).round() as i64;
    format!("{:.11}", kept as f64 / ONE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_are_printed_as_the_kernel_keeps_them() {
        let shown = [2, 3, 4, 7].map(probability);
        assert_eq!(shown, ["0.50000000000", "0.33333333349", "0.25000000000", "0.14285714272"]);
    }
}
