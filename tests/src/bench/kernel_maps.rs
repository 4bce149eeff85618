//! The kernel memory of BPF maps, as the kernel itself counts it.

use std::{collections::BTreeMap, fs, os::fd::AsRawFd as _, path::Path};

use anyhow::{Context as _, Result};
use aya::maps::MapInfo;
use serde::Serialize;

/// A BPF map and its memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct KernelMap {
    pub(super) name: String,
    /// The field `memlock` of the file descriptor: what the map has allocated since kernel 6.4,
    /// and an estimate for a full map before.
    pub(super) kib: u64,
}

/// Returns the maps that are pinned in a directory or that a process has open, the largest first.
/// Neither alone is complete: a ring buffer is not pinned, and no process needs to keep a map open
/// that programs use.
pub(super) fn of(pins: &Path, process: u32) -> Result<Vec<KernelMap>> {
    let mut maps = opened(process)?;
    maps.extend(pinned(pins)?);
    let mut maps: Vec<KernelMap> = maps.into_values().collect();
    maps.sort_by(|a, b| b.kib.cmp(&a.kib).then_with(|| a.name.cmp(&b.name)));
    Ok(maps)
}

/// Returns the maps that a process has open, by identifier.
fn opened(process: u32) -> Result<BTreeMap<u32, KernelMap>> {
    let directory = format!("/proc/{process}/fdinfo");
    let mut maps = BTreeMap::new();
    for entry in fs::read_dir(&directory).with_context(|| format!("read {directory}"))? {
        // A file that was closed meanwhile is none of the maps.
        let Ok(text) = fs::read_to_string(entry?.path()) else { continue };
        let Some((id, kib)) = read_info(&text) else { continue };
        let info = MapInfo::from_id(id).with_context(|| format!("look up the BPF map {id}"))?;
        maps.insert(id, KernelMap { name: info.name_as_str().unwrap_or("unnamed").to_owned(), kib });
    }
    Ok(maps)
}

/// Returns the maps that are pinned in a directory, by identifier. None if there is no directory.
fn pinned(pins: &Path) -> Result<BTreeMap<u32, KernelMap>> {
    let mut maps = BTreeMap::new();
    if !pins.exists() {
        return Ok(maps);
    }
    for entry in fs::read_dir(pins).with_context(|| format!("read {}", pins.display()))? {
        let entry = entry?;
        // Links of programs are pinned beside the maps.
        let Ok(info) = MapInfo::from_pin(entry.path()) else { continue };
        let map = info.fd()?;
        let path = format!("/proc/self/fdinfo/{}", std::os::fd::AsFd::as_fd(&map).as_raw_fd());
        let text = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
        let (id, kib) = read_info(&text).with_context(|| format!("no map in {path}"))?;
        maps.insert(id, KernelMap { name: entry.file_name().to_string_lossy().into_owned(), kib });
    }
    Ok(maps)
}

/// Returns the identifier and the memory in KiB. None for a file that is no map.
fn read_info(fdinfo: &str) -> Option<(u32, u64)> {
    let field = |name: &str| {
        fdinfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
    };
    let bytes: u64 = field("memlock")?.parse().ok()?;
    Some((field("map_id")?.parse().ok()?, bytes.div_ceil(1024)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fdinfo_of_a_map_has_its_identifier_and_memory() {
        let map = "pos:\t0\nmap_type:\t1\nmax_entries:\t131072\nmemlock:\t1048577\nmap_id:\t42\nfrozen:\t0\n";
        assert_eq!(read_info(map), Some((42, 1025)));
    }

    #[test]
    fn fdinfo_of_a_program_is_no_map() {
        assert_eq!(read_info("pos:\t0\nprog_type:\t3\nmemlock:\t4096\nprog_id:\t7\n"), None);
    }
}
