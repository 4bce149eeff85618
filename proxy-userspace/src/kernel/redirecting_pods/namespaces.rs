//! Finds the network namespaces of the node's pods, and the host names of the pods.
//!
//! Called twice a second, so it does little for what it has seen: it lists directories, and reads
//! the namespaces of few files and processes.

use std::{
    collections::{BTreeMap, HashMap},
    ffi::{OsStr, OsString},
    fs::{self, File},
    mem,
    os::unix::fs::{DirEntryExt as _, MetadataExt as _},
    path::{Path, PathBuf},
    thread,
};

use nix::{
    sched::{CloneFlags, setns},
    sys::utsname::uname,
};

use super::NetnsInode;
use crate::kernel::KernelError;

/// Container runtimes and `ip netns` keep named namespaces here. Usually both are one directory.
pub(super) const DIRECTORIES: [&str; 2] = ["/run/netns", "/var/run/netns"];
/// How often the namespace of a process is read in the first scans that see it. A container runtime
/// starts a process first and moves it to its namespace then.
const FIRST_READS: u8 = 3;
/// Later, the namespace of a process or of a name is read once in this many scans, in case that it
/// changed.
const READ_EVERY: u32 = 32;
/// Processes are scanned in one of this many calls. To list /proc costs about 1 µs a process.
const SCAN_PROCESSES_EVERY: u32 = 2;

/// Finds namespaces, and remembers which processes are in which.
#[derive(Debug)]
pub(super) struct Finder {
    /// The device number of the filesystem of namespaces. Other files are no namespaces.
    device: u64,
    own: NetnsInode,
    own_uts: Option<u64>,
    /// The named namespaces by path.
    names: BTreeMap<OsString, Name>,
    processes: HashMap<u32, Process>,
    call: u32,
}

/// A file that a namespace may be mounted on.
#[derive(Clone, Copy, Debug)]
struct Name {
    /// The inode number of the file below the mount.
    file: u64,
    netns: Option<NetnsInode>,
}

#[derive(Clone, Copy, Debug)]
struct Process {
    netns: Option<NetnsInode>,
    reads: u8,
    /// The last scan that saw the process.
    seen: u32,
}

impl Finder {
    pub(super) fn new() -> Result<Self, KernelError> {
        let own = "/proc/self/ns/net";
        let meta = fs::metadata(own).map_err(KernelError::path("read", own))?;
        Ok(Self {
            device: meta.dev(),
            own: NetnsInode(meta.ino()),
            own_uts: namespace_of(Path::new("/proc/self/ns/uts")),
            names: BTreeMap::new(),
            processes: HashMap::new(),
            call: 0,
        })
    }

    /// Returns all namespaces but that of this process, with a path of each. A namespace without a
    /// name has the path of the process in it that has the lowest number.
    pub(super) fn find(&mut self) -> BTreeMap<NetnsInode, PathBuf> {
        if self.call.is_multiple_of(SCAN_PROCESSES_EVERY) {
            self.scan_processes();
        }
        self.call = self.call.wrapping_add(1);
        let mut found = self.named();
        let mut first: BTreeMap<NetnsInode, u32> = BTreeMap::new();
        for (process, netns) in self.processes.iter().filter_map(|(id, process)| Some((*id, process.netns?)))
        {
            if netns != self.own && !found.contains_key(&netns) {
                first.entry(netns).and_modify(|lowest| *lowest = process.min(*lowest)).or_insert(process);
            }
        }
        found.extend(first.into_iter().map(|(netns, process)| (netns, namespace_path(process, "net"))));
        found
    }

