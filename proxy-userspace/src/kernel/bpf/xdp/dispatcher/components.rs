//! A dispatcher that is attached to a network link, and its component programs.

use std::{
    io,
    os::fd::{AsFd as _, OwnedFd},
};

use aya::{
    maps::MapInfo,
    programs::{ProgramFd, ProgramInfo},
};

use super::{
    super::hook::Running,
    Obstacle,
    config::{Call, Config},
    pins::{Directory, Pinned},
    program,
};
use crate::{
    kernel::{
        KernelError,
        bpf::{programs, syscall},
    },
    net::XdpMode,
};

/// A component program of a dispatcher.
#[derive(Debug)]
pub(super) struct Component {
    pub(super) program: OwnedFd,
    /// The id of the program.
    pub(super) id: u32,
    /// Its name in the kernel.
    pub(super) name: String,
    /// The hash of its instructions.
    pub(super) tag: u64,
    /// How the dispatcher calls it.
    pub(super) call: Call,
}

impl Component {
    /// Returns what decides when it runs: the smallest first, as with libxdp (lib/libxdp/libxdp.c,
    /// `cmp_xdp_programs`). A program that was loaded earlier has a smaller id.
    pub(super) fn order(&self) -> (u32, &str, u64, u32) {
        (self.call.priority, &self.name, self.tag, self.id)
    }
}

/// A dispatcher on a network link.
#[derive(Debug)]
pub(super) struct Dispatcher {
    pub(super) program: ProgramFd,
    pub(super) pinned: Pinned,
    pub(super) mode: XdpMode,
    pub(super) version: u8,
    /// The component programs, in the order in which they run.
    pub(super) components: Vec<Component>,
}

impl Dispatcher {
    /// Returns the program if it is a dispatcher. Needs `CAP_SYS_ADMIN`.
    pub(super) fn find(running: Running) -> Result<Option<ProgramInfo>, KernelError> {
        let found = programs::with_id(running.program)?;
        Ok(found.filter(|program| program.name_as_str() == Some(program::NAME)))
    }

    /// Reads the dispatcher and its pins. Returns `None` if it is gone by now.
    pub(super) fn read(
        directory: &Directory,
        index: u32,
        running: Running,
    ) -> Result<Option<Self>, KernelError> {
        let Some(info) = Self::find(running)? else { return Ok(None) };
        let config = Config::parse(&constants(&info)?)?;
        let pinned = Pinned { index, dispatcher: running.program };
        let component = |(at, call): (usize, &Call)| {
            component(directory, pinned, at, *call).map_err(|_| directory.lacks(pinned))
        };
        let components =
            config.calls.iter().enumerate().map(component).collect::<Result<_, KernelError>>()?;
        let program = info.fd().map_err(KernelError::bpf("open program", program::NAME))?;
        let (mode, version) = (running.mode, config.version);
        Ok(Some(Self { program, pinned, mode, version, components }))
    }
}

fn component(directory: &Directory, pinned: Pinned, at: usize, call: Call) -> io::Result<Component> {
    let path = directory.program(pinned, at);
    let program = syscall::open_pin(&path)?;
    let info = ProgramInfo::from_pin(&path).map_err(io::Error::other)?;
    let name = info.name_as_str().unwrap_or_default().to_owned();
    Ok(Component { program, id: info.id(), name, tag: info.tag(), call })
}

/// Reads the constants of a dispatcher, which are its only map.
fn constants(dispatcher: &ProgramInfo) -> Result<Vec<u8>, KernelError> {
    let maps = dispatcher.map_ids().map_err(KernelError::bpf("list the maps of", program::NAME))?;
    let &[map] = maps.as_deref().unwrap_or_default() else { return Err(Obstacle::Version(None).into()) };
    let failed = || KernelError::call("read the constants of", program::NAME);
    let info = MapInfo::from_id(map).map_err(|error| failed()(io::Error::other(error)))?;
    let map = info.fd().map_err(|error| failed()(io::Error::other(error)))?;
    let mut value = vec![0; info.value_size() as usize];
    syscall::lookup_first(map.as_fd(), &mut value).map_err(failed())?;
    Ok(value)
}
