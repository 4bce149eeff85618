//! Finds programs in the kernel that an earlier process of the same build loaded, with the same
//! maps and constants. To use them again saves the work of the verifier, which is most of a start.

use std::{
    hash::{DefaultHasher, Hash as _, Hasher as _},
    io,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
};

use aya::{
    maps::MapInfo,
    programs::{ProgramInfo, loaded_programs},
};

use super::{
    super::KernelError,
    Globals, MapSpec,
    object_file::{self, CONSTANTS, DeclaredProgram},
    source::Source,
    syscall,
};

/// The constant with the hash of the object and of all other constants.
pub(super) const HASH: &str = "OBJECT_HASH";

/// The bytes of a name that the kernel keeps.
const NAME_LENGTH: usize = 15;

/// Returns the hash of an object, of the version that loads it, and of its constants.
pub(super) fn hash(object: &[u8], constants: &Globals) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(env!("CARGO_PKG_VERSION").as_bytes());
    hasher.write(object);
    constants.hash(&mut hasher);
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
    /// Finds the programs of an object with its pinned maps. Without `CAP_SYS_ADMIN`, none are
    /// found.
    pub(super) fn find(source: &Source, programs: &[DeclaredProgram]) -> Self {
        if !source.is_pinned() {
            return Self::default();
        }
        Self::try_find(source, programs).unwrap_or_else(|error| {
            tracing::debug!(%error, "cannot look for programs of an earlier process: all programs are loaded");
            Self::default()
        })
    }

    fn try_find(source: &Source, programs: &[DeclaredProgram]) -> Result<Self, KernelError> {
        let wanted = Wanted::of(source)?;
        let is_known = |name: &&str| programs.iter().any(|program| program.name == *name);
        let same = |program: ProgramInfo| {
            let name = program.name_as_str().filter(is_known)?.to_owned();
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
    hash: u64,
    /// Where the map of constants has the hash. None if the object has none.
    position: Option<usize>,
}

impl Wanted {
    fn of(source: &Source) -> Result<Self, KernelError> {
        let id = |map: &MapSpec| {
            let name = &map.name[..map.name.len().min(NAME_LENGTH)];
            let info = MapInfo::from_pin(source.directory.join(map.name));
            Ok((name, info.map_err(KernelError::bpf("inspect map", map.name))?.id()))
        };
        Ok(Self {
            maps: source.maps.iter().map(id).collect::<Result<_, KernelError>>()?,
            hash: source.globals.object_hash,
            position: object_file::position_of_constant(source.bytes, HASH),
        })
    }

    /// Compares a program. Maps that are not pinned do not count, except the constants: programs
    /// write them only for traces. Returns `None` if something cannot be read.
    fn is_met_by(&self, program: &ProgramInfo) -> Option<bool> {
        let mut has_hash = false;
        for id in program.map_ids().ok()?? {
            if self.maps.iter().any(|(_, pinned)| *pinned == id) {
                continue;
            }
            let map = MapInfo::from_id(id).ok()?;
            let name = map.name_as_str()?;
            if name == CONSTANTS {
                has_hash = self.is_hash_of(&contents(&map, map.fd().ok()?.as_fd()).ok()?);
            } else if self.maps.iter().any(|(pinned, _)| *pinned == name) {
                return Some(false);
            }
        }
        Some(has_hash)
    }

    fn is_hash_of(&self, constants: &[u8]) -> bool {
        let hash = self.position.and_then(|position| constants.get(position..)?.first_chunk());
        hash.is_some_and(|hash| u64::from_ne_bytes(*hash) == self.hash)
    }
}

/// Returns the first value of an array.
fn contents(info: &MapInfo, array: BorrowedFd<'_>) -> io::Result<Vec<u8>> {
    let mut value = vec![0; info.value_size() as usize];
    syscall::lookup_first(array, &mut value)?;
    Ok(value)
}
