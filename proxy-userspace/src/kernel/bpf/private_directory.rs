//! Directories of pins that only this user can change.
//!
//! A bpf filesystem that was mounted without options lets every user create directories (mode
//! 1777). So a user could prepare the pin directory, and later replace the maps in it.

use std::{
    fs::{DirBuilder, File, Metadata},
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _},
    path::Path,
};

use nix::unistd::geteuid;

use super::super::KernelError;

const PRIVATE: u32 = 0o700;
/// The permission of the group and of others to write.
const WRITABLE_BY_OTHERS: u32 = 0o022;

/// Creates the directory and its parents where they are missing, for this user only. Then opens it.
/// Fails if an existing one does not belong to this user, if others may write to it, or if it is a
/// symbolic link.
pub(super) fn create(path: &Path) -> Result<File, KernelError> {
    if path.symlink_metadata().is_err() {
        let created = DirBuilder::new().recursive(true).mode(PRIVATE).create(path);
        created.map_err(KernelError::path("create directory", path))?;
    }
    open(path)
}

/// Creates a directory that must not exist yet.
pub(super) fn create_new(path: &Path) -> Result<(), KernelError> {
    DirBuilder::new().mode(PRIVATE).create(path).map_err(KernelError::path("create directory", path))
}

/// Opens an existing directory. Fails as [`create`] does.
pub(super) fn open(path: &Path) -> Result<File, KernelError> {
    let flags = libc::O_DIRECTORY | libc::O_NOFOLLOW;
    let directory = match File::options().read(true).custom_flags(flags).open(path) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::ELOOP | libc::ENOTDIR)) => {
            return Err(KernelError::PinsNotInDirectory(path.into()));
        }
        opened => opened.map_err(KernelError::path("open directory", path))?,
    };
    let found = directory.metadata().map_err(KernelError::path("read the owner of", path))?;
    check(path, &found)?;
    Ok(directory)
}

fn check(path: &Path, found: &Metadata) -> Result<(), KernelError> {
    // In a user namespace, the owner is the user as that namespace sees it, like our own.
    let (owner, mode, user) = (found.uid(), found.mode() & 0o7777, geteuid().as_raw());
    if owner == user && mode & WRITABLE_BY_OTHERS == 0 {
        return Ok(());
    }
    Err(KernelError::PinsNotPrivate { path: path.into(), owner, mode, user })
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, Permissions},
        os::unix::fs::{PermissionsExt as _, chown, symlink},
    };

    use super::*;

    #[test]
    fn a_new_directory_and_its_parents_are_private() {
        let root = tempfile::tempdir().expect("a directory");
        let path = root.path().join("parent/pins");
        create(&path).expect("created");
        create(&path).expect("taken again");
        for path in [&*path, path.parent().expect("a parent")] {
            assert_eq!(fs::metadata(path).expect("readable").mode() & 0o777, 0o700, "{}", path.display());
        }
    }

    #[test]
    fn a_directory_that_others_may_read_is_taken() {
        let root = tempfile::tempdir().expect("a directory");
        fs::set_permissions(root.path(), Permissions::from_mode(0o755)).expect("allowed");
        create(root.path()).expect("earlier versions created such directories");
    }

    #[test]
    fn a_directory_that_others_may_change_is_refused() {
        let root = tempfile::tempdir().expect("a directory");
        for mode in [0o770, 0o702, 0o1777] {
            fs::set_permissions(root.path(), Permissions::from_mode(mode)).expect("allowed");
            let error = create(root.path()).expect_err("refused").to_string();
            let path = root.path().display();
            let user = geteuid();
            let expected = format!(
                "cannot use the pin directory {path}: it belongs to user {user} and has mode {mode:04o}; it must \
                 belong to user {user} and only that user may write to it; remove it, or set another directory \
                 with --bpf-pin-dir"
            );
            assert_eq!(error, expected);
        }
    }

    /// Needs root, as all tests of pins.
    #[test]
    fn a_directory_of_another_user_is_refused() {
        let root = tempfile::tempdir().expect("a directory");
        let path = root.path().join("pins");
        create(&path).expect("created");
        chown(&path, Some(65_534), None).expect("root may");
        let error = create(&path).expect_err("refused").to_string();
        assert!(error.contains("it belongs to user 65534 and has mode 0700"), "{error}");
    }

    #[test]
    fn a_symbolic_link_and_a_file_are_refused() {
        let root = tempfile::tempdir().expect("a directory");
        let [own, link, dangling, file] =
            ["own", "link", "dangling", "file"].map(|name| root.path().join(name));
        create(&own).expect("created");
        symlink(&own, &link).expect("created");
        symlink(root.path().join("missing"), &dangling).expect("created");
        fs::write(&file, "").expect("created");
        for path in [link, dangling, file] {
            let error = create(&path).expect_err("refused");
            assert!(matches!(error, KernelError::PinsNotInDirectory(_)), "{error}");
        }
    }
}
