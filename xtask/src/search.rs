//! Finds programs the way a shell would, and also where root's PATH usually points.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::workspace;

/// Folders searched after PATH: `sudo` and `su` often leave them out, and nft, iptables and bpftool live there.
const ADMIN_FOLDERS: [&str; 3] = ["/usr/local/sbin", "/usr/sbin", "/sbin"];

/// Where programs are that setup made for this workspace alone; searched last.
pub fn own_programs() -> PathBuf {
    workspace::tools().join("bin")
}

/// PATH with the folders for administrators: programs that we run, such as dpkg, look for others there.
pub fn path() -> OsString {
    let path = env::var_os("PATH").unwrap_or_default();
    let mut folders: Vec<PathBuf> = env::split_paths(&path).collect();
    for folder in ADMIN_FOLDERS.map(PathBuf::from).into_iter().chain([own_programs()]) {
        if !folders.contains(&folder) {
            folders.push(folder);
        }
    }
    // It fails for a folder with a colon in its name, which PATH cannot have brought.
    env::join_paths(folders).unwrap_or(path)
}

/// The first executable file called `name`.
pub fn program(name: &str) -> Option<PathBuf> {
    programs(name).into_iter().next()
}

/// Every executable file called `name`, in the order of PATH.
pub fn programs(name: &str) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = Vec::new();
    for file in env::split_paths(&path()).map(|folder| folder.join(name)) {
        if is_executable(&file) && !found.contains(&file) {
            found.push(file);
        }
    }
    found
}

/// The cargo that runs us, or the one in PATH.
pub fn cargo() -> PathBuf {
    env::var_os("CARGO").map_or_else(|| PathBuf::from("cargo"), PathBuf::from)
}

/// The user's home folder.
pub fn home() -> Option<PathBuf> {
    env::var_os("HOME").map(PathBuf::from)
}

/// Whether `path` is a file that can be executed.
pub fn is_executable(path: &Path) -> bool {
    path.is_file() && nix::unistd::access(path, nix::unistd::AccessFlags::X_OK).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_is_found_and_a_made_up_name_is_not() {
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
    fn a_folder_is_no_program() {
        assert!(!is_executable(Path::new("/usr")));
    }
}
