//! The programs on the node's links: which one a link needs, attaching and detaching it, and what runs there.

use std::{collections::BTreeMap, sync::Arc};

use nix::net::if_::if_nameindex;

use crate::{
    kernel::{
        KernelError,
        bpf::{
            Object, PinDir,
            tc::{
                Attached, Hook,
                clsact::{Clsact, Filter},
                tcx,
            },
        },
    },
    model::{Framing, ServedLink},
};

/// In the order in which they are filled.
const HOOKS: [Hook; 2] = [Hook::Egress, Hook::Ingress];

/// What is said of a link once.
const LEFT_OUT: &str = "somebody else's ingress qdisc leaves no room for a clsact one, which kernels before 6.6 need: what comes in \
                        on this link is not translated. Processes of this node and its pods are served at their sockets; pods with a \
                        kernel of their own, behind this link, are not";

/// How programs get onto links.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LinkAttachment {
    /// Through TCX, where the kernel has it (6.6), else as filters of a clsact qdisc.
    #[default]
    Probe,
    /// As filters of a clsact qdisc, which every kernel has: for tests.
    Clsact,
}

/// A hook of one link. Orders as hooks are to be filled: what translates back runs, on every link, before anything is
/// translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkHook {
    /// Which hook.
    pub hook: Hook,
    /// The link's index.
    pub index: u32,
}

/// What runs on a hook of a link, as far as it is ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HookState {
    /// This process's program for links of this kind.
    Current(Framing),
    /// An earlier process's program, or one behind somebody else's, or none any more although one is pinned.
    Outdated,
    /// Nothing, and there can be nothing: somebody else's qdisc is in the way, on a link that is not the node's own.
    LeftOut,
}

/// Attaches and detaches, in the way that the kernel offers.
#[derive(Debug)]
pub(super) enum Links {
    Tcx,
    Clsact {
        clsact: Clsact,
        /// Names of the links that have no room for programs, by index.
        left_out: BTreeMap<u32, Arc<str>>,
    },
}

impl Links {
    /// Has the kernel check the programs for Ethernet links, which nearly every node has: one that refuses them shall say so at start.
    /// Those for links without its headers wait for the first such link.
    pub(super) fn open(attachment: LinkAttachment, object: &mut Object) -> Result<Self, KernelError> {
        for hook in HOOKS {
            object.link_program(program_name(hook, Framing::Ethernet))?;
        }
        if attachment == LinkAttachment::Probe && tcx::is_supported() {
            return Ok(Self::Tcx);
        }
        Ok(Self::Clsact { clsact: Clsact::open()?, left_out: BTreeMap::new() })
    }

    /// Makes this process's program run, and says what runs now; nothing where the link is gone.
    ///
    /// A link without room for programs is left out: what comes in there is not translated, since it could not be translated
    /// back. Sockets are served all the same, so that little is lost on a pod's link. At the node's own addresses it is all that
    /// comes from elsewhere, and an error.
    pub(super) fn attach(
        &mut self,
        object: &mut Object,
        pins: &PinDir,
        at: LinkHook,
        link: &ServedLink,
    ) -> Result<Option<HookState>, KernelError> {
        let program = object.link_program(program_name(at.hook, link.framing))?;
        let attached = match self {
            Self::Tcx => tcx::attach(program, at.index, at.hook, &pins.link(&pin_name(at)))?,
            // Had room come about since, what is translated from now on could not be translated back.
            Self::Clsact { left_out, .. } if at.hook == Hook::Ingress && left_out.contains_key(&at.index) => {
                Attached::NoEgress
            }
            Self::Clsact { clsact, left_out } => {
                left_out.remove(&at.index);
                clsact.attach(program, at.index, at.hook)?
            }
        };
        match attached {
            Attached::Runs => Ok(Some(HookState::Current(link.framing))),
            Attached::LinkGone => {
                tracing::debug!(link = at.index, "gone before a program was attached to it");
                Ok(None)
            }
            Attached::NoEgress if link.has_node_address => {
                Err(KernelError::NoEgress { link: link.name.to_string() })
            }
            Attached::NoEgress => {
                self.leave_out(at.index, link);
                Ok(Some(HookState::LeftOut))
            }
        }
    }

    fn leave_out(&mut self, index: u32, link: &ServedLink) {
        if let Self::Clsact { left_out, .. } = self
            && left_out.insert(index, Arc::clone(&link.name)).is_none()
        {
            tracing::warn!(link = &*link.name, "{LEFT_OUT}");
        }
    }

    pub(super) fn detach(&mut self, pins: &PinDir, at: LinkHook) -> Result<(), KernelError> {
        match self {
            Self::Tcx => tcx::detach(&pins.link(&pin_name(at))),
            Self::Clsact { clsact, left_out } => {
                left_out.remove(&at.index);
                clsact.detach(at.index, at.hook)
            }
        }
    }

    /// The names of the links that have no room for programs.
    pub(super) fn left_out(&self) -> Vec<Arc<str>> {
        match self {
            Self::Tcx => Vec::new(),
            Self::Clsact { left_out, .. } => left_out.values().cloned().collect(),
        }
    }

