//! Which flows a mode does not have to carry yet, and why. They are counted and listed, never passed.

use crate::{
    case::{Action, Case, Flow},
    world::Host,
};

/// Hosts whose flows to node1 a mode does not translate yet.
const PENDING_FROM: &[(&str, &[Host], &str)] = &[(
    "ebpf",
    &[Host::Client, Host::Node2, Host::B1, Host::B2],
    "the ebpf mode translates at the socket so far, not what comes in on a link",
)];

/// Configuration a mode does not act on yet.
const PENDING_CONFIG: &[(&str, &[&str], &str)] = &[(
    "ebpf",
    &["linux", "detectLocalMode"],
    "the ebpf mode masquerades nothing so far, so what to masquerade has no effect",
)];

/// What upstream's mode of this name does not do either; a case that requires it is not for that mode.
const NOT_IN_MODE: &[(&str, &str)] = &[
    ("nftables", "localhost-nodeports"),
    ("nftables", "nodeports-on-all-addresses"),
    ("ipvs", "localhost-nodeports"),
];

/// What is pending in a run.
#[derive(Clone, Debug)]
pub struct Pending {
    mode: String,
    hosts: Vec<Host>,
    why: String,
}

impl Pending {
    /// The mode's own pending flows, or those from `hosts` if given.
    pub fn new(mode: &str, hosts: Option<&[Host]>) -> Self {
        let of_mode = PENDING_FROM.iter().find(|(of, ..)| *of == mode);
        let (hosts, why) = match (hosts, of_mode) {
            (Some(hosts), _) => (hosts, "asked for with --pending-from"),
            (None, Some((_, hosts, why))) => (*hosts, *why),
            (None, None) => (&[][..], ""),
        };
        Self { mode: mode.to_owned(), hosts: hosts.to_vec(), why: why.to_owned() }
    }

    /// Why a flow of a case is pending; None if it has to hold.
    pub fn reason(&self, case: &Case, flow: &Flow) -> Option<String> {
        self.tag_not_in_mode(case)
            .or_else(|| self.config_without_effect(case))
            .or_else(|| self.is_from_pending_host(flow).then(|| self.why.clone()))
    }

    /// Probes of the proxy itself need no translation.
    fn is_from_pending_host(&self, flow: &Flow) -> bool {
        self.hosts.contains(&flow.from) && !matches!(flow.action, Action::Get(_))
    }

    fn tag_not_in_mode(&self, case: &Case) -> Option<String> {
        let missing = |tag: &str| NOT_IN_MODE.iter().any(|(mode, no)| *mode == self.mode && *no == tag);
        let tag = case.requires.iter().find(|tag| missing(tag))?;
        Some(format!("mode {} has no {tag}, as upstream", self.mode))
    }

    fn config_without_effect(&self, case: &Case) -> Option<String> {
        let (_, fields, why) = PENDING_CONFIG.iter().find(|(mode, ..)| *mode == self.mode)?;
        let field = fields.iter().find(|field| case.config.contains_key(**field))?;
        Some(format!("config.{field}: {why}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn case(head: &str) -> Case {
        let flows = "{from: client, to: '10.96.0.1:80', proto: tcp, reach: [a1]}, \
                     {from: client, http: 'http://192.168.57.11/', status: 200}, \
                     {from: a1, to: '10.96.0.1:80', proto: tcp, reach: [a1]}";
        format!("{{name: x, about: y, {head} steps: [{{flows: [{flows}]}}]}}").parse().unwrap()
    }

    fn pending(case: &Case, mode: &str, hosts: Option<&[Host]>) -> Vec<bool> {
        let pending = Pending::new(mode, hosts);
        case.steps[0].flows.iter().map(|flow| pending.reason(case, flow).is_some()).collect()
    }

    #[test]
    fn in_ebpf_mode_flows_from_outside_the_node_are_pending_but_probes_of_the_proxy_are_not() {
        assert_eq!(pending(&case(""), "ebpf", None), [true, false, false]);
    }

    #[test]
    fn other_modes_have_nothing_pending() {
        assert_eq!(pending(&case(""), "nftables", None), [false; 3]);
    }

    #[test]
    fn the_hosts_asked_for_replace_the_modes_own() {
        assert_eq!(pending(&case(""), "ebpf", Some(&[])), [false; 3]);
        assert_eq!(pending(&case(""), "nftables", Some(&[Host::A1])), [false, false, true]);
    }

    #[test]
    fn in_ebpf_mode_all_flows_of_cases_about_masquerading_are_pending() {
        assert_eq!(pending(&case("config: {linux: {masqueradeAll: true}},"), "ebpf", None), [true; 3]);
        assert_eq!(pending(&case("config: {detectLocalMode: NodeCIDR},"), "ebpf", None), [true; 3]);
        assert_eq!(pending(&case("config: {nodePortAddresses: []},"), "ebpf", None), [true, false, false]);
    }

    #[test]
    fn a_case_that_requires_what_the_mode_has_not_is_pending_there() {
        let case = case("requires: [localhost-nodeports],");
        assert_eq!(pending(&case, "ipvs", None), [true; 3]);
        assert_eq!(pending(&case, "iptables", None), [false; 3]);
    }
}
