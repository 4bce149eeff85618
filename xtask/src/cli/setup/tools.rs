//! Programs besides the BPF toolchain that the demo and the tests run.

use std::path::PathBuf;

use xtask::run::Run;
use xtask::search;

/// A program and where it comes from.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Tool {
    /// The program's name.
    pub(crate) name: &'static str,
    /// Who runs it.
    pub(crate) why: &'static str,
    /// An argument with which it does nothing but succeed; Ubuntu's bpftool is a script that may not find the real one.
    probe: &'static str,
    /// Debian packages that bring it: the first list of which all exist is installed.
    pub(crate) packages: &'static [&'static [&'static str]],
}

/// All tools.
pub(crate) const TOOLS: [Tool; 5] = [
    Tool {
        name: "bpftool",
        why: "the demo shows the BPF maps with it",
        probe: "version",
        packages: &[&["bpftool"], &["linux-tools-common", "linux-tools-generic"]],
    },
    Tool {
        name: "nft",
        why: "shunt masquerades and refuses with it, and tests look at what it did",
        probe: "--version",
        packages: &[&["nftables"]],
    },
    Tool {
        name: "iptables",
        why: "shunt does the same with it where there is no nft, and tests try both",
        probe: "--version",
        packages: &[&["iptables"]],
    },
    Tool {
        name: "ip",
        why: "conformance cases change their world with it",
        probe: "-V",
        packages: &[&["iproute2"]],
    },
    Tool {
        name: "ethtool",
        why: "conformance cases switch the offloading of links with it",
        probe: "--version",
        packages: &[&["ethtool"]],
    },
];

/// Parts of the Rust toolchain in use that a minimal installation lacks: rustup's name of each and a program of it.
pub(crate) const COMPONENTS: [(&str, &str); 2] = [("rustfmt", "cargo-fmt"), ("clippy", "cargo-clippy")];

impl Tool {
    /// The program, if it is there and runs.
    pub(crate) fn find(&self) -> Option<PathBuf> {
        let path = search::program(self.name)?;
        Run::new(&path).arg(self.probe).read().is_ok().then_some(path)
    }
}

/// The program of a component: beside cargo, where rustup puts it, or in PATH.
pub(crate) fn component(program: &str) -> Option<PathBuf> {
    let cargo = search::cargo();
    if cargo.parent().is_some_and(|bin| bin.join("rustc").is_file()) {
        // In PATH there is rustup's proxy, whether or not the component is installed.
        let path = cargo.with_file_name(program);
        return search::is_executable(&path).then_some(path);
    }
    search::program(program)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tool_has_a_package() {
        assert!(TOOLS.iter().all(|tool| tool.packages.iter().any(|list| !list.is_empty())));
    }

    #[test]
    fn the_rust_that_runs_the_tests_has_no_made_up_component() {
        assert_eq!(component("cargo-shunt-no-such-program"), None);
    }
}
