//! Runs a program beside those of others on the XDP hook of a link, as a component program of
//! libxdp's dispatcher, and takes it away again.
//!
//! A dispatcher is an XDP program with functions that component programs replace. It does not
//! change: to add or remove a component program, a new dispatcher with all of them is made, and
//! takes the place of the old one in one step. Meanwhile the component programs run in both. See
//! lib/libxdp/protocol.org of the xdp-tools. Kernel 5.10 (4a1e7c0c63e0).

mod components;
mod config;
mod pins;
mod program;

use std::{
    fs::File,
    io,
    mem::take,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
};

use self::{
    components::{Component, Dispatcher},
    config::{Call, Config, MAX_COMPONENTS, NO_PROGRAM},
    pins::{Directory, Pinned},
};
use super::{
    super::{super::KernelError, lift_memory_limit, syscall},
    hook::{Hooks, Running},
};
use crate::net::XdpMode;

/// The reason why a dispatcher cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Obstacle {
    /// The link has no dispatcher.
    #[error("the link has none")]
    None,
    /// Its version is not known. Version 1, which is that of old ones, is not written in them.
    #[error("its version is {}, and shunt knows 2 and 3", .0.map_or_else(|| "1 or none".into(), |version| version.to_string()))]
    Version(Option<u8>),
    /// It is bound to the link, and shunt's program is for all links.
    #[error("it is bound to the link, and shunt's program is for all links")]
    BoundToDevice,
    /// Its component programs are not pinned in the directory.
    #[error(
        "its programs are not pinned below {}: set --bpf-pin-dir to a directory beside that of libxdp \
         (LIBXDP_BPFFS)",
        .0.display()
    )]
    NotPinned(PathBuf),
    /// It has no place for another component program.
    #[error("it has ten programs already")]
    Full,
    /// It runs in another mode.
    #[error("it runs in mode {}, and the setting wants the other: attach it again in that mode", .0.name())]
    Mode(XdpMode),
    /// Another process holds the lock of its directory.
    #[error("another process holds the lock of its directory")]
    Locked,
    /// It was replaced each time before the change was complete.
    #[error("other processes keep replacing it")]
    KeepsChanging,
}

/// The priority of shunt's program. It is libxdp's default: filters have smaller numbers, and see
/// packets before they are translated.
const PRIORITY: u32 = 50;
/// `XDP_PASS`, the only action after which the next component program runs.
const PASS: u8 = 2;
/// How a dispatcher calls shunt's program.
const CALL: Call = Call { actions: 1 << NO_PROGRAM | 1 << PASS, priority: PRIORITY, flags: 0 };
/// A version that every kernel with dispatchers takes.
const KNOWN_VERSION: u8 = 2;
/// How many times a change starts again, because another process made one meanwhile.
const ATTEMPTS: usize = 10;

/// A function that a component program replaces.
#[derive(Clone, Debug)]
pub struct Target {
    /// The id of the dispatcher.
    pub dispatcher: u32,
    /// The name of the function.
    pub function: String,
}

/// A component program.
#[derive(Debug)]
pub struct Extension {
    /// The program.
    pub program: OwnedFd,
    /// Its id.
    pub id: u32,
}

/// Makes a program a component of the dispatcher on a link. It replaces the one with the same name,
/// and the others stay. `load` returns the program, which can replace a function like this one.
/// Nothing happens if the component with this name is `loaded`.
pub fn join(
    pin_dir: &Path,
    (index, mode): (u32, XdpMode),
    (name, loaded): (&str, Option<u32>),
    mut load: impl FnMut(&Target) -> Result<Extension, KernelError>,
) -> Result<(), KernelError> {
    let hooks = Hooks::open().map_err(failed(index))?;
    let running = hooks.read(index).map_err(failed(index))?.ok_or(Obstacle::None)?;
    Dispatcher::find(running)?.ok_or(Obstacle::None)?;
    if running.mode != mode {
        return Err(Obstacle::Mode(running.mode).into());
    }
    if loaded.is_none() {
        load_before(&mut load)?;
    }
    let place = Place::lock(pin_dir, hooks, index)?;
    place.change(&mut |old| {
        let is_joined = |component: &Component| component.name == name && Some(component.id) == loaded;
        if old.components.iter().any(is_joined) {
            return Ok(Change::Nothing);
        }
        let mut components = take(&mut old.components);
        components.retain(|component| component.name != name);
        if components.len() >= MAX_COMPONENTS {
            return Err(Obstacle::Full.into());
        }
        New::with(old, components, name, &mut load).map(Change::Replace)
    })
}

