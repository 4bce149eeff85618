//! The programs that demo and tests run, except the BPF toolchain.

use std::path::PathBuf;

use xtask::run::Run;
use xtask::search;

/// A program, and the packages that contain it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Tool {
    pub(crate) name: &'static str,
    /// What it is used for.
    pub(crate) why: &'static str,
    /// An argument with which it only succeeds: Ubuntu's bpftool is a script that may not find the
    /// real program. `None` for a file that is no program. Its name is its path.
    probe: Option<&'static str>,
    /// Debian packages that contain it. The first list whose packages all exist is installed.
    pub(crate) packages: &'static [&'static [&'static str]],
}

/// The tools of the demo. Every command that runs shunt needs them.
pub(crate) const TOOLS: [Tool; 4] = [
    tool(
        "bpftool",
        "the demo shows the BPF maps with it",
        "version",
        &[&["bpftool"], &["linux-tools-common", "linux-tools-generic"]],
    ),
    tool(
        "nft",
        "shunt writes its netfilter rules with it, and tests inspect them",
        "--version",
        &[&["nftables"]],
    ),
    tool("iptables", "shunt uses it if there is no nft, and tests try both", "--version", &[&["iptables"]]),
    tool("ip", "conformance cases create their network with it", "-V", &[&["iproute2"]]),
];

/// The other tools of conformance cases, benchmarks and scenarios.
pub(crate) const WORLD_TOOLS: [Tool; 5] = [
    tool("ipset", "tests create the sets that kube-proxy leaves behind", "--version", &[&["ipset"]]),
    tool("strace", "tests count system calls with it", "--version", &[&["strace"]]),
    tool(
        "conntrack",
        "a conformance case removes connections from conntrack",
        "--version",
        &[&["conntrack"]],
    ),
    tool("ethtool", "conformance cases switch offloads of links with it", "--version", &[&["ethtool"]]),
    // No argument makes it succeed for all users.
    Tool {
        name: "/usr/sbin/xdp-loader",
        why: "a conformance case attaches XDP programs of others with it",
        probe: None,
        packages: &[&["xdp-tools"]],
    },
];

/// The keys that Debian signs its packages with, including those of other releases.
pub(crate) const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// The emulator of virtual machines.
pub(crate) const QEMU: Tool =
    tool("qemu-system-x86_64", "virtual machines run in it", "--version", &[&["qemu-system-x86"]]);

const DEPMOD: Tool = tool("depmod", "it creates the table of a kernel's modules", "--version", &[&["kmod"]]);
const DPKG: Tool = tool("dpkg", "it unpacks packages, which apt fetches", "--version", &[&["dpkg"]]);
const KEYS: Tool = Tool {
    name: KEYRING,
    why: "it verifies that packages are Debian's",
    probe: None,
    packages: &[&["debian-archive-keyring"]],
};

/// The tools of virtual machines for amd64: qemu, the tools that are copied into guests, and those
/// that fetch kernels.
pub(crate) const VM_TOOLS: [Tool; 10] = [
    QEMU,
    tool("busybox", "it provides most programs of guests", "true", &[&["busybox-static"]]),
    tool("bash", "it is the guests' shell", "--version", &[&["bash"]]),
    DEPMOD,
    tool("kmod", "guests load modules with it", "--version", &[&["kmod"]]),
    tool("ip", "it is copied into guests", "-V", &[&["iproute2"]]),
    tool("apparmor_parser", "guests load AppArmor profiles with it", "--version", &[&["apparmor"]]),
    tool("setpriv", "guests drop capabilities with it", "--version", &[&["util-linux"]]),
    DPKG,
    KEYS,
];

/// The emulator of virtual machines for arm64.
pub(crate) const QEMU_ARM64: Tool =
    tool("qemu-system-aarch64", "virtual machines for arm64 run in it", "--version", &[&["qemu-system-arm"]]);

/// The tools of virtual machines for arm64, whose programs come from packages.
pub(crate) const VM_ARM64_TOOLS: [Tool; 4] = [QEMU_ARM64, DEPMOD, DPKG, KEYS];

/// The tools of releases, which take files from packages.
pub(crate) const RELEASE_TOOLS: [Tool; 2] = [DPKG, KEYS];

/// The C compiler of this machine.
pub(crate) const C_COMPILER: Tool =
    tool("cc", "shunt contains C, and is linked with it", "--version", &[&["gcc", "libc6-dev"]]);
/// The C compilers for other architectures. Debian's need a library for them in another package.
pub(crate) const C_COMPILER_AMD64: Tool = tool(
    "x86_64-linux-gnu-gcc",
    "shunt for amd64 contains C, and is linked with it",
    "--version",
    &[&["gcc-x86-64-linux-gnu", "libc6-dev-amd64-cross"]],
);
pub(crate) const C_COMPILER_ARM64: Tool = tool(
    "aarch64-linux-gnu-gcc",
    "shunt for arm64 contains C, and is linked with it",
    "--version",
    &[&["gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross"]],
);

