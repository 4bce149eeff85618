//! The parts of a plan that failed. All other parts were applied.

use std::{
    borrow::Cow,
    collections::{HashMap, HashSet},
    fmt::Display,
};

use proxy_common::layout::{MapSizes, ServiceValue};

use super::{EbpfError, HookState, LinkHook, MapEntry, Plan, State, Step, maps, plan::capacity};
use crate::{
    dataplane::{LeftOutPort, LeftOutReason},
    kernel::KernelError,
    model::ServicePortKey,
};

/// The service ports and links that failed, and the first error.
#[derive(Debug, Default)]
pub(super) struct Failures {
    /// Why each service port failed, by identifier.
    services: HashMap<u32, (LeftOutReason, String)>,
    /// By index.
    links: HashSet<u32>,
    /// Entries that belong to the node: its addresses, and how local clients are recognized.
    node_settings: usize,
    /// What failed first, and why.
    first: Option<(String, KernelError)>,
}

impl Failures {
    /// Starts with the service ports for which a map has no room. A service port that is half
    /// written would be worse than one that is not.
    pub(super) fn without_room(state: &State, plan: &Plan, sizes: &MapSizes) -> Self {
        let without_room = capacity::without_room(state, plan, sizes);
        let first = without_room.first_key_value();
        let first = first.map(|(service, map)| (service_name(*service, state), maps::map_full(map, sizes)));
        let why = |map| (LeftOutReason::MapFull, maps::map_full(map, sizes).to_string());
        let services = without_room.into_iter().map(|(service, map)| (service, why(map))).collect();
        Self { services, first, ..Self::default() }
    }

    /// Returns what to do for a step after the failures before it, if anything. If a failed service
    /// port was to take over a frontend, the frontend is removed, because its old owner loses it.
    pub(super) fn adjust<'a>(&self, step: &'a Step, state: &State) -> Option<Cow<'a, Step>> {
        let failed = step.service().filter(|service| self.services.contains_key(service));
        if let (Some(service), Step::Put(MapEntry::Service(key, _))) = (failed, step) {
            let held: &ServiceValue = state.service(key).filter(|held| held.service != service)?;
            return Some(Cow::Owned(Step::Remove(MapEntry::Service(*key, *held))));
        }
        let waits = match step {
            // Packets of a VLAN whose own link has no program stay with that of the link beneath.
            Step::Put(MapEntry::Vlan(_)) => !self.links.is_empty(),
            // Packets of a bond that has no program stay with those of its ports.
            Step::DetachLink(at, Some(bond)) => !is_attached(LinkHook { index: *bond, ..*at }, state),
            _ => false,
        };
        let is_skipped = failed.is_some() || step.link().is_some_and(|index| self.links.contains(&index));
        (!is_skipped && !waits).then_some(Cow::Borrowed(step))
    }

    /// Records that a step failed.
    pub(super) fn add(&mut self, step: &Step, error: KernelError, state: &State) {
        match (step.service(), step.link()) {
            (Some(service), _) => drop(self.services.insert(service, (reason(&error), error.to_string()))),
            (None, Some(index)) => drop(self.links.insert(index)),
            (None, None) => self.node_settings += 1,
        }
        self.first.get_or_insert_with(|| (describe(step, state), error));
    }

    /// Returns the service ports that failed.
    pub(super) fn left_out_ports(&self, state: &State) -> Vec<LeftOutPort> {
        if self.services.is_empty() {
            return Vec::new();
        }
        let left_out = |(port, service): (&ServicePortKey, u32)| {
            let (reason, message) = self.services.get(&service)?.clone();
            Some(LeftOutPort { port: port.clone(), reason, message })
        };
        state.names().filter_map(left_out).collect()
    }

    /// Returns an error if anything failed.
    pub(super) fn into_result(self) -> Result<(), EbpfError> {
        let counts = [
            (self.services.len(), "service port"),
            (self.links.len(), "link"),
            (self.node_settings, "node setting"),
        ];
        let counts = counts.iter().filter(|(count, _)| *count > 0);
        let what: Vec<String> = counts
            .map(|(count, what)| format!("{count} {what}{}", if *count == 1 { "" } else { "s" }))
            .collect();
        let incomplete = |(first, source)| EbpfError::Incomplete {
            only_ports: self.links.is_empty() && self.node_settings == 0,
            what: what.join(" and "),
            first,
            source: Box::new(source),
        };
        self.first.map(incomplete).map_or(Ok(()), Err)
    }
}

