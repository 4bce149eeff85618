//! Attaches and detaches the XDP program, and observes where it is attached.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Display,
    path::Path,
};

use crate::{
    kernel::{
        KernelError,
        bpf::{
            Object, PinDir,
            xdp::{
                self, XdpOutcome,
                dispatcher::{self, Obstacle, Target},
            },
        },
    },
    model::{XdpLink, XdpMode},
};

/// The XDP program on a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum XdpState {
    /// The program of this process, in this mode.
    Current(XdpMode),
    /// The program of an earlier process, or a pin without a program.
    Outdated(XdpMode),
    /// None: the link has the program of another owner, or its driver refuses this mode. The link
    /// programs serve the link.
    Refused(XdpMode),
}

impl XdpState {
    /// Returns the mode.
    pub(crate) const fn mode(self) -> XdpMode {
        match self {
            Self::Current(mode) | Self::Outdated(mode) | Self::Refused(mode) => mode,
        }
    }
}

const PROGRAM: &str = "shunt_xdp";
/// The same as a component program of libxdp's dispatcher.
const EXTENSION: &str = "shunt_xdp_ext";
const MODES: [XdpMode; 2] = [XdpMode::Generic, XdpMode::Native];

/// The warning for a link that has no XDP program.
const REFUSED: &str = "cannot attach the XDP program to this link: the link programs serve it, and shunt tries again every \
                       syncPeriod. Either the kernel refuses the program, or the link has one of another owner (`bpftool \
                       net` lists it) that is no dispatcher of libxdp which shunt can join, or its driver takes none \
                       with this MTU and these offloads (the kernel's log may say why). --links-xdp off ends this \
                       warning";

/// The XDP programs on links.
#[derive(Debug, Default)]
pub(crate) struct XdpPrograms {
    /// The links that refused a program, and were reported.
    refused: BTreeSet<(u32, XdpMode)>,
}

impl XdpPrograms {
    /// Attaches the program of this process. Where libxdp's dispatcher is attached, the program
    /// becomes one of its component programs. Returns `None` if the link is gone.
    pub(crate) fn attach(
        &mut self,
        object: &mut Object,
        pins: &PinDir,
        index: u32,
        link: &XdpLink,
    ) -> Result<Option<XdpState>, KernelError> {
        let mode = link.mode;
        detach_except(pins, index, Some(mode))?;
        leave_other_mode(pins, index, mode)?;
        let program = match object.link_program(PROGRAM) {
            Ok(program) => program,
            Err(error) => return Ok(Some(self.refuse(index, link, &error))),
        };
        let pin = pins.link(&pin_name(index, mode));
        match xdp::attach(program, index, mode, &pin)? {
            XdpOutcome::Attached => Ok(Some(self.accept(index, mode))),
            XdpOutcome::LinkGone => Ok(None),
            XdpOutcome::Refused(error) => Ok(Some(self.refuse(index, link, &error))),
            XdpOutcome::Taken(error) => match join(object, pins, index, mode) {
                Ok(()) => {
                    // A BPF link that somebody detached.
                    xdp::detach(&pin)?;
                    Ok(Some(self.accept(index, mode)))
                }
                Err(KernelError::Dispatcher(Obstacle::None)) => Ok(Some(self.refuse(index, link, &error))),
                Err(error) => {
                    // The program of an earlier process has maps that are not updated any more.
                    dispatcher::leave(pins.path(), index, EXTENSION)?;
                    Ok(Some(self.refuse(index, link, &error)))
                }
            },
        }
    }

    fn accept(&mut self, index: u32, mode: XdpMode) -> XdpState {
        self.refused.remove(&(index, mode));
        XdpState::Current(mode)
    }

    fn refuse(&mut self, index: u32, link: &XdpLink, error: &dyn Display) -> XdpState {
        if self.refused.insert((index, link.mode)) {
            tracing::warn!(link = &*link.name, mode = link.mode.name(), %error, "{REFUSED}");
        }
        XdpState::Refused(link.mode)
    }
}

/// Makes the program of this process a component program of the dispatcher on a link.
fn join(object: &mut Object, pins: &PinDir, index: u32, mode: XdpMode) -> Result<(), KernelError> {
    let loaded = object.link_program_id(EXTENSION);
    let load = |target: &Target| object.extension(EXTENSION, target);
    dispatcher::join(pins.path(), (index, mode), (EXTENSION, loaded), load)
}