/// Takes the component program with this name away from the dispatcher on a link, and the
/// dispatcher if it has no other. It is no error if there is none.
pub fn leave(pin_dir: &Path, index: u32, name: &str) -> Result<(), KernelError> {
    let directory = Directory::beside(pin_dir);
    let has_it = |pinned: &Pinned| pinned.index == index && directory.find(*pinned, name).is_some();
    if !directory.dispatchers()?.iter().any(has_it) {
        return Ok(());
    }
    let hooks = Hooks::open().map_err(failed(index))?;
    let place = Place::lock(pin_dir, hooks, index)?;
    let left = place.change(&mut |old| {
        let mut components = take(&mut old.components);
        let before = components.len();
        components.retain(|component| component.name != name);
        match components.len() {
            0 if before > 0 => Ok(Change::Detach),
            after if after == before => Ok(Change::Nothing),
            _ => New::load(old, components).map(Change::Replace),
        }
    });
    match left {
        Err(KernelError::Dispatcher(Obstacle::None)) => Ok(()),
        left => left,
    }
}

/// A link whose dispatcher has a component program of some name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Joined {
    /// The index of the link.
    pub index: u32,
    /// Where the dispatcher runs.
    pub mode: XdpMode,
    /// The id of the component program.
    pub program: u32,
}

/// Returns the links of this network namespace whose dispatcher has a component program with this
/// name.
pub fn joined(pin_dir: &Path, name: &str) -> Result<Vec<Joined>, KernelError> {
    let directory = Directory::beside(pin_dir);
    let pinned = directory.dispatchers()?;
    if pinned.is_empty() {
        return Ok(Vec::new());
    }
    let hooks = Hooks::open().map_err(KernelError::call("open", "an rtnetlink socket"))?;
    let mut found = Vec::new();
    for pinned in pinned {
        let Some(running) = running(&hooks, pinned) else { continue };
        let program = directory.find(pinned, name);
        found.extend(program.map(|program| Joined { index: pinned.index, mode: running.mode, program }));
    }
    Ok(found)
}

/// Returns the program on the link of a dispatcher, if it is that dispatcher. Directories stay when
/// links go, and may be those of other network namespaces: a link that cannot be read has none.
fn running(hooks: &Hooks, pinned: Pinned) -> Option<Running> {
    let running = hooks.read(pinned.index).unwrap_or_else(|error| {
        tracing::debug!(index = pinned.index, %error, "cannot read the XDP program of a link");
        None
    });
    running.filter(|running| running.program == pinned.dispatcher)
}

/// Removes the pins of this program in the directories of dispatchers that run no more: their link
/// is gone, or a process ended in the middle of a change. Only programs with one of these maps are
/// removed: a dispatcher in another network namespace seems not to run.
pub fn forget_stopped(pin_dir: &Path, name: &str, maps: &[u32]) -> Result<(), KernelError> {
    let directory = Directory::beside(pin_dir);
    let has_it = |pinned: &Pinned| directory.find(*pinned, name).is_some();
    let with_it: Vec<Pinned> = directory.dispatchers()?.into_iter().filter(has_it).collect();
    if with_it.is_empty() {
        return Ok(());
    }
    let hooks = Hooks::open().map_err(KernelError::call("open", "an rtnetlink socket"))?;
    let _lock = directory.lock()?;
    let stopped = with_it.into_iter().filter(|pinned| running(&hooks, *pinned).is_none());
    stopped.for_each(|pinned| directory.forget(pinned, name, maps));
    Ok(())
}

/// Loads a program before the directory is locked, as the component of a dispatcher that is not
/// kept: the verifier takes its time, and libxdp does not try again if the dispatcher changes
/// meanwhile.
fn load_before(load: &mut impl FnMut(&Target) -> Result<Extension, KernelError>) -> Result<(), KernelError> {
    let (_program, dispatcher) = load_program(&Config { version: KNOWN_VERSION, calls: vec![CALL] })?;
    load(&Target { dispatcher, function: program::function_name(0) }).map(drop)
}

/// The dispatcher of a link while its directory is locked.
struct Place {
    directory: Directory,
    hooks: Hooks,
    index: u32,
    _lock: File,
}

/// What becomes of a dispatcher.
enum Change {
    Nothing,
    Detach,
    Replace(New),
}

impl Place {
    fn lock(pin_dir: &Path, hooks: Hooks, index: u32) -> Result<Self, KernelError> {
        let directory = Directory::beside(pin_dir);
        let lock = directory.lock()?;
        Ok(Self { directory, hooks, index, _lock: lock })
    }

