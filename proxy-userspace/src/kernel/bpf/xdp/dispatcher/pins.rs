//! The directory where libxdp pins the component programs of its dispatchers, with their links
//! (lib/libxdp/protocol.org, "Locking and pinning").

use std::{
    fs::{self, DirBuilder, File, TryLockError},
    io::{self, ErrorKind},
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd},
        unix::fs::DirBuilderExt as _,
    },
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use aya::programs::ProgramInfo;

use super::{Obstacle, components::Component, program::function_name};
use crate::kernel::{
    KernelError,
    bpf::{private_directory, syscall},
};

const PREFIX: &str = "dispatch-";
/// libxdp holds the lock for some system calls at a time.
const LOCK_ATTEMPTS: usize = 100;
const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// The directory. For shunt's own default it is that of libxdp: beside shunt's own pins.
#[derive(Debug)]
pub(super) struct Directory {
    path: PathBuf,
}

/// The directory of one dispatcher, named after its network link and its own id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pinned {
    /// The index of the network link.
    pub(super) index: u32,
    /// The id of the dispatcher.
    pub(super) dispatcher: u32,
}

impl Directory {
    /// Returns the directory beside shunt's. It may be a symbolic link, as older tools create it.
    pub(super) fn beside(pin_dir: &Path) -> Self {
        let path = pin_dir.with_file_name("xdp");
        Self { path: fs::canonicalize(&path).unwrap_or(path) }
    }

    /// Locks the directory until the result is dropped, as libxdp does. Fails if it does not exist,
    /// if others may change it, or if somebody else holds the lock for long.
    pub(super) fn lock(&self) -> Result<File, KernelError> {
        if !self.path.exists() {
            return Err(Obstacle::NotPinned(self.path.clone()).into());
        }
        let directory = private_directory::open(&self.path)?;
        for _ in 0..LOCK_ATTEMPTS {
            match directory.try_lock() {
                Ok(()) => return Ok(directory),
                Err(TryLockError::WouldBlock) => thread::sleep(LOCK_PAUSE),
                Err(TryLockError::Error(error)) => {
                    return Err(KernelError::path("lock directory", &self.path)(error));
                }
            }
        }
        Err(Obstacle::Locked.into())
    }

    /// Returns the dispatchers that have a directory, of any network namespace. Some may be
    /// attached no more.
    pub(super) fn dispatchers(&self) -> Result<Vec<Pinned>, KernelError> {
        let entries = match fs::read_dir(&self.path) {
            // Somebody may have pinned something else under this name.
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                return Ok(Vec::new());
            }
            entries => entries.map_err(KernelError::path("list", &self.path))?,
        };
        Ok(entries.flatten().filter_map(|entry| Pinned::parse(entry.file_name().to_str()?)).collect())
    }

    fn of(&self, pinned: Pinned) -> PathBuf {
        self.path.join(format!("{PREFIX}{}-{}", pinned.index, pinned.dispatcher))
    }

    /// Returns the error of a dispatcher whose pins cannot be read.
    pub(super) fn lacks(&self, pinned: Pinned) -> KernelError {
        Obstacle::NotPinned(self.of(pinned)).into()
    }

    /// Returns the path of a component program.
    pub(super) fn program(&self, pinned: Pinned, component: usize) -> PathBuf {
        self.of(pinned).join(format!("{}-prog", function_name(component)))
    }

    fn link(&self, pinned: Pinned, component: usize) -> PathBuf {
        self.of(pinned).join(format!("{}-link", function_name(component)))
    }

    /// Returns the component programs of a dispatcher.
    fn programs(&self, pinned: Pinned) -> impl Iterator<Item = ProgramInfo> {
        (0..).map_while(move |component| ProgramInfo::from_pin(self.program(pinned, component)).ok())
    }

    /// Returns the id of the component program with this name, if the dispatcher has it.
    pub(super) fn find(&self, pinned: Pinned, name: &str) -> Option<u32> {
        let mut programs = self.programs(pinned);
        programs.find(|program| program.name_as_str() == Some(name)).map(|program| program.id())
    }

    /// Removes the pins of the component program with this name, if it has one of these maps, and
    /// the directory if it is empty then.
    pub(super) fn forget(&self, pinned: Pinned, name: &str, maps: &[u32]) {
        let is_it = |program: ProgramInfo| {
            let of_program = program.map_ids().ok().flatten().unwrap_or_default();
            program.name_as_str() == Some(name) && of_program.iter().any(|map| maps.contains(map))
        };
        let Some(at) = self.programs(pinned).position(is_it) else { return };
        for pin in [self.link(pinned, at), self.program(pinned, at)] {
            if let Err(error) = fs::remove_file(&pin) {
                tracing::warn!(path = %pin.display(), %error, "cannot remove a pin of an XDP program");
            }
        }
        // Others may have pins there too.
        let _ = fs::remove_dir(self.of(pinned));
    }

    /// Pins the component programs of a dispatcher, with their links. After an error, nothing of
    /// it stays.
    pub(super) fn pin(
        &self,
        pinned: Pinned,
        components: &[Component],
        links: &[OwnedFd],
    ) -> Result<(), KernelError> {
        let path = self.of(pinned);
        let created = DirBuilder::new().mode(0o700).create(&path);
        created.map_err(KernelError::path("create directory", &path))?;
        let pin = |object: BorrowedFd<'_>, path: &Path| {
            syscall::pin(object, path).map_err(KernelError::path("pin", path))
        };
        let mut both = components.iter().zip(links).enumerate();
        let outcome = both.try_for_each(|(at, (component, link))| {
            pin(link.as_fd(), &self.link(pinned, at))?;
            pin(component.program.as_fd(), &self.program(pinned, at))
        });
        outcome.inspect_err(|_| self.unpin(pinned))
    }

    /// Removes the directory of a dispatcher. What is left after an error is of no use to anybody;
    /// `xdp-loader clean` removes it.
    pub(super) fn unpin(&self, pinned: Pinned) {
        let path = self.of(pinned);
        let removed = fs::read_dir(&path)
            .and_then(Iterator::collect::<io::Result<Vec<_>>>)
            .and_then(|pins| pins.iter().try_for_each(|pin| fs::remove_file(pin.path())))
            .and_then(|()| fs::remove_dir(&path));
        if let Err(error) = removed {
            tracing::warn!(path = %path.display(), %error, "cannot remove the pins of a replaced XDP dispatcher: `xdp-loader clean` removes them");
        }
    }
}

impl Pinned {
    fn parse(name: &str) -> Option<Self> {
        let (index, dispatcher) = name.strip_prefix(PREFIX)?.split_once('-')?;
        Some(Self { index: index.parse().ok()?, dispatcher: dispatcher.parse().ok()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_of_a_directory_has_the_link_and_the_dispatcher() {
        let directory = Directory { path: "/sys/fs/bpf/xdp".into() };
        let pinned = Pinned { index: 7, dispatcher: 4711 };
        let path = directory.program(pinned, 3);
        assert_eq!(path, Path::new("/sys/fs/bpf/xdp/dispatch-7-4711/prog3-prog"));
        let name = path.parent().and_then(Path::file_name).and_then(|name| name.to_str());
        assert_eq!(name.and_then(Pinned::parse), Some(pinned));
        for other in ["dispatch-7", "prog-test-link-1-2", "dispatch-7-", "dispatch-x-1"] {
            assert_eq!(Pinned::parse(other), None, "{other}");
        }
    }
}