/// The tools of fuzz targets.
pub(crate) const FUZZ_TOOLS: [Tool; 1] =
    [tool("c++", "fuzz targets contain libFuzzer, which is C++", "--version", &[&["g++"]])];

/// The tools that only `cargo xtask test` runs.
pub(crate) const TEST_TOOLS: [Tool; 8] = [
    tool(
        "promtool",
        "tests check metrics and alerts with it, and run Prometheus",
        "--version",
        &[&["prometheus"]],
    ),
    tool("tshark", "tests read captured packets with it", "--version", &[&["tshark"]]),
    tool("chromium", "a test opens shunt's pages in it", "--version", &[&["chromium"]]),
    tool("git", "a release names its commit", "--version", &[&["git"]]),
    tool("capsh", "scenarios drop capabilities with it", "--modes", &[&["libcap2-bin"]]),
    tool("curl", "a test runs the commands of the documents", "--version", &[&["curl"]]),
    tool("sysctl", "a test runs the commands of the documents", "--version", &[&["procps"]]),
    tool("zstd", "a test runs the commands of the documents", "--version", &[&["zstd"]]),
];

/// Tools that setup does not install, because not every Debian has a current package of them.
/// Tests that need one are left out where it is missing, and the summary of `cargo xtask test`
/// says so.
pub(crate) const OPTIONAL_TOOLS: [Tool; 2] = [
    tool(
        "helm",
        "tests compare its rendering of the chart with their own, and lint the chart with it",
        "version",
        &[],
    ),
    tool("kubectl", "tests build the base, the overlay and the component of kustomize with it", "help", &[]),
];

/// The tools that run the image of a release.
pub(crate) const IMAGE_TOOLS: [Tool; 2] = [
    tool("containerd", "a test runs the image in it", "--version", &[&["containerd"]]),
    tool("runc", "containerd starts containers with it", "--version", &[&["runc"]]),
];

const fn tool(
    name: &'static str,
    why: &'static str,
    probe: &'static str,
    packages: &'static [&'static [&'static str]],
) -> Tool {
    Tool { name, why, probe: Some(probe), packages }
}

/// The compiler that checks the lints of clippy.
pub(crate) const LINTER: &str = "clippy-driver";

/// Components of the Rust toolchain that a minimal installation lacks: rustup's name and a program
/// of each.
pub(crate) const COMPONENTS: [(&str, &str); 2] = [("rustfmt", "cargo-fmt"), ("clippy", LINTER)];

impl Tool {
    /// Describes a missing tool.
    pub(crate) fn explain(&self) -> String {
        format!("{} is missing or does not run: {}", self.name, self.why)
    }

    /// Returns the program if it exists and runs.
    pub(crate) fn find(&self) -> Option<PathBuf> {
        let Some(probe) = self.probe else {
            return Some(self.name.into()).filter(|path: &PathBuf| path.is_file());
        };
        let path = search::program(self.name)?;
        Run::new(&path).arg(probe).read().is_ok().then_some(path)
    }
}

/// Returns the program of a component if it is installed.
pub(crate) fn component(program: &str) -> Option<PathBuf> {
    Some(component_path(program)).filter(|path| search::is_executable(path))
}

/// Returns where the program of a component is, or where it will be after its installation: beside
/// cargo, where rustup installs it, or in PATH.
pub(crate) fn component_path(program: &str) -> PathBuf {
    let cargo = search::cargo();
    if cargo.parent().is_some_and(|bin| bin.join("rustc").is_file()) {
        // rustup's proxy is in PATH even if the component is not installed.
        return cargo.with_file_name(program);
    }
    search::program(program).unwrap_or_else(|| program.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tool_has_a_package() {
        let c_compilers = [C_COMPILER, C_COMPILER_AMD64, C_COMPILER_ARM64];
        let worlds = TOOLS.iter().chain(&WORLD_TOOLS).chain(&VM_TOOLS).chain(&VM_ARM64_TOOLS);
        let others = FUZZ_TOOLS.iter().chain(&TEST_TOOLS).chain(&IMAGE_TOOLS).chain(&c_compilers);
        let mut tools = worlds.chain(others);
        assert!(RELEASE_TOOLS.iter().all(|tool| VM_TOOLS.contains(tool)));
        assert!(tools.all(|tool| tool.packages.iter().any(|list| !list.is_empty())));
    }

    #[test]
    fn file_that_is_no_program_is_found_by_its_path() {
        let tool = |name| Tool { name, why: "", probe: None, packages: &[] };
        assert_eq!(tool("/etc/passwd").find(), Some("/etc/passwd".into()));
        assert_eq!(tool("/etc/no-such-file").find(), None);
    }

    #[test]
    fn made_up_component_is_not_found() {
        assert_eq!(component("cargo-shunt-no-such-program"), None);
    }
}
