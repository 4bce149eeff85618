//! What of a plan could not be made true, while the rest of it is.

use std::{
    borrow::Cow,
    collections::{HashMap, HashSet},
};

use proxy_common::layout::ServiceValue;

use super::{EbpfError, MapSizes, Plan, State, Step, room};
use crate::kernel::KernelError;

/// The service ports and links that failed, and why the first of them did.
#[derive(Debug, Default)]
pub(super) struct Failures {
    services: HashSet<u32>,
    /// Names by index.
    links: HashMap<u32, String>,
    /// Addresses of the node, and how local callers are told.
    of_node: usize,
    out_of_room: bool,
    first: Option<(Subject, KernelError)>,
}

#[derive(Debug)]
enum Subject {
    Service(u32),
    Link(String),
    Node,
}

impl Failures {
    /// Those service ports fail at once for which a map has no room: half of them would be worse than none.
    pub(super) fn of_those_without_room(state: &State, plan: &Plan, sizes: &MapSizes) -> Self {
        let refused = room::refused(state, plan, sizes);
        let first = refused
            .iter()
            .min_by_key(|(service, _)| **service)
            .map(|(service, full)| (Subject::Service(*service), MapSizes::full(full.map, full.capacity)));
        let out_of_room = first.is_some();
        Self { services: refused.into_keys().collect(), out_of_room, first, ..Self::default() }
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
        self.out_of_room |= matches!(error, KernelError::MapFull { .. });
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
            _ => {
                self.of_node += 1;
                Subject::Node
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
            Subject::Node => "this node's own".into(),
        };
        Err(EbpfError::Incomplete { what, first, out_of_room: self.out_of_room, source: Box::new(source) })
    }

    fn what(&self) -> String {
        let counts = [
            (self.services.len(), "service ports"),
            (self.links.len(), "links"),
            (self.of_node, "addresses or links of the node"),
        ];
        let counted = counts.iter().filter(|(count, _)| *count > 0);
        counted.map(|(count, what)| format!("{count} {what}")).collect::<Vec<_>>().join(" and ")
    }
}
