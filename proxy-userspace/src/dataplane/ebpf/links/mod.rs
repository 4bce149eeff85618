//! Attaches and detaches the programs on the node's links, and observes what is attached.

mod order;
mod reader;
pub(super) mod xdp;

use std::{collections::BTreeMap, path::Path, sync::Arc, time::Duration};

use nix::net::if_::if_nameindex;

pub(super) use self::reader::{ExpectedLinks, LinkReader};
use self::{order::Order, xdp::XdpPrograms};
use crate::{
    dataplane::DisplacedLink,
    kernel::{
        KernelError,
        bpf::{
            Object, PinDir,
            tc::{AttachOutcome, Attached, Hook, LinkProgram, clsact::Clsact, tcx},
        },
        clock,
    },
    model::{Framing, ServedLink},
};

/// The hooks, in the order of attachment.
const HOOKS: [Hook; 2] = [Hook::Egress, Hook::Ingress];

/// The warning for a link without room for programs.
const LEFT_OUT: &str = "cannot attach programs to this link: it has an ingress qdisc of another program, and kernels before 6.6 \
                        need a clsact qdisc in its place. The backstop serves packets that arrive on this link; with \
                        --backstop never, nothing does";

/// How programs are attached to links.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LinkAttachment {
    /// Through TCX if the kernel has it (6.6), otherwise as filters of a clsact qdisc.
    #[default]
    Probe,
    /// As filters of a clsact qdisc, which every kernel has. For tests.
    Clsact,
}

/// A hook of one link. The order is that in which programs are attached: on all links, those that
/// translate replies come before those that translate requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkHook {
    /// The hook.
    pub hook: Hook,
    /// The index of the link.
    pub index: u32,
}

/// Our program on a hook of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HookState {
    /// The program of this process for links with this framing.
    Current(Framing),
    /// The program of an earlier process; a program behind that of another owner, which is to be
    /// put back; or a pin without a program.
    Outdated,
    /// The program of this process for links with this framing, behind that of another owner. It
    /// stays there, because it was put back several times.
    Displaced(Framing),
    /// None, because the qdisc of another owner is in the way. The backstop serves the link.
    LeftOut,
}

/// The programs on links.
pub(super) struct Links {
    means: Means,
    order: Order,
    /// The XDP programs.
    pub(super) xdp: XdpPrograms,
}

/// The way in which programs are attached.
enum Means {
    Tcx,
    Clsact {
        clsact: Clsact,
        /// Names of the links that have no room for programs, by index.
        left_out: BTreeMap<u32, Arc<str>>,
    },
}

impl Links {
    /// Loads nothing: programs are loaded for the first link of their framing.
    pub(super) fn open(attachment: LinkAttachment) -> Result<Self, KernelError> {
        let means = if attachment == LinkAttachment::Probe && tcx::is_supported() {
            Means::Tcx
        } else {
            Means::Clsact { clsact: Clsact::open()?, left_out: BTreeMap::new() }
        };
        Ok(Self { means, order: Order::default(), xdp: XdpPrograms::default() })
    }

    /// Loads the programs for Ethernet links.
    pub(super) fn load(object: &mut Object) -> Result<(), KernelError> {
        let names = HOOKS.map(|hook| program_name(hook, Framing::Ethernet));
        names.into_iter().try_for_each(|name| object.link_program(name).map(drop))
    }

    /// Attaches the program of this process. Returns what is attached now, or `None` if the link is
    /// gone.
    ///
    /// A link without room for programs is left out: packets that arrive there are not translated,
    /// because their replies could not be. The backstop serves them.
    pub(super) fn attach(
        &mut self,
        object: &mut Object,
        pins: &PinDir,
        at: LinkHook,
        link: &ServedLink,
    ) -> Result<Option<HookState>, KernelError> {
        let name = program_name(at.hook, link.framing);
        let outcome = match &mut self.means {
            Means::Tcx => {
                let pin = pins.link(&pin_name(at));
                tcx::attach(|present| choose_program(object, name, present), at.index, at.hook, &pin)?
            }
            // Egress has no program. Even if the qdisc is gone by now, replies would not be
            // translated.
            Means::Clsact { left_out, .. }
                if at.hook == Hook::Ingress && left_out.contains_key(&at.index) =>
            {
                AttachOutcome::NoEgressHook
            }
            Means::Clsact { clsact, left_out } => {
                left_out.remove(&at.index);
                clsact.attach(object.link_program(name)?, at.index, at.hook)?
            }
        };
        match outcome {
            AttachOutcome::Attached => Ok(Some(HookState::Current(link.framing))),
            AttachOutcome::LinkGone => {
                tracing::debug!(link = at.index, "the link is gone before a program was attached to it");
                Ok(None)
            }
            AttachOutcome::NoEgressHook => {
                self.leave_out(at.index, link);
                Ok(Some(HookState::LeftOut))
            }
        }
    }