    /// Makes a change, and again if another process replaced the dispatcher meanwhile: libxdp holds
    /// the lock only while it reads and writes pins.
    fn change(
        &self,
        change: &mut dyn FnMut(&mut Dispatcher) -> Result<Change, KernelError>,
    ) -> Result<(), KernelError> {
        for _ in 0..ATTEMPTS {
            let running = self.hooks.read(self.index).map_err(failed(self.index))?.ok_or(Obstacle::None)?;
            let read = Dispatcher::read(&self.directory, self.index, running)?;
            let mut old = read.ok_or(Obstacle::None)?;
            let is_done = match change(&mut old)? {
                Change::Nothing => true,
                Change::Detach => self.replace(&old, None)?,
                Change::Replace(new) => {
                    let links = new.attach()?;
                    self.directory.pin(new.pinned, &new.components, &links)?;
                    let replaced = self.replace(&old, Some(new.program.as_fd()));
                    if !matches!(replaced, Ok(true)) {
                        self.directory.unpin(new.pinned);
                    }
                    replaced?
                }
            };
            if is_done {
                return Ok(());
            }
        }
        Err(Obstacle::KeepsChanging.into())
    }

    /// Replaces the dispatcher. Returns false if the link has another one by now.
    fn replace(&self, old: &Dispatcher, new: Option<BorrowedFd<'_>>) -> Result<bool, KernelError> {
        match self.hooks.replace(self.index, old.mode, new, old.program.as_fd()) {
            Err(error) if error.raw_os_error() == Some(libc::EEXIST) => return Ok(false),
            replaced => replaced.map_err(failed(self.index))?,
        }
        // Without their pins, the component programs leave the old dispatcher. A CPU that still
        // runs it must not skip one.
        if let Err(error) = syscall::wait_for_runs() {
            tracing::debug!(%error, "cannot wait until no CPU runs the old XDP dispatcher");
        }
        self.directory.unpin(old.pinned);
        Ok(true)
    }
}

/// A dispatcher that is loaded and not attached.
struct New {
    program: OwnedFd,
    pinned: Pinned,
    components: Vec<Component>,
}

impl New {
    /// Loads a dispatcher for these component programs, which are in their order.
    fn load(old: &Dispatcher, components: Vec<Component>) -> Result<Self, KernelError> {
        let calls = components.iter().map(|component| component.call).collect();
        let (program, pinned) = load(old, calls)?;
        Ok(Self { program, pinned, components })
    }

    /// Loads a dispatcher for these and one more, and that one.
    fn with(
        old: &Dispatcher,
        mut components: Vec<Component>,
        name: &str,
        extension: &mut impl FnMut(&Target) -> Result<Extension, KernelError>,
    ) -> Result<Self, KernelError> {
        components.sort_by(|a, b| a.order().cmp(&b.order()));
        let is_before =
            |component: &Component| (component.call.priority, &*component.name) <= (PRIORITY, name);
        let at = components.partition_point(is_before);
        let mut calls: Vec<Call> = components.iter().map(|component| component.call).collect();
        calls.insert(at, CALL);
        let (dispatcher, pinned) = load(old, calls)?;
        let target = Target { dispatcher: pinned.dispatcher, function: program::function_name(at) };
        let Extension { program, id } = extension(&target)?;
        components.insert(at, Component { program, id, name: name.to_owned(), tag: 0, call: CALL });
        Ok(Self { program: dispatcher, pinned, components })
    }

    /// Attaches the component programs to it.
    fn attach(&self) -> Result<Vec<OwnedFd>, KernelError> {
        let attach = |(at, component): (usize, &Component)| {
            let program = component.program.as_fd();
            let attached =
                syscall::create_extension_link(program, self.program.as_fd(), program::function(at));
            attached.map_err(KernelError::call(
                "attach to a second XDP dispatcher (kernel 5.10) the program",
                &*component.name,
            ))
        };
        self.components.iter().enumerate().map(attach).collect()
    }
}

/// Loads a dispatcher in the version of the old one.
fn load(old: &Dispatcher, calls: Vec<Call>) -> Result<(OwnedFd, Pinned), KernelError> {
    let (program, dispatcher) = load_program(&Config { version: old.version, calls })?;
    Ok((program, Pinned { index: old.pinned.index, dispatcher }))
}

/// Loads a dispatcher, and returns its id too. A process that only removes things did not load any
/// program before.
fn load_program(config: &Config) -> Result<(OwnedFd, u32), KernelError> {
    let failed = || KernelError::call("load program", program::NAME);
    lift_memory_limit();
    let program = program::load(config).map_err(failed())?;
    let id = syscall::program_id(program.as_fd()).map_err(failed())?;
    Ok((program, id))
}

fn failed(index: u32) -> impl FnOnce(io::Error) -> KernelError {
    KernelError::call("read or replace the XDP program of", format!("link {index}"))
}
