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
    /// None for a file that is no program, whose name is its path.
    probe: Option<&'static str>,
    /// Debian packages that bring it: the first list of which all exist is installed.
    pub(crate) packages: &'static [&'static [&'static str]],
}

/// All tools.
pub(crate) const TOOLS: [Tool; 8] = [
    tool(
        "bpftool",
        "the demo shows the BPF maps with it",
        "version",
        &[&["bpftool"], &["linux-tools-common", "linux-tools-generic"]],
    ),
    tool(
        "nft",
        "shunt masquerades and refuses with it, and tests look at what it did",
        "--version",
        &[&["nftables"]],
    ),
    tool(
        "iptables",
        "shunt does the same with it where there is no nft, and tests try both",
        "--version",
        &[&["iptables"]],
    ),
    tool("ip", "conformance cases change their world with it", "-V", &[&["iproute2"]]),
    tool("ipset", "tests leave behind what kube-proxy leaves", "--version", &[&["ipset"]]),
    tool("promtool", "tests have it check the metrics", "--version", &[&["prometheus"]]),
    tool("strace", "tests count system calls with it", "--version", &[&["strace"]]),
    tool("ethtool", "conformance cases switch the offloading of links with it", "--version", &[&["ethtool"]]),
];

/// The keys that Debian signs its packages with, also those of other releases than this machine's.
pub(crate) const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// What virtual machines run in.
pub(crate) const QEMU: Tool =
    tool("qemu-system-x86_64", "virtual machines run in it", "--version", &[&["qemu-system-x86"]]);

/// What virtual machines need besides those: qemu, the tools that guests get copies of, and what fetches kernels.
pub(crate) const VM_TOOLS: [Tool; 8] = [
    QEMU,
    tool("busybox", "it is most of what guests have", "true", &[&["busybox-static"]]),
    tool("bash", "it is the guests' shell", "--version", &[&["bash"]]),
    tool("depmod", "it makes the table of a kernel's modules", "--version", &[&["kmod"]]),
    tool("kmod", "guests load modules with it", "--version", &[&["kmod"]]),
    tool("ip", "guests get it", "-V", &[&["iproute2"]]),
    tool("dpkg", "it unpacks kernels", "--version", &[&["dpkg"]]),
    Tool {
        name: KEYRING,
        why: "it tells that kernels are Debian's",
        probe: None,
        packages: &[&["debian-archive-keyring"]],
    },
];

const fn tool(
    name: &'static str,
    why: &'static str,
    probe: &'static str,
    packages: &'static [&'static [&'static str]],
) -> Tool {
    Tool { name, why, probe: Some(probe), packages }
}

/// Parts of the Rust toolchain in use that a minimal installation lacks: rustup's name of each and a program of it.
pub(crate) const COMPONENTS: [(&str, &str); 2] = [("rustfmt", "cargo-fmt"), ("clippy", "cargo-clippy")];

impl Tool {
    /// The program, if it is there and runs.
    pub(crate) fn find(&self) -> Option<PathBuf> {
        let Some(probe) = self.probe else {
            return Some(self.name.into()).filter(|path: &PathBuf| path.is_file());
        };
        let path = search::program(self.name)?;
        Run::new(&path).arg(probe).read().is_ok().then_some(path)
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
        let mut tools = TOOLS.iter().chain(&VM_TOOLS);
        assert!(tools.all(|tool| tool.packages.iter().any(|list| !list.is_empty())));
    }

    #[test]
    fn a_file_that_is_no_program_is_found_by_its_path() {
        let tool = |name| Tool { name, why: "", probe: None, packages: &[] };
        assert_eq!(tool("/etc/passwd").find(), Some("/etc/passwd".into()));
        assert_eq!(tool("/etc/no-such-file").find(), None);
    }

    #[test]
    fn the_rust_that_runs_the_tests_has_no_made_up_component() {
        assert_eq!(component("cargo-shunt-no-such-program"), None);
    }
}