    fn leave_out(&mut self, index: u32, link: &ServedLink) {
        if let Means::Clsact { left_out, .. } = &mut self.means
            && left_out.insert(index, Arc::clone(&link.name)).is_none()
        {
            tracing::warn!(link = &*link.name, "{LEFT_OUT}");
        }
    }

    pub(super) fn detach(&mut self, pins: &PinDir, at: LinkHook) -> Result<(), KernelError> {
        match &mut self.means {
            Means::Tcx => tcx::detach(&pins.link(&pin_name(at))),
            Means::Clsact { clsact, left_out } => {
                left_out.remove(&at.index);
                clsact.detach(at.index, at.hook)
            }
        }
    }

    /// Detaches the program from a link that netfilter serves from now on. A clsact qdisc stays,
    /// with a mark for [`remove_all`]: to remove it, and to add it again when the programs come
    /// back, would lose packets.
    pub(super) fn leave(&mut self, pins: &PinDir, at: LinkHook) -> Result<(), KernelError> {
        match &mut self.means {
            Means::Clsact { clsact, left_out } if pins.mark(&mark_name(at.index)).is_ok() => {
                left_out.remove(&at.index);
                clsact.remove_filter(at.index, at.hook)
            }
            Means::Clsact { .. } | Means::Tcx => self.detach(pins, at),
        }
    }

    /// Returns the names of the links that have no room for programs.
    pub(super) fn left_out(&self) -> Vec<Arc<str>> {
        match &self.means {
            Means::Tcx => Vec::new(),
            Means::Clsact { left_out, .. } => left_out.values().cloned().collect(),
        }
    }

    /// Returns the links on which our program stays behind that of another owner.
    pub(super) fn displaced(&self) -> Vec<DisplacedLink> {
        self.order.displaced()
    }

    /// Returns a reader of the programs on links, for another thread.
    pub(super) fn reader(&self, pins: &PinDir) -> Result<LinkReader, KernelError> {
        let clsact = self.means.clsact().map(|_| Clsact::open()).transpose()?;
        Ok(LinkReader { clsact, pins: pins.unlocked() })
    }

    /// Returns what a [`LinkReader`] must find if nothing changed. Returns `None` if each look
    /// counts, because a program is not the first of its hook or was not within the last minutes.
    pub(super) fn expected(
        &self,
        object: &Object,
        states: &BTreeMap<LinkHook, HookState>,
    ) -> Option<ExpectedLinks> {
        if !self.order.is_empty() {
            return None;
        }
        ExpectedLinks::new(states, object.link_programs())
    }

    /// Returns our programs on all links.
    pub(super) fn observe(
        &mut self,
        object: &Object,
        pins: &PinDir,
    ) -> Result<BTreeMap<LinkHook, HookState>, KernelError> {
        let now = clock::monotonic()?;
        let attached = reader::read(self.means.clsact(), pins)?;
        let mut state = |(at, attached)| (at, hook_state(&mut self.order, object, at, attached, now));
        let mut states: BTreeMap<_, _> = attached.into_iter().map(&mut state).collect();
        self.order.retain(|at| states.contains_key(&at));
        if let Means::Clsact { clsact, left_out } = &mut self.means
            && !left_out.is_empty()
        {
            let in_the_way = clsact.with_ingress_qdisc()?;
            left_out.retain(|index, _| in_the_way.contains(index));
            let hooks = |&index: &u32| HOOKS.map(|hook| (LinkHook { hook, index }, HookState::LeftOut));
            states.extend(left_out.keys().flat_map(hooks));
        }
        Ok(states)
    }
}

impl Means {
    const fn clsact(&self) -> Option<&Clsact> {
        match self {
            Self::Tcx => None,
            Self::Clsact { clsact, .. } => Some(clsact),
        }
    }
}

/// Returns a link program. It differs from the one with the id `present`, if that is given.
fn choose_program<'a>(
    object: &'a mut Object,
    name: &'static str,
    present: Option<u32>,
) -> Result<LinkProgram<'a>, KernelError> {
    match present {
        Some(present) => object.other_link_program(name, present),
        None => object.link_program(name),
    }
}

/// Returns the state of a hook with this program at a monotonic time.
fn hook_state(
    order: &mut Order,
    object: &Object,
    at: LinkHook,
    attached: Option<Attached>,
    now: Duration,
) -> HookState {
    let Some(Attached { program, behind }) = attached else { return HookState::Outdated };
    let is_current = |framing: &Framing| object.is_link_program(program_name(at.hook, *framing), program);
    let Some(framing) = [Framing::Ethernet, Framing::Ip, Framing::Tunnel].into_iter().find(is_current) else {
        return HookState::Outdated;
    };
    match behind {
        None => {
            order.is_first(at, now);
            HookState::Current(framing)
        }
        Some(other) if order.is_behind(at, now, &other, || link_name(at.index)) => HookState::Outdated,
        Some(_) => HookState::Displaced(framing),
    }
}

