//! Reads which programs of ours are on links, and compares them with what a plan left there. Works
//! in any thread of the network namespace.

use std::collections::{BTreeMap, BTreeSet};

use nix::net::if_::{Interface, Interfaces, if_nameindex};

use super::{HOOKS, HookState, LinkHook, from_pin_name, pin_name, program_name};
use crate::{
    kernel::{
        KernelError,
        bpf::{
            PinDir,
            tc::{
                Attached,
                clsact::{Clsact, Filter},
                tcx,
            },
        },
    },
    model::Framing,
};

/// The programs on hooks, as they are. `None` is a pin without a program.
pub(super) type OnHooks = BTreeMap<LinkHook, Option<Attached>>;

/// Reads programs on links with a socket of its own.
pub(crate) struct LinkReader {
    /// `None` for TCX.
    pub(super) clsact: Option<Clsact>,
    pub(super) pins: PinDir,
}

impl LinkReader {
    /// Returns true if the programs on links are the expected ones. A link that is gone needs none:
    /// the node's facts report it.
    pub(crate) fn finds(&self, expected: &ExpectedLinks) -> Result<bool, KernelError> {
        let found = read(self.clsact.as_ref(), &self.pins)?;
        if expected.is_matched_by(&found, |_| true) {
            return Ok(true);
        }
        let here: BTreeSet<u32> = interfaces()?.iter().map(Interface::index).collect();
        Ok(expected.is_matched_by(&found, |index| here.contains(&index)))
    }
}

/// The programs that must be on links: each one the first of its hook.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ExpectedLinks {
    framings: BTreeMap<LinkHook, Framing>,
    /// The names and ids of the programs of this process.
    programs: Vec<(String, u32)>,
}

impl ExpectedLinks {
    /// Returns `None` if a hook has another state than a current program that is the first.
    pub(super) fn new(states: &BTreeMap<LinkHook, HookState>, programs: &[(String, u32)]) -> Option<Self> {
        let framing = |(at, state): (&LinkHook, &HookState)| match state {
            HookState::Current(framing) => Some((*at, *framing)),
            HookState::Outdated | HookState::Displaced(_) | HookState::LeftOut => None,
        };
        let framings = states.iter().map(framing).collect::<Option<_>>()?;
        Some(Self { framings, programs: programs.to_vec() })
    }

    /// Compares. The links for which `counts` returns false may have anything.
    fn is_matched_by(&self, found: &OnHooks, counts: impl Fn(u32) -> bool) -> bool {
        let is_same = |at: &LinkHook| match (self.framings.get(at), found.get(at)) {
            (Some(framing), Some(Some(Attached { program, behind: None }))) => {
                let wanted = (program_name(at.hook, *framing), *program);
                self.programs.iter().any(|(name, id)| (&**name, *id) == wanted)
            }
            _ => false,
        };
        self.framings.keys().chain(found.keys()).all(|at| is_same(at) || !counts(at.index))
    }
}

/// Reads our programs on all links, through a socket or, without one, through TCX.
pub(super) fn read(clsact: Option<&Clsact>, pins: &PinDir) -> Result<OnHooks, KernelError> {
    let Some(clsact) = clsact else {
        let attached = |at: LinkHook| tcx::attached(at.index, at.hook, &pins.link(&pin_name(at)));
        return pinned(pins)?.map(|at| Ok((at, attached(at)?))).collect();
    };
    Ok(filters(clsact)?.into_iter().map(|(at, filter)| (at, Some(filter.attached))).collect())
}

/// Returns the hooks whose BPF links are pinned.
pub(super) fn pinned(pins: &PinDir) -> Result<impl Iterator<Item = LinkHook>, KernelError> {
    Ok(pins.link_names()?.into_iter().filter_map(|name| from_pin_name(&name)))
}

/// Returns our filters on all links of this network namespace.
pub(super) fn filters(clsact: &Clsact) -> Result<Vec<(LinkHook, Filter)>, KernelError> {
    let mut found = Vec::new();
    for link in &interfaces()? {
        for hook in HOOKS {
            let at = LinkHook { hook, index: link.index() };
            let filter = clsact.attached(at.index, hook)?;
            found.extend(
                filter
                    .filter(|filter| filter.name.starts_with(super::super::LINKS))
                    .map(|filter| (at, filter)),
            );
        }
    }
    Ok(found)
}

fn interfaces() -> Result<Interfaces, KernelError> {
    if_nameindex().map_err(|error| KernelError::call("list", "links")(error.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::bpf::tc::Hook;

    fn eth() -> (String, u32) {
        ("shunt_in_eth".into(), 11)
    }

    const HOOK: LinkHook = LinkHook { hook: Hook::Ingress, index: 7 };

    fn expected() -> ExpectedLinks {
        let states = BTreeMap::from([(HOOK, HookState::Current(Framing::Ethernet))]);
        ExpectedLinks::new(&states, &[eth(), ("shunt_in_ip".into(), 12)]).expect("all are current")
    }

    fn is_matched(found: impl IntoIterator<Item = (LinkHook, Option<Attached>)>, is_here: bool) -> bool {
        expected().is_matched_by(&found.into_iter().collect(), |_| is_here)
    }

    #[test]
    fn program_that_is_missing_replaced_or_displaced_differs_unless_its_link_is_gone() {
        let attached =
            |program, behind: Option<&str>| Some(Attached { program, behind: behind.map(Into::into) });
        let other = LinkHook { index: 8, ..HOOK };
        assert!(is_matched([(HOOK, attached(11, None))], true));
        for differs in [
            vec![],
            vec![(HOOK, None)],
            vec![(HOOK, attached(12, None))],
            vec![(HOOK, attached(13, None))],
            vec![(HOOK, attached(11, Some("theirs")))],
            vec![(HOOK, attached(11, None)), (other, attached(11, None))],
        ] {
            assert!(!is_matched(differs.clone(), true), "{differs:?}");
            assert!(is_matched(differs.clone(), false), "{differs:?}");
        }
    }

    #[test]
    fn hooks_without_a_current_program_are_never_only_compared() {
        for state in [HookState::Outdated, HookState::Displaced(Framing::Ethernet), HookState::LeftOut] {
            assert_eq!(ExpectedLinks::new(&BTreeMap::from([(HOOK, state)]), &[eth()]), None);
        }
    }
}
