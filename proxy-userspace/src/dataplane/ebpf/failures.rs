//! What of a plan could not be made true, while the rest of it is.

use std::{
    borrow::Cow,
    collections::{HashMap, HashSet},
};

use proxy_common::layout::ServiceValue;

use super::{EbpfError, MapSizes, Plan, State, Step, plan::capacity};
use crate::kernel::KernelError;

/// The service ports and links that failed, and why the first of them did.
#[derive(Debug, Default)]
pub(super) struct Failures {
    services: HashSet<u32>,
    /// Names by index.
    links: HashMap<u32, String>,
    /// Addresses of the node, and how local callers are told.
    of_node: usize,
    first: Option<(Subject, KernelError)>,
}

#[derive(Debug)]
enum Subject {
    Service(u32),
    Link(String),
    /// An address of the node, or how local callers are told.
    Node(String),
}

impl Failures {
    /// Those service ports fail at once for which a map has no room: half of them would be worse than none.
    pub(super) fn of_those_without_room(state: &State, plan: &Plan, sizes: &MapSizes) -> Self {
        let refused = capacity::refused(state, plan, sizes);
        let first = refused
            .iter()
            .min_by_key(|(service, _)| **service)
            .map(|(service, full)| (Subject::Service(*service), MapSizes::full(full.map, full.capacity)));
        Self { services: refused.into_keys().collect(), first, ..Self::default() }
    }

    /// What to do for a step, if anything, after what failed before it. A destination that a failed service port was to take over
    /// is closed: what its old owner has goes.
    pub(super) fn instead_of<'a>(&self, step: &'a Step, state: &State) -> Option<Cow<'a, Step>> {
        let failed = step.service().filter(|service| self.services.contains(service));
        if let (Some(service), Step::PutService(key, _)) = (failed, step) {
            let owner = state.service(key).map(|ServiceValue { service, .. }| *service);
            let other = owner.filter(|owner| *owner != service)?;
            return Some(Cow::Owned(Step::RemoveService(*key, other)));
        }
        let is_skipped = failed.is_some() || step.link().is_some_and(|index| self.links.contains_key(&index));
        (!is_skipped).then_some(Cow::Borrowed(step))
    }

    /// A step failed.
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
                self.of_node += 1;
                Subject::Node(fact(step))
            }
        };
        self.first.get_or_insert((subject, error));
    }

    /// All went well, or what did not.
    pub(super) fn outcome(self, state: &State) -> Result<(), EbpfError> {
        let what = self.what();
        let Some((subject, source)) = self.first else { return Ok(()) };
        let first = match subject {
            Subject::Service(service) => {
                state.name(service).map_or_else(|| format!("service {service}"), ToString::to_string)
            }
            Subject::Link(name) => format!(
                "link {name} (`bpftool net` and `tc filter show` tell what else is on it; --exclude-interfaces leaves it alone)"
            ),
            Subject::Node(fact) => fact,
        };
        Err(EbpfError::Incomplete { what, first, source: Box::new(source) })
    }

    fn what(&self) -> String {
        let counts = [
            (self.services.len(), "service port"),
            (self.links.len(), "link"),
            (self.of_node, "fact of the node"),
        ];
        let counted = counts.iter().filter(|(count, _)| *count > 0);
        counted
            .map(|(count, what)| format!("{count} {what}{}", if *count == 1 { "" } else { "s" }))
            .collect::<Vec<_>>()
            .join(" and ")
    }
}

/// What a step says of the node.
fn fact(step: &Step) -> String {
    match step {
        Step::PutNodeAddress(address) | Step::RemoveNodeAddress(address) => {
            format!("the node's address {address}")
        }
        Step::PutLocalSource(range) | Step::RemoveLocalSource(range) => {
            format!("the range of pods that begins at {}", range.addr)
        }
        Step::PutLocalLink(index) | Step::RemoveLocalLink(index) => {
            format!("the pods' link of index {index}")
        }
        Step::PutBridgePort(index, _) | Step::RemoveBridgePort(index) => {
            format!("the bridge's port of index {index}")
        }
        _ => "how pods' traffic is told".into(),
    }
}
