//! The chains of a service port's own: of addresses that are reached from outside, of source ranges, of policies, of endpoints.

use std::{collections::BTreeSet, fmt, net::SocketAddr};

use super::{Lines, PortRules, rule};
use crate::{
    dataplane::iptables::{
        names::{Chain, MARK_MASQ, NameHash, PROXY_FIREWALL, Purpose},
        terms::{LocalMatch, Node},
    },
    model::{FrontendKind, TrafficPolicy},
};

impl PortRules<'_> {
    /// The chains of its own, with their rules.
    pub(in crate::dataplane::iptables) fn chains(&self) -> Vec<(Chain, Lines)> {
        let mut chains = Vec::new();
        if !self.port.has_endpoints {
            return chains;
        }
        if self.is_reached_from_outside() {
            chains.push((self.chain(Purpose::External), self.external()));
        }
        if self.uses_firewall() {
            chains.push((self.chain(Purpose::Firewall), self.firewall()));
        }
        for policy in [TrafficPolicy::Cluster, TrafficPolicy::Local] {
            if !self.port.endpoints(policy).is_empty() {
                chains.push((self.policy_chain(policy), self.balanced(policy)));
            }
        }
        chains.extend(self.endpoints().into_iter().map(|endpoint| self.endpoint(endpoint)));
        chains
    }

    /// Every endpoint of either policy.
    fn endpoints(&self) -> BTreeSet<SocketAddr> {
        let both = self.port.cluster_endpoints.iter().chain(&self.port.local_endpoints);
        both.map(|endpoint| endpoint.address).collect()
    }

    fn external(&self) -> Lines {
        let (mut lines, shown) = (Lines::new(), &self.shown);
        let chain = self.chain(Purpose::External);
        let commented =
            |text: &str| format!("-m comment --comment \"{text} for {shown} external destinations\"");
        if self.port.external_policy == TrafficPolicy::Cluster {
            // It may leave by another node than it came in on.
            rule(&mut lines, chain, format_args!("{} -j {MARK_MASQ}", commented("masquerade traffic")));
        } else if !self.port.cluster_endpoints.is_empty() {
            let cluster = self.chain(Purpose::Cluster);
            if let Some(local) = &self.terms.node.local {
                let matches = match local {
                    LocalMatch::Source(range) => format!("-s {range}"),
                    LocalMatch::Link(link) => format!("-i {link}"),
                };
                rule(&mut lines, chain, format_args!("{matches} {} -j {cluster}", commented("pod traffic")));
            }
            let from_node = "-m addrtype --src-type LOCAL";
            rule(
                &mut lines,
                chain,
                format_args!("{} {from_node} -j {MARK_MASQ}", commented("masquerade LOCAL traffic")),
            );
            rule(
                &mut lines,
                chain,
                format_args!("{} {from_node} -j {cluster}", commented("route LOCAL traffic")),
            );
        }
        if self.serves(self.port.external_policy) {
            rule(&mut lines, chain, format_args!("-j {}", self.policy_chain(self.port.external_policy)));
        }
        lines
    }

    fn firewall(&self) -> Lines {
        let (mut lines, shown) = (Lines::new(), &self.shown);
        let (chain, external) = (self.chain(Purpose::Firewall), self.chain(Purpose::External));
        let mut allow = |source: &dyn fmt::Display| {
            let allowed =
                format_args!("-s {source} -m comment --comment \"{shown} loadbalancer IP\" -j {external}");
            rule(&mut lines, chain, allowed);
        };
        self.port.source_ranges.iter().for_each(|range| allow(range));
        let primary = self.terms.node.primary;
        if self.port.source_ranges.iter().any(|range| primary.is_some_and(|address| range.contains(&address)))
        {
            // Where the address is one of the node's own, what the node sends there comes from it.
            let addresses =
                self.frontends(FrontendKind::LoadBalancerIp).filter_map(|frontend| frontend.address);
            addresses.for_each(|address| allow(&format_args!("{address}/{}", self.terms.host_bits())));
        }
        let rest = format!("other traffic to {shown} will be dropped by {PROXY_FIREWALL}");
        rule(&mut lines, chain, format_args!("-m comment --comment \"{rest}\""));
        lines
    }

    /// The chain of a policy: who is masqueraded, and one endpoint of many.
    fn balanced(&self, policy: TrafficPolicy) -> Lines {
        let mut lines = Lines::new();
        let chain = self.policy_chain(policy);
        if policy == self.port.internal_policy {
            self.masquerade_cluster_ip(chain, &mut lines);
        }
        let endpoints = self.port.endpoints(policy);
        if let Some(timeout) = self.port.affinity_timeout {
            for endpoint in endpoints {
                let (comment, to) =
                    (self.endpoint_comment(endpoint.address), self.endpoint_chain(endpoint.address));
                let mask = self.terms.host_mask();
                let recent = format_args!(
                    "{comment}-m recent --rcheck --seconds {timeout} --reap --name {to} --mask {mask} --rsource -j {to}"
                );
                rule(&mut lines, chain, recent);
            }
        }
        for (index, endpoint) in endpoints.iter().enumerate() {
            let (comment, to) =
                (self.endpoint_comment(endpoint.address), self.endpoint_chain(endpoint.address));
            let left = endpoints.len() - index;
            if left > 1 {
                let chance = format_args!(
                    "{comment}-m statistic --mode random --probability {} -j {to}",
                    probability(left)
                );
                rule(&mut lines, chain, chance);
            } else {
                rule(&mut lines, chain, format_args!("{comment}-j {to}"));
            }
        }
        lines
    }

    fn masquerade_cluster_ip(&self, chain: Chain, lines: &mut Lines) {
        let Node { local, masquerade_all, .. } = self.terms.node;
        let (source, link) = match local {
            _ if *masquerade_all => (String::new(), String::new()),
            None => return,
            Some(LocalMatch::Source(range)) => (format!("! -s {range} "), String::new()),
            Some(LocalMatch::Link(link)) => (String::new(), format!("! -i {link} ")),
        };
        for frontend in self.frontends(FrontendKind::ClusterIp) {
            let matches = self.destination_but(frontend, "cluster IP", &source, &link);
            rule(lines, chain, format_args!("{matches} -j {MARK_MASQ}"));
        }
    }

    fn endpoint_chain(&self, endpoint: SocketAddr) -> Chain {
        Chain::Of(Purpose::Endpoint, NameHash::of_endpoint(self.name, endpoint))
    }

    fn endpoint_comment(&self, endpoint: SocketAddr) -> String {
        if self.terms.is_large {
            return String::new();
        }
        format!("-m comment --comment \"{} -> {endpoint}\" ", self.shown)
    }

    fn endpoint(&self, endpoint: SocketAddr) -> (Chain, Lines) {
        let Self { protocol, shown, .. } = self;
        let (chain, mut lines) = (self.endpoint_chain(endpoint), Lines::new());
        let comment =
            if self.terms.is_large { String::new() } else { format!("-m comment --comment \"{shown}\" ") };
        let (address, bits) = (endpoint.ip(), self.terms.host_bits());
        // What comes back to the pod that sent it has to pass through the node.
        rule(&mut lines, chain, format_args!("-s {address}/{bits} {comment}-j {MARK_MASQ}"));
        let affinity = match self.port.affinity_timeout {
            Some(_) => {
                format!("-m recent --set --name {chain} --mask {} --rsource ", self.terms.host_mask())
            }
            None => String::new(),
        };
        let translated = format_args!(
            "-p {protocol} {comment}{affinity}-m {protocol} -j DNAT --to-destination {endpoint}"
        );
        rule(&mut lines, chain, translated);
        (chain, lines)
    }
}

/// One in so many. Upstream writes ten decimals; the kernel keeps 31 bits of them, which iptables-save shows with eleven.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    reason = "endpoints are far fewer than 2^52, and the result is below 2^31"
)]
fn probability(one_in: usize) -> String {
    const ONE: f64 = 2_147_483_648.0;
    let written = (1e10 / one_in as f64).round() / 1e10;
    let kept = (written * ONE).round() as i64;
    format!("{:.11}", kept as f64 / ONE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_are_shown_as_the_kernel_keeps_them() {
        let shown = [2, 3, 4, 7].map(probability);
        assert_eq!(shown, ["0.50000000000", "0.33333333349", "0.25000000000", "0.14285714272"]);
    }
}
