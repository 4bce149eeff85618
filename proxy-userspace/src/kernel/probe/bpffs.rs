//! Probes pins on bpffs, which security modules deny to many containers.

use std::{fs, path::Path, thread};

use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
};

use super::Fact;
use crate::kernel::{
    KernelError,
    bpf::{BPFFS, check_lasting, check_pin_directory, is_bpffs, mount_bpffs, try_pin},
    capabilities,
};

/// Pins a map where the pin directory is or will be, and removes it again.
pub(super) fn probe(pin_dir: &Path) -> Fact {
    if let Err(error) = capabilities::check_bpf() {
        return Fact::Unknown(format!("cannot try to pin a map: {error}"));
    }
    let existing = pin_dir.ancestors().find(|path| path.is_dir()).unwrap_or(Path::new("/"));
    if is_bpffs(existing) {
        let usable = if pin_dir.symlink_metadata().is_ok() { check_pin_directory(pin_dir) } else { Ok(()) };
        return fact(usable.and_then(|()| try_pin(existing)), existing.display().to_string());
    }
    let known = fs::read_to_string("/proc/filesystems").unwrap_or_default();
    let is_known = known.lines().any(|line| line.split_whitespace().last() == Some("bpf"));
    if pin_dir.starts_with(BPFFS) && Path::new(BPFFS).is_dir() && is_known {
        match check_lasting() {
            // The remedy is that of the feature.
            Err(KernelError::BpffsNotLasting) => {
                return Fact::Missing(format!(
                    "none is mounted on {BPFFS}, and one that shunt mounts would end with this container (its mount \
                     namespace)"
                ));
            }
            Err(error) => return Fact::Unknown(error.to_string()),
            Ok(()) => {}
        }
        let tried = in_fresh_mount_namespace(|| mount_bpffs().and_then(|()| try_pin(Path::new(BPFFS))));
        return fact(tried, format!("not mounted on {BPFFS}; shunt mounts it when it starts"));
    }
    Fact::Missing(format!("{} is not on a bpf filesystem", pin_dir.display()))
}

fn fact(tried: Result<(), KernelError>, details: String) -> Fact {
    match tried.map_err(KernelError::explained) {
        Ok(()) => Fact::Present(details),
        Err(error @ KernelError::Denied { .. }) => Fact::Denied(error.to_string()),
        Err(error) => Fact::Missing(error.to_string()),
    }
}

/// Runs a job whose mounts end with its thread.
fn in_fresh_mount_namespace(job: impl FnOnce() -> Result<(), KernelError> + Send) -> Result<(), KernelError> {
    let run = || {
        let entered = unshare(CloneFlags::CLONE_NEWNS).and_then(|()| {
            mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
        });
        entered
            .map_err(|error| KernelError::call("create", "a mount namespace for the probe")(error.into()))?;
        job()
    };
    thread::scope(|scope| scope.spawn(run).join()).unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

#[cfg(test)]
mod tests {
    use std::{
        fs::Permissions,
        os::unix::fs::{PermissionsExt as _, symlink},
    };

    use nix::mount::{MntFlags, umount2};

    use super::*;
    use crate::kernel::bpf::PinDir;

    #[test]
    fn a_directory_on_another_filesystem_is_named() {
        let directory = tempfile::tempdir().expect("a directory");
        let fact = probe(&directory.path().join("shunt"));
        assert!(fact.is_missing() && fact.detail().contains("shunt is not on a bpf filesystem"), "{fact:?}");
    }

    /// Runs a job in a mount namespace without a bpf filesystem, as in a container.
    fn in_container(job: impl FnOnce() + Send) {
        let tried = in_fresh_mount_namespace(|| {
            while is_bpffs(Path::new(BPFFS)) {
                umount2(BPFFS, MntFlags::MNT_DETACH).expect("unmounted");
            }
            job();
            Ok(())
        });
        tried.expect("a mount namespace");
    }

    #[test]
    fn a_bpffs_that_would_end_with_the_container_is_missing_and_not_mounted() {
        in_container(|| {
            let pins = Path::new(BPFFS).join("shunt");
            let fact = probe(&pins);
            assert!(fact.is_missing() && fact.detail().contains("would end with this container"), "{fact:?}");
            let created = PinDir::create(&pins).map(drop);
            assert!(matches!(created, Err(KernelError::BpffsNotLasting)), "{created:?}");
            assert!(!is_bpffs(Path::new(BPFFS)), "it is mounted nevertheless");
        });
    }

    /// `hostPath: /sys/fs/bpf`, where the node has no bpf filesystem.
    #[test]
    fn a_directory_of_the_node_is_enough_if_mounts_propagate_back_to_it() {
        in_container(|| {
            let mount_at = |flags, source| {
                mount(source, BPFFS, None::<&str>, flags, None::<&str>).expect("mounted");
            };
            mount_at(MsFlags::MS_BIND, Some(BPFFS));
            let pins = Path::new(BPFFS).join("shunt");
            assert!(probe(&pins).is_missing(), "it would be seen in the container only");
            mount_at(MsFlags::MS_SHARED, None);
            let fact = probe(&pins);
            assert!(matches!(&fact, Fact::Present(detail) if detail.contains("shunt mounts it")), "{fact:?}");
            let _created = PinDir::create(&pins).expect("created");
            assert!(pins.is_dir() && is_bpffs(&pins));
        });
    }

    #[test]
    fn a_map_is_pinned_and_nothing_stays() {
        let tried = in_fresh_mount_namespace(|| {
            mount_bpffs()?;
            let listed = || fs::read_dir(BPFFS).expect("listed").flatten().map(|entry| entry.path());
            let before: Vec<_> = listed().collect();
            let fact = probe(&Path::new(BPFFS).join("shunt"));
            assert_eq!(fact, Fact::Present(BPFFS.into()));
            assert_eq!(listed().collect::<Vec<_>>(), before);
            assert_eq!(fs::metadata(BPFFS).expect("mounted").permissions().mode() & 0o777, 0o700);
            Ok(())
        });
        tried.expect("bpffs is mounted");
    }

    #[test]
    fn a_pin_directory_that_others_may_change_is_missing_and_not_used() {
        let tried = in_fresh_mount_namespace(|| {
            mount_bpffs()?;
            let pins = Path::new(BPFFS).join("shunt");
            let main = PinDir::create(&pins)?;
            for sibling in ["shunt-next", "shunt-swap"] {
                let sibling = Path::new(BPFFS).join(sibling);
                symlink("/nonexistent", &sibling).expect("created");
                assert!(
                    matches!(main.recover(), Err(KernelError::PinsNotInDirectory(path)) if path == sibling)
                );
                fs::remove_file(&sibling).expect("removed");
            }
            drop(main);
            fs::set_permissions(&pins, Permissions::from_mode(0o777)).expect("allowed");
            let fact = probe(&pins);
            assert!(fact.is_missing() && fact.detail().contains("has mode 0777"), "{fact:?}");
            for refused in [PinDir::create(&pins).map(drop), PinDir::existing(&pins).map(drop)] {
                assert!(
                    matches!(refused, Err(KernelError::PinsNotPrivate { mode: 0o777, .. })),
                    "{refused:?}"
                );
            }
            Ok(())
        });
        tried.expect("bpffs is mounted");
    }
}