/// Leaves the dispatcher on a link if it runs in another mode.
fn leave_other_mode(pins: &PinDir, index: u32, mode: XdpMode) -> Result<(), KernelError> {
    let joined = dispatcher::joined(pins.path(), EXTENSION)?;
    if joined.iter().any(|joined| joined.index == index && joined.mode != mode) {
        dispatcher::leave(pins.path(), index, EXTENSION)?;
    }
    Ok(())
}

/// Detaches the program from a link.
pub(crate) fn detach(pins: &PinDir, index: u32) -> Result<(), KernelError> {
    detach_except(pins, index, None)?;
    dispatcher::leave(pins.path(), index, EXTENSION)
}

fn detach_except(pins: &PinDir, index: u32, kept: Option<XdpMode>) -> Result<(), KernelError> {
    let mut modes = MODES.into_iter().filter(|mode| Some(*mode) != kept);
    modes.try_for_each(|mode| xdp::detach(&pins.link(&pin_name(index, mode))))
}

/// Returns our programs on all links.
pub(crate) fn observe(object: &Object, pins: &PinDir) -> Result<BTreeMap<u32, XdpState>, KernelError> {
    let state = |(index, mode): (u32, XdpMode)| {
        let program = xdp::attached(index, &pins.link(&pin_name(index, mode)))?;
        let is_current = program.is_some_and(|program| object.is_link_program(PROGRAM, program));
        Ok((index, if is_current { XdpState::Current(mode) } else { XdpState::Outdated(mode) }))
    };
    let mut states: BTreeMap<u32, XdpState> = pinned(pins)?.map(state).collect::<Result<_, KernelError>>()?;
    states.extend(dispatcher::joined(pins.path(), EXTENSION)?.into_iter().map(|joined| {
        let is_current = object.is_link_program(EXTENSION, joined.program);
        let state = if is_current { XdpState::Current } else { XdpState::Outdated };
        (joined.index, state(joined.mode))
    }));
    Ok(states)
}

/// Detaches the programs of any shunt process. Continues after errors.
pub(super) fn remove_all(pins: &PinDir) -> Vec<KernelError> {
    let mut errors = Vec::new();
    match pinned(pins) {
        Ok(hooks) => {
            let detached = hooks.map(|(index, mode)| xdp::detach(&pins.link(&pin_name(index, mode))));
            errors.extend(detached.filter_map(Result::err));
        }
        Err(error) => errors.push(error),
    }
    errors.extend(dispatcher::forget_stopped(pins.path(), EXTENSION, &pins.map_ids()).err());
    errors
}

/// Leaves the dispatchers on all links. They have pins of their own, so this needs no other pins.
/// Continues after errors.
pub(super) fn leave_all(pin_dir: &Path) -> Vec<KernelError> {
    match dispatcher::joined(pin_dir, EXTENSION) {
        Ok(joined) => {
            let left = joined.iter().map(|joined| dispatcher::leave(pin_dir, joined.index, EXTENSION));
            left.filter_map(Result::err).collect()
        }
        Err(error) => vec![error],
    }
}

fn pinned(pins: &PinDir) -> Result<impl Iterator<Item = (u32, XdpMode)>, KernelError> {
    Ok(pins.link_names()?.into_iter().filter_map(|name| from_pin_name(&name)))
}

/// Returns the name of the pin of a BPF link. It has the mode, which the kernel does not report.
fn pin_name(index: u32, mode: XdpMode) -> String {
    format!("{PROGRAM}_{}_{index}", mode.name())
}

/// Returns the link and mode of a pin's name; `None` for other names.
pub(crate) fn from_pin_name(name: &str) -> Option<(u32, XdpMode)> {
    let (mode, index) = name.strip_prefix(PROGRAM)?.strip_prefix('_')?.split_once('_')?;
    let mode = MODES.into_iter().find(|known| known.name() == mode)?;
    Some((index.parse().ok()?, mode))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_of_a_pin_has_the_mode_and_the_link() {
        for mode in MODES {
            assert_eq!(from_pin_name(&pin_name(4711, mode)), Some((4711, mode)));
        }
        for other in ["shunt_xdp", "shunt_xdp_generic_7-new", "shunt_in_7"] {
            assert_eq!(from_pin_name(other), None, "{other}");
        }
    }
}