/// Returns the name of a link for messages, or its index if the link is gone.
fn link_name(index: u32) -> Arc<str> {
    let links = if_nameindex().ok();
    let name = links.iter().flatten().find(|link| link.index() == index);
    name.map_or_else(|| index.to_string(), |link| link.name().to_string_lossy().into_owned()).into()
}

/// Removes all programs of any shunt process from the links of this network namespace. Continues
/// after errors.
pub(super) fn remove_all(pin_dir: &Path, pins: Option<&PinDir>) -> Vec<KernelError> {
    let mut errors = xdp::leave_all(pin_dir);
    if let Some(pins) = pins {
        errors.extend(xdp::remove_all(pins));
        errors.extend(remove_marked_qdiscs(pins).err());
        match reader::pinned(pins) {
            // In the opposite order of attaching.
            Ok(hooks) => {
                errors.extend(
                    reverse_order(hooks).filter_map(|at| tcx::detach(&pins.link(&pin_name(at))).err()),
                );
            }
            Err(error) => errors.push(error),
        }
    }
    match Clsact::open().and_then(|clsact| Ok((reader::filters(&clsact)?, clsact))) {
        Ok((filters, clsact)) => {
            let hooks = reverse_order(filters.into_iter().map(|(at, _)| at));
            errors.extend(hooks.filter_map(|at| clsact.detach(at.index, at.hook).err()));
        }
        Err(error) => errors.push(error),
    }
    errors
}

/// Removes the qdiscs that [`Links::leave`] left on links, unless others have added filters.
fn remove_marked_qdiscs(pins: &PinDir) -> Result<(), KernelError> {
    let clsact = Clsact::open()?;
    for name in pins.link_names()? {
        if let Some(index) = name.strip_prefix(MARK).and_then(|index| index.parse().ok()) {
            clsact.remove_empty_qdisc(index)?;
            pins.unmark(&name)?;
        }
    }
    Ok(())
}

fn reverse_order(hooks: impl Iterator<Item = LinkHook>) -> impl Iterator<Item = LinkHook> {
    let mut hooks: Vec<LinkHook> = hooks.collect();
    hooks.sort_unstable();
    hooks.into_iter().rev()
}

/// Returns true if links with this framing have a program at a hook. Packets that leave through the
/// tunnel are as they came in.
pub(super) const fn has_program(hook: Hook, framing: Framing) -> bool {
    !matches!((hook, framing), (Hook::Egress, Framing::Tunnel))
}

const fn program_name(hook: Hook, framing: Framing) -> &'static str {
    match (hook, framing) {
        (Hook::Ingress, Framing::Ethernet) => "shunt_in_eth",
        (Hook::Ingress, Framing::Ip) => "shunt_in_ip",
        (Hook::Ingress, Framing::Tunnel) => "shunt_in_tunnel",
        (Hook::Egress, Framing::Ethernet) => "shunt_out_eth",
        (Hook::Egress, Framing::Ip | Framing::Tunnel) => "shunt_out_ip",
    }
}

const IN: &str = "shunt_in_";
const OUT: &str = "shunt_out_";

/// The mark of a link whose clsact qdisc is ours, and has no filter of ours.
const MARK: &str = "clsact_";

fn mark_name(index: u32) -> String {
    format!("{MARK}{index}")
}

/// Returns the name of the pin of a BPF link. It has the index of the network link: names of
/// network links may have characters that bpffs refuses, such as dots.
fn pin_name(at: LinkHook) -> String {
    let hook = match at.hook {
        Hook::Ingress => IN,
        Hook::Egress => OUT,
    };
    format!("{hook}{}", at.index)
}

/// Returns the hook and link of a pin's name; `None` for other names.
pub(super) fn from_pin_name(name: &str) -> Option<LinkHook> {
    let of = |hook, prefix| Some(LinkHook { hook, index: name.strip_prefix(prefix)?.parse().ok()? });
    of(Hook::Ingress, IN).or_else(|| of(Hook::Egress, OUT))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_of_a_pin_has_the_hook_and_the_link() {
        for hook in [Hook::Ingress, Hook::Egress] {
            let at = LinkHook { hook, index: 4711 };
            assert_eq!(from_pin_name(&pin_name(at)), Some(at));
        }
        for other in ["shunt_in_eth", "shunt_out_7-new", "shunt_connect4", "in_7"] {
            assert_eq!(from_pin_name(other), None, "{other}");
        }
    }
}
