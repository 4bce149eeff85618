//! Creates network namespaces under `/run/netns`, as `ip netns` does, and runs code inside them.

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

/// The directory in which `ip netns` keeps namespaces.
pub(super) const DIRECTORY: &str = "/run/netns";

/// A namespace with a name. Dropping this value leaves the namespace in place; [`remove`] removes
/// it.
#[derive(Debug)]
pub(super) struct Netns {
    path: PathBuf,
    file: File,
}

impl Netns {
    /// Creates a namespace and mounts it at `/run/netns/NAME`.
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

    /// Opens an existing namespace.
    pub(super) fn open(name: &str) -> Result<Self> {
        let path = Path::new(DIRECTORY).join(name);
        let file = File::open(&path).with_context(|| format!("open {}", path.display()))?;
        Ok(Self { path, file })
    }

    /// Returns the mount point of the namespace.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the open namespace, into which links can be moved.
    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Runs `job` inside the namespace, on a new thread, and waits for it.
    pub(super) fn run<T: Send>(&self, job: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        on_own_thread(|| {
            setns(&self.file, CloneFlags::CLONE_NEWNET)
                .with_context(|| format!("enter {}", self.path.display()))?;
            job()
        })
    }
}

/// Returns the names below `/run/netns` that begin with `prefix`.
pub(super) fn names(prefix: &str) -> Vec<String> {
    let Ok(entries) = fs::read_dir(DIRECTORY) else {
        return Vec::new();
    };
    let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| name.starts_with(prefix)).collect()
}

/// Unmounts and removes the namespace with this name. The kernel frees it with its last process.
pub(super) fn remove(name: &str) -> Result<()> {
    let path = Path::new(DIRECTORY).join(name);
    // EINVAL: nothing is mounted, because the run was killed between the two steps of create.
    match umount2(&path, MntFlags::MNT_DETACH) {
        Ok(()) | Err(nix::errno::Errno::EINVAL) => {}
        Err(error) => return Err(error).with_context(|| format!("unmount {}", path.display())),
    }
    fs::remove_file(&path).with_context(|| format!("remove {}", path.display()))
}

/// Runs `job` on a new thread. Each thread has its own namespace, so what `job` enters or unshares
/// ends with the thread.
fn on_own_thread<T: Send>(job: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    thread::scope(|scope| scope.spawn(job).join())
        .unwrap_or_else(|_| Err(anyhow!("the thread inside the network namespace panicked")))
}