    /// What is ours on all links.
    pub(super) fn observe(
        &mut self,
        object: &Object,
        pins: &PinDir,
    ) -> Result<BTreeMap<LinkHook, HookState>, KernelError> {
        let running = |at: LinkHook, program: Option<u32>| {
            let is_it = |framing: &Framing| {
                program.is_some() && object.link_program_id(program_name(at.hook, *framing)) == program
            };
            let framing = [Framing::Ethernet, Framing::Ip].into_iter().find(is_it);
            (at, framing.map_or(HookState::Outdated, HookState::Current))
        };
        match self {
            Self::Tcx => pinned(pins)?
                .map(|at| {
                    let program = tcx::attached(at.index, at.hook, &pins.link(&pin_name(at)))?;
                    Ok(running(at, program))
                })
                .collect(),
            Self::Clsact { clsact, left_out } => {
                let filters = filters(clsact)?.into_iter();
                let program = |filter: Filter| filter.is_first.then_some(filter.program);
                let ours = filters.map(|(at, filter)| running(at, program(filter)));
                if left_out.is_empty() {
                    return Ok(ours.collect());
                }
                let in_the_way = clsact.with_ingress_qdisc()?;
                left_out.retain(|index, _| in_the_way.contains(index));
                let hooks = |&index: &u32| HOOKS.map(|hook| (LinkHook { hook, index }, HookState::LeftOut));
                Ok(ours.chain(left_out.keys().flat_map(hooks)).collect())
            }
        }
    }
}

/// Takes all off that any process of ours ever put onto links of this network namespace; goes on past errors.
pub(super) fn remove_all(pins: Option<&PinDir>) -> Vec<KernelError> {
    let mut errors = Vec::new();
    if let Some(pins) = pins {
        match pinned(pins) {
            // What is last to be attached goes first.
            Ok(hooks) => {
                errors
                    .extend(last_first(hooks).filter_map(|at| tcx::detach(&pins.link(&pin_name(at))).err()));
            }
            Err(error) => errors.push(error),
        }
    }
    match Clsact::open().and_then(|clsact| Ok((filters(&clsact)?, clsact))) {
        Ok((filters, clsact)) => {
            let hooks = last_first(filters.into_iter().map(|(at, _)| at));
            errors.extend(hooks.filter_map(|at| clsact.detach(at.index, at.hook).err()));
        }
        Err(error) => errors.push(error),
    }
    errors
}

fn last_first(hooks: impl Iterator<Item = LinkHook>) -> impl Iterator<Item = LinkHook> {
    let mut hooks: Vec<LinkHook> = hooks.collect();
    hooks.sort_unstable();
    hooks.into_iter().rev()
}

fn pinned(pins: &PinDir) -> Result<impl Iterator<Item = LinkHook>, KernelError> {
    Ok(pins.link_names()?.into_iter().filter_map(|name| from_pin_name(&name)))
}

/// Our filters on all links of this network namespace.
fn filters(clsact: &Clsact) -> Result<Vec<(LinkHook, Filter)>, KernelError> {
    let links = if_nameindex().map_err(|error| KernelError::call("list", "links")(error.into()))?;
    let mut found = Vec::new();
    for link in &links {
        for hook in HOOKS {
            let at = LinkHook { hook, index: link.index() };
            let filter = clsact.attached(at.index, hook)?;
            found.extend(
                filter.filter(|filter| filter.name.starts_with(super::LINKS)).map(|filter| (at, filter)),
            );
        }
    }
    Ok(found)
}

const fn program_name(hook: Hook, framing: Framing) -> &'static str {
    match (hook, framing) {
        (Hook::Ingress, Framing::Ethernet) => "shunt_in_eth",
        (Hook::Ingress, Framing::Ip) => "shunt_in_ip",
        (Hook::Egress, Framing::Ethernet) => "shunt_out_eth",
        (Hook::Egress, Framing::Ip) => "shunt_out_ip",
    }
}

const IN: &str = "shunt_in_";
const OUT: &str = "shunt_out_";

/// Where a BPF link is pinned: by the index, since names of links may hold what bpffs does not take, such as dots.
fn pin_name(at: LinkHook) -> String {
    let hook = match at.hook {
        Hook::Ingress => IN,
        Hook::Egress => OUT,
    };
    format!("{hook}{}", at.index)
}

/// Which hook of which link a name is for; none for other names.
pub(super) fn from_pin_name(name: &str) -> Option<LinkHook> {
    let of = |hook, prefix| Some(LinkHook { hook, index: name.strip_prefix(prefix)?.parse().ok()? });
    of(Hook::Ingress, IN).or_else(|| of(Hook::Egress, OUT))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_pin_tells_its_hook_and_link_and_names_of_programs_are_none() {
        for hook in [Hook::Ingress, Hook::Egress] {
            let at = LinkHook { hook, index: 4711 };
            assert_eq!(from_pin_name(&pin_name(at)), Some(at));
        }
        for other in ["shunt_in_eth", "shunt_out_7-new", "shunt_connect4", "in_7"] {
            assert_eq!(from_pin_name(other), None, "{other}");
        }
    }
}
