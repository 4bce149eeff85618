//! Finds programs the way a shell would, and also where root's PATH usually points.

use std::env;
use std::path::{Path, PathBuf};

/// Folders searched after PATH: `sudo` and `su` often leave them out, and nft, iptables and bpftool live there.
const ADMIN_FOLDERS: [&str; 3] = ["/usr/local/sbin", "/usr/sbin", "/sbin"];

/// The first executable file called `name`.
pub fn program(name: &str) -> Option<PathBuf> {
    programs(name).into_iter().next()
}

/// Every executable file called `name`, in the order of PATH.
pub fn programs(name: &str) -> Vec<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = env::split_paths(&path).chain(ADMIN_FOLDERS.iter().map(PathBuf::from));
    let mut found: Vec<PathBuf> = Vec::new();
    for file in folders.map(|folder| folder.join(name)) {
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
    fn a_folder_is_no_program() {
        assert!(!is_executable(Path::new("/usr")));
    }
}