/// Returns true if a program of this process is on the hook.
fn is_attached(at: LinkHook, state: &State) -> bool {
    matches!(state.links.get(&at), Some(HookState::Current(_) | HookState::Displaced(_)))
}

const fn reason(error: &KernelError) -> LeftOutReason {
    if matches!(error, KernelError::MapFull { .. }) {
        LeftOutReason::MapFull
    } else {
        LeftOutReason::Rejected
    }
}

fn service_name(service: u32, state: &State) -> String {
    state.name(service).map_or_else(|| format!("service {service}"), ToString::to_string)
}

/// Describes what a step is for.
fn describe(step: &Step, state: &State) -> String {
    if let Some(service) = step.service() {
        return service_name(service, state);
    }
    let link = |link: &dyn Display| {
        format!(
            "link {link} (`bpftool net` and `tc filter show` list what else is attached; \
             --exclude-interfaces excludes the link)"
        )
    };
    match step {
        Step::AttachLink(_, served) => link(&served.name),
        Step::AttachXdp(_, xdp) => format!("the XDP program of link {}", xdp.name),
        Step::DetachXdp(index) => format!("the XDP program of the link of index {index}"),
        Step::DetachLink(at, _) | Step::LeaveLink(at) => link(&format_args!("of index {}", at.index)),
        Step::Put(entry) | Step::Remove(entry) => match entry {
            MapEntry::NodeAddress(address) => format!("the node address {address}"),
            MapEntry::MasqueradeAddress(_, address) => {
                format!("the source address {address} of masqueraded packets")
            }
            MapEntry::LocalSource(range) => format!("the range of pods that begins at {}", range.addr),
            MapEntry::LocalLink(index) => format!("the pod link with index {index}"),
            MapEntry::DirectLink(index) => format!("the direct path for the link with index {index}"),
            MapEntry::PeerLink(index) => format!("the peer of the link with index {index}"),
            MapEntry::XdpLink(index, _) => format!("XDP for the link with index {index}"),
            MapEntry::BridgePort(index, _) => format!("the bridge port of index {index}"),
            MapEntry::Vlan(vlan) => format!("the VLAN {} on the link with index {}", vlan.id, vlan.link),
            MapEntry::ExemptNetns(cookie) => format!("the exempt network namespace {}", cookie.0),
            MapEntry::ExemptSource(address) => format!("the exempt pod address {address}"),
            other => format!("an entry of map {}", other.map()),
        },
        Step::SetSocketScope(_) => "which sockets are served".into(),
        Step::SetMasquerade(_) => "what masquerades packets".into(),
        Step::SetDirect(_) => "the direct path".into(),
        Step::SetTunnel(_) => "the tunnel to other nodes".into(),
        Step::SetNewFlows(_) => "what translates new flows on links".into(),
        Step::ForgetSource(address) => format!("the flows with the source address {address}"),
        Step::ForgetFlows(_) => "the flows that are out of date".into(),
        Step::LeaveFlowsToConntrack => "the UDP flows that conntrack translates".into(),
        Step::LeaveConnectionsToConntrack { .. } => "the connections that conntrack translates".into(),
        Step::TrackFlows | Step::HandFlowsToConntrack => {
            "the flows on links, which conntrack takes over".into()
        }
        _ => "how local clients are recognized".into(),
    }
}