    /// Returns the namespaces that have names, with the first path of each.
    fn named(&mut self) -> BTreeMap<NetnsInode, PathBuf> {
        let read_all = self.call.is_multiple_of(READ_EVERY);
        let known = mem::take(&mut self.names);
        // If both are one directory, the first one stays.
        let directories: BTreeMap<_, _> = DIRECTORIES
            .iter()
            .rev()
            .filter_map(|path| Some((fs::metadata(path).ok()?.ino(), path)))
            .collect();
        for entry in directories.into_values().filter_map(|path| fs::read_dir(path).ok()).flatten().flatten()
        {
            let (path, file) = (entry.path(), entry.ino());
            let known = known.get(path.as_os_str()).filter(|known| known.file == file && !read_all);
            let netns = known.and_then(|known| known.netns).or_else(|| self.netns_at(&path));
            self.names.insert(path.into(), Name { file, netns });
        }
        let mut found = BTreeMap::new();
        for (path, netns) in self.names.iter().filter_map(|(path, name)| Some((path, name.netns?))) {
            if netns != self.own {
                found.entry(netns).or_insert_with(|| path.into());
            }
        }
        found
    }

    /// Returns the namespace that is mounted at a path. The file is there before it is mounted.
    fn netns_at(&self, path: &Path) -> Option<NetnsInode> {
        let meta = fs::metadata(path).ok().filter(|meta| meta.dev() == self.device)?;
        Some(NetnsInode(meta.ino()))
    }

    fn scan_processes(&mut self) {
        let scan = self.call;
        for id in process_ids() {
            let process = self.processes.entry(id).or_insert(Process { netns: None, reads: 0, seen: scan });
            process.seen = scan;
            let turn = (scan / SCAN_PROCESSES_EVERY).wrapping_add(id);
            if process.reads < FIRST_READS || turn.is_multiple_of(READ_EVERY) {
                process.reads = process.reads.saturating_add(1);
                process.netns = namespace_of(&namespace_path(id, "net")).map(NetnsInode);
            }
        }
        self.processes.retain(|_, process| process.seen == scan);
    }

    /// Returns the host name that processes in the namespace see, if it is not that of this
    /// process. The host name of a pod is its name, unless its specification sets another one.
    ///
    /// Other processes are visible only in the PID namespace of the node.
    pub(super) fn host_name(&self, netns: NetnsInode) -> Option<String> {
        let inside = self.processes.iter().filter(|(_, process)| process.netns == Some(netns));
        let paths = inside.map(|(id, _)| namespace_path(*id, "uts"));
        let other = |path: &PathBuf| namespace_of(path).is_some_and(|uts| Some(uts) != self.own_uts);
        // Runtimes create the namespace with the node's host name and change it then.
        let own = uname().ok().map(|own| own.nodename().to_owned());
        paths
            .filter(other)
            .filter_map(|path| host_name_in(&path))
            .find(|name| Some(OsStr::new(name)) != own.as_deref() && !name.is_empty())
    }
}

/// Opens the namespace if it is still at this path.
pub(super) fn open(netns: NetnsInode, path: &Path) -> Option<File> {
    let file = File::open(path).ok()?;
    let found = NetnsInode(file.metadata().ok()?.ino());
    (found == netns).then_some(file)
}

/// Returns the inode number of a namespace in /proc without opening it. The link reads
/// `net:[4026531840]`.
fn namespace_of(path: &Path) -> Option<u64> {
    let target = fs::read_link(path).ok()?;
    let (_, number) = target.to_str()?.split_once('[')?;
    number.strip_suffix(']')?.parse().ok()
}

fn namespace_path(process: u32, kind: &str) -> PathBuf {
    PathBuf::from(format!("/proc/{process}/ns/{kind}"))
}

fn process_ids() -> impl Iterator<Item = u32> {
    fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// Returns the host name in a UTS namespace.
fn host_name_in(path: &Path) -> Option<String> {
    let file = File::open(path).ok()?;
    let read = move || {
        setns(file, CloneFlags::CLONE_NEWUTS).ok()?;
        uname().ok()?.nodename().to_str().map(str::to_owned)
    };
    thread::Builder::new().spawn(read).ok()?.join().ok().flatten()
}
