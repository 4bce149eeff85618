//! Network namespaces that live under `/run/netns`, as `ip netns` keeps them, and code that runs inside them.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    thread,
};

use anyhow::{Context as _, Result, anyhow};
use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, setns, unshare},
};

/// Where `ip netns` looks for namespaces.
pub(super) const DIRECTORY: &str = "/run/netns";

/// A namespace with a name. Dropping it leaves the namespace in place; [`remove`] takes it away.
#[derive(Debug)]
pub(super) struct Netns {
    path: PathBuf,
    file: File,
}

impl Netns {
    /// Makes a namespace and mounts it at `/run/netns/NAME`.
    pub(super) fn create(name: &str) -> Result<Self> {
        let path = Path::new(DIRECTORY).join(name);
        fs::create_dir_all(DIRECTORY).with_context(|| format!("create {DIRECTORY}"))?;
        File::create_new(&path).with_context(|| format!("create {}", path.display()))?;
        on_own_thread(|| {
            unshare(CloneFlags::CLONE_NEWNET).context("unshare the network namespace")?;
            let own = "/proc/thread-self/ns/net";
            mount(Some(own), &path, None::<&str>, MsFlags::MS_BIND, None::<&str>)
                .with_context(|| format!("mount {own} at {}", path.display()))
        })?;
        let file = File::open(&path).with_context(|| format!("open {}", path.display()))?;
        Ok(Self { path, file })
    }

    /// Where the namespace is mounted.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The open namespace, to move links into.
    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Runs `job` inside the namespace, on a thread of its own, and waits for it.
    pub(super) fn run<T: Send>(&self, job: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        on_own_thread(|| {
            setns(&self.file, CloneFlags::CLONE_NEWNET)
                .with_context(|| format!("enter {}", self.path.display()))?;
            job()
        })
    }
}

/// The names below `/run/netns` that begin with `prefix`.
pub(super) fn names(prefix: &str) -> Vec<String> {
    let Ok(entries) = fs::read_dir(DIRECTORY) else {
        return Vec::new();
    };
    let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| name.starts_with(prefix)).collect()
}

/// Unmounts and removes the namespace of this name; the kernel frees it with its last process.
pub(super) fn remove(name: &str) -> Result<()> {
    let path = Path::new(DIRECTORY).join(name);
    // EINVAL: nothing is mounted, the run was killed between the two steps of create.
    match umount2(&path, MntFlags::MNT_DETACH) {
        Ok(()) | Err(nix::errno::Errno::EINVAL) => {}
        Err(error) => return Err(error).with_context(|| format!("unmount {}", path.display())),
    }
    fs::remove_file(&path).with_context(|| format!("remove {}", path.display()))
}

/// A thread's namespace is its own: what `job` enters or unshares ends with the thread.
fn on_own_thread<T: Send>(job: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    thread::scope(|scope| scope.spawn(job).join())
        .unwrap_or_else(|_| Err(anyhow!("the thread inside the network namespace panicked")))
}
