//! Refuses commands that need root before they do anything.

use anyhow::{Result, ensure};
use nix::unistd::Uid;

/// Returns an error unless this user is root.
pub(crate) fn require(command: &str) -> Result<()> {
    ensure!(Uid::effective().is_root(), "{}", refusal(command));
    Ok(())
}

fn refusal(command: &str) -> String {
    format!(
        "`cargo xtask {command}` needs root: it makes network namespaces, veth links and cgroups, and loads eBPF \
         programs into the kernel. All of it is its own and is removed at the end.\n\
         Run it as root, for instance: sudo env \"PATH=$PATH\" \"HOME=$HOME\" cargo xtask {command}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_says_what_is_needed_and_why() {
        let text = refusal("demo");
        for part in ["cargo xtask demo", "needs root", "network namespaces", "eBPF", "sudo"] {
            assert!(text.contains(part), "{part} is not in {text}");
        }
    }
}
