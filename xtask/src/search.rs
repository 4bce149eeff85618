//! Finds programs in PATH, and in root's usual folders.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::workspace;

/// Folders searched after PATH. `sudo` and `su` often leave them out, but nft, iptables and bpftool
/// are there.
const ADMIN_FOLDERS: [&str; 3] = ["/usr/local/sbin", "/usr/sbin", "/sbin"];

/// Returns the folder of programs that setup built for this workspace. It is searched last.
pub fn own_programs() -> PathBuf {
    workspace::tools().join("bin")
}

/// Returns PATH with the folders for administrators, for programs that run others, such as dpkg.
pub fn path() -> OsString {
    let path = env::var_os("PATH").unwrap_or_default();
    let mut folders: Vec<PathBuf> = env::split_paths(&path).collect();
    for folder in ADMIN_FOLDERS.map(PathBuf::from).into_iter().chain([own_programs()]) {
        if !folders.contains(&folder) {
            folders.push(folder);
        }
    }
    // This fails only for a folder with a colon in its name, which PATH cannot contain.
    env::join_paths(folders).unwrap_or(path)
}

/// Returns the first executable file with this name.
pub fn program(name: &str) -> Option<PathBuf> {
    programs(name).into_iter().next()
}

/// Returns all executable files with this name, in the order of PATH.
pub fn programs(name: &str) -> Vec<PathBuf> {
    let path = path();
    let files = env::split_paths(&path).map(|folder| folder.join(name));
    unique(files.filter(|file| is_executable(file)))
}

/// Returns the items without duplicates, in the order of their first occurrence.
pub fn unique<T: PartialEq>(items: impl Iterator<Item = T>) -> Vec<T> {
    items.fold(Vec::new(), |mut found, item| {
        if !found.contains(&item) {
            found.push(item);
        }
        found
    })
}

/// Returns the cargo that runs xtask, or the one in PATH.
pub fn cargo() -> PathBuf {
    env::var_os("CARGO").map_or_else(|| PathBuf::from("cargo"), PathBuf::from)
}

/// Returns the folder that the variable names, or else the folder `default` of the user's home.
pub fn home(variable: &str, default: &str) -> Option<PathBuf> {
    let named = env::var_os(variable).map(PathBuf::from);
    named.or_else(|| Some(Path::new(&env::var_os("HOME")?).join(default)))
}

/// Returns true if `path` is an executable file.
pub fn is_executable(path: &Path) -> bool {
    path.is_file() && nix::unistd::access(path, nix::unistd::AccessFlags::X_OK).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shell_is_found_and_made_up_name_is_not() {
        assert!(program("sh").is_some());
        assert_eq!(program("shunt-no-such-program"), None);
    }

    #[test]
    fn folders_for_administrators_come_last_and_once() {
        let path = path();
        let folders: Vec<PathBuf> = env::split_paths(&path).collect();
        for folder in ADMIN_FOLDERS.map(PathBuf::from) {
            assert!(folders.contains(&folder), "{folders:?}");
        }
        let before = env::var_os("PATH").unwrap_or_default();
        assert!(folders.starts_with(&env::split_paths(&before).collect::<Vec<_>>()), "{folders:?}");
    }

    #[test]
    fn folder_is_no_program() {
        assert!(!is_executable(Path::new("/usr")));
    }
}
