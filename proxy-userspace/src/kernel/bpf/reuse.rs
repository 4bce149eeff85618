//! Finds programs in the kernel that an earlier process of the same build loaded, with the same
//! maps and constants. To use them again saves the work of the verifier, which is most of a start.

use std::{
    hash::{DefaultHasher, Hasher as _},
    io::{self, ErrorKind},
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
    path::Path,
};

use aya::{
    Ebpf,
    maps::{Map, MapInfo},
    programs::{ProgramInfo, loaded_programs},
};

use super::{super::KernelError, MapSpec, syscall};

/// The map of the constants of an object.
const CONSTANTS: &str = ".rodata";

/// The constant that has the hash of the object.
pub(super) const HASH: &str = "OBJECT_HASH";

/// The bytes of a name that the kernel keeps.
const NAME_LENGTH: usize = 15;

/// Returns the hash of an object and of the version that loads it.
pub(super) fn hash(object: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(env!("CARGO_PKG_VERSION").as_bytes());
    hasher.write(object);
    hasher.finish()
}

/// Programs in the kernel that are the same as those of an object.
#[derive(Debug, Default)]
pub(super) struct SamePrograms(Vec<SameProgram>);

#[derive(Debug)]
struct SameProgram {
    name: String,
    id: u32,
    program: OwnedFd,
}

impl SamePrograms {
    /// Finds the programs. `maps` are those of the object, which are pinned in `directory`. Without
    /// `CAP_SYS_ADMIN`, none are found.
    pub(super) fn find(object: &Ebpf, maps: &[MapSpec], directory: &Path) -> Self {
        Self::try_find(object, maps, directory).unwrap_or_else(|error| {
            tracing::debug!(%error, "cannot look for programs of an earlier process: all programs are loaded");
            Self::default()
        })
    }

    fn try_find(object: &Ebpf, maps: &[MapSpec], directory: &Path) -> Result<Self, KernelError> {
        let wanted = Wanted::of(object, maps, directory)?;
        let same = |program: ProgramInfo| {
            let name = program.name_as_str().filter(|name| object.program(name).is_some())?.to_owned();
            wanted.is_met_by(&program)?.then_some(())?;
            let fd = program.fd().ok()?.as_fd().try_clone_to_owned().ok()?;
            Some(SameProgram { name, id: program.id(), program: fd })
        };
        // A program that is gone by now, or cannot be read, is not used again.
        Ok(Self(loaded_programs().flatten().filter_map(same).collect()))
    }

    /// Returns the names and ids. Several programs may have one name.
    pub(super) fn ids(&self) -> impl Iterator<Item = (&str, u32)> {
        self.0.iter().map(|same| (&*same.name, same.id))
    }

    /// Returns a program with this name.
    pub(super) fn named(&self, name: &str) -> Option<BorrowedFd<'_>> {
        self.0.iter().find(|same| same.name == name).map(|same| same.program.as_fd())
    }

    /// Returns the program with this id.
    pub(super) fn with_id(&self, id: u32) -> Option<BorrowedFd<'_>> {
        self.0.iter().find(|same| same.id == id).map(|same| same.program.as_fd())
    }
}

/// What makes a program the same as the one of the object with its name.
struct Wanted {
    /// The names, as the kernel keeps them, and ids of the pinned maps.
    maps: Vec<(&'static str, u32)>,
    /// The constants. Among them is [`HASH`], so a program that has them also has the code.
    constants: Vec<u8>,
}

impl Wanted {
    fn of(object: &Ebpf, maps: &[MapSpec], directory: &Path) -> Result<Self, KernelError> {
        let id = |map: &MapSpec| {
            let name = &map.name[..map.name.len().min(NAME_LENGTH)];
            let info = MapInfo::from_pin(directory.join(map.name));
            Ok((name, info.map_err(KernelError::bpf("inspect map", map.name))?.id()))
        };
        let Some(Map::Array(constants)) = object.map(CONSTANTS) else {
            return Err(KernelError::call("find map", CONSTANTS)(ErrorKind::NotFound.into()));
        };
        let info = constants.info().map_err(KernelError::bpf("inspect map", CONSTANTS))?;
        let constants = contents(&info, constants.fd().as_fd());
        Ok(Self {
            maps: maps.iter().map(id).collect::<Result<_, KernelError>>()?,
            constants: constants.map_err(KernelError::call("read map", CONSTANTS))?,
        })
    }

    /// Compares a program. Maps that are not pinned do not count, except the constants: programs
    /// write them only for traces. Returns `None` if something cannot be read.
    fn is_met_by(&self, program: &ProgramInfo) -> Option<bool> {
        let mut has_constants = false;
        for id in program.map_ids().ok()?? {
            if self.maps.iter().any(|(_, pinned)| *pinned == id) {
                continue;
            }
            let map = MapInfo::from_id(id).ok()?;
            let name = map.name_as_str()?;
            if name == CONSTANTS {
                has_constants = self.constants == contents(&map, map.fd().ok()?.as_fd()).ok()?;
            } else if self.maps.iter().any(|(pinned, _)| *pinned == name) {
                return Some(false);
            }
        }
        Some(has_constants)
    }
}

/// Returns the first value of an array.
fn contents(info: &MapInfo, array: BorrowedFd<'_>) -> io::Result<Vec<u8>> {
    let mut value = vec![0; info.value_size() as usize];
    syscall::lookup_first(array, &mut value)?;
    Ok(value)
}
