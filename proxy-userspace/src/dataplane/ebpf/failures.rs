//! What failed of a plan, while the rest of it was applied.

use std::{
    borrow::Cow,
    collections::{HashMap, HashSet},
};

use proxy_common::layout::{MapSizes, ServiceValue};

use super::{EbpfError, MapEntry, Plan, State, Step, maps, plan::capacity};
use crate::kernel::KernelError;

/// The service ports and links that failed, and the first error.
#[derive(Debug, Default)]
pub(super) struct Failures {
    services: HashSet<u32>,
    /// Names by index.
    links: HashMap<u32, String>,
    /// Entries that belong to the node: its addresses, and how local clients are recognized.
    node_settings: usize,
    first: Option<(Subject, KernelError)>,
}

#[derive(Debug)]
enum Subject {
    Service(u32),
    Link(String),
    /// An address of the node, or how local clients are recognized.
    Node(String),
}

impl Failures {
    /// Starts with the service ports for which a map has no room. A service port that is half
    /// written would be worse than one that is not.
    pub(super) fn without_room(state: &State, plan: &Plan, sizes: &MapSizes) -> Self {
        let without_room = capacity::without_room(state, plan, sizes);
        let first = without_room
            .first_key_value()
            .map(|(service, map)| (Subject::Service(*service), maps::map_full(map, sizes)));
        Self { services: without_room.into_keys().collect(), first, ..Self::default() }
    }

    /// Returns what to do for a step after the failures before it, if anything. If a failed service
    /// port was to take over a frontend, the frontend is removed, because its old owner loses it.
    pub(super) fn adjust<'a>(&self, step: &'a Step, state: &State) -> Option<Cow<'a, Step>> {
        let failed = step.service().filter(|service| self.services.contains(service));
        if let (Some(service), Step::Put(MapEntry::Service(key, _))) = (failed, step) {
            let held: &ServiceValue = state.service(key).filter(|held| held.service != service)?;
            return Some(Cow::Owned(Step::Remove(MapEntry::Service(*key, *held))));
        }
        let is_skipped = failed.is_some() || step.link().is_some_and(|index| self.links.contains_key(&index));
        (!is_skipped).then_some(Cow::Borrowed(step))
    }

    /// Records that a step failed.
    pub(super) fn add(&mut self, step: &Step, error: KernelError) {
        let subject = match (step.service(), step) {
            (Some(service), _) => {
                self.services.insert(service);
                Subject::Service(service)
            }
            (None, Step::AttachLink(at, link)) => {
                self.links.insert(at.index, link.name.to_string());
                Subject::Link(link.name.to_string())
            }
            (None, Step::DetachLink(at)) => {
                let name = format!("of index {}", at.index);
                self.links.insert(at.index, name.clone());
                Subject::Link(name)
            }
            (None, step) => {
                self.node_settings += 1;
                Subject::Node(node_setting(step))
            }
        };
        self.first.get_or_insert((subject, error));
    }

    /// Returns an error if anything failed.
    pub(super) fn into_result(self, state: &State) -> Result<(), EbpfError> {
        let what = self.counts();
        let Some((subject, source)) = self.first else { return Ok(()) };
        let first = match subject {
            Subject::Service(service) => {
                state.name(service).map_or_else(|| format!("service {service}"), ToString::to_string)
            }
            Subject::Link(name) => format!(
                "link {name} (`bpftool net` and `tc filter show` list what else is attached; --exclude-interfaces excludes the link)"
            ),
            Subject::Node(setting) => setting,
        };
        Err(EbpfError::Incomplete { what, first, source: Box::new(source) })
    }

    fn counts(&self) -> String {
        let counts = [
            (self.services.len(), "service port"),
            (self.links.len(), "link"),
            (self.node_settings, "node setting"),
        ];
        let counted = counts.iter().filter(|(count, _)| *count > 0);
        counted
            .map(|(count, what)| format!("{count} {what}{}", if *count == 1 { "" } else { "s" }))
            .collect::<Vec<_>>()
            .join(" and ")
    }
}

/// Describes the setting of the node that a step changes.
fn node_setting(step: &Step) -> String {
    match step {
        Step::Put(entry) | Step::Remove(entry) => match entry {
            MapEntry::NodeAddress(address) => format!("the node address {address}"),
            MapEntry::LocalSource(range) => format!("the range of pods that begins at {}", range.addr),
            MapEntry::LocalLink(index) => format!("the pods' link of index {index}"),
            MapEntry::BridgePort(index, _) => format!("the bridge port of index {index}"),
            other => format!("an entry of map {}", other.map()),
        },
        _ => "how local clients are recognized".into(),
    }
}
