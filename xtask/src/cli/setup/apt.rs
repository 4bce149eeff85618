//! What apt knows and does. Reading it needs no privileges.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, Result};
use nix::unistd::Uid;
use xtask::run::Run;
use xtask::search;

use crate::cli::progress::Progress;

const LIMIT: Duration = Duration::from_mins(20);

/// A package as `apt-cache policy` tells it.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Package {
    /// The installed version.
    pub(crate) installed: Option<String>,
    /// The version that would be installed.
    pub(crate) candidate: Option<String>,
}

/// Packages by name; unknown ones are not in it.
pub(crate) type Packages = BTreeMap<String, Package>;

/// Whether this is a machine with apt.
pub(crate) fn is_there() -> bool {
    search::program("apt-get").is_some() && search::program("apt-cache").is_some()
}

/// Whether we may install.
pub(crate) fn may_install() -> bool {
    is_there() && Uid::effective().is_root()
}

/// Asks apt for the state of `names`.
pub(crate) fn policy<'a>(names: impl IntoIterator<Item = &'a str>) -> Result<Packages> {
    let text = apt("apt-cache").arg("policy").args(names).read().context("cannot ask apt for packages")?;
    Ok(parse_policy(&text))
}

/// The LLVM major that installing `package` brings along, told by its dependency on libllvmN.
pub(crate) fn llvm_of(package: &str) -> Option<u32> {
    let only_depends = ["recommends", "suggests", "conflicts", "breaks", "replaces", "enhances"];
    let text = apt("apt-cache")
        .args(["depends", "--recurse"])
        .args(only_depends.iter().map(|kind| format!("--no-{kind}")))
        .arg(package)
        .read()
        .ok()?;
    parse_llvm(&text)
}

/// Fetches the lists of packages.
pub(crate) fn update() -> Result<()> {
    let mut progress = Progress::start("apt-get update");
    let done = apt("apt-get").arg("update").limit(LIMIT).check(&mut |line| progress.line(line));
    progress.end(if done.is_ok() { "done" } else { "FAILED" });
    done.map(drop)
}

/// Installs packages; removes nothing (rustc-web and rustc exclude each other, for instance).
pub(crate) fn install(names: &[String]) -> Result<()> {
    let mut progress = Progress::start("apt-get install");
    progress.keep(&format!("  {}", names.join(" ")));
    let done = apt("apt-get")
        .args(["install", "--yes", "--no-install-recommends", "--no-remove", "-oDPkg::Lock::Timeout=300"])
        .args(names)
        .limit(LIMIT)
        .check(&mut |line| progress.line(line));
    progress.end(if done.is_ok() { "done" } else { "FAILED" });
    done.map(drop)
}

/// The command for a person to type.
pub(crate) fn command(names: &[String]) -> String {
    format!("apt-get install --no-install-recommends {}", names.join(" "))
}

fn apt(program: &str) -> Run {
    // The output is read, so it must not be translated, and no package may ask anything.
    Run::new(program).env("LC_ALL", "C").env("DEBIAN_FRONTEND", "noninteractive")
}

/// Reads the output of `apt-cache policy NAME...`.
fn parse_policy(text: &str) -> Packages {
    let mut packages = Packages::new();
    let mut current: Option<&mut Package> = None;
    for line in text.lines() {
        if let Some(name) = line.strip_suffix(':').filter(|name| !name.starts_with(' ')) {
            current = Some(packages.entry(name.to_owned()).or_default());
        } else if let Some(package) = &mut current {
            if let Some(version) = line.strip_prefix("  Installed: ") {
                package.installed = version_or_none(version);
            } else if let Some(version) = line.strip_prefix("  Candidate: ") {
                package.candidate = version_or_none(version);
            }
        }
    }
    packages
}

fn version_or_none(version: &str) -> Option<String> {
    Some(version.trim().to_owned()).filter(|version| version != "(none)")
}

/// The highest N of the packages libllvmN named in the output of `apt-cache depends`.
fn parse_llvm(text: &str) -> Option<u32> {
    let names = text.lines().filter_map(|line| line.trim().strip_prefix("Depends: libllvm"));
    names.filter_map(|number| number.parse().ok()).max()
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICY: &str = "rustc-web:
  Installed: (none)
  Candidate: 1.96.0+dfsg1-1~deb12u2
  Version table:
     1.96.0+dfsg1-1~deb12u2 500
        500 http://deb.debian.org/debian-security bookworm-security/main amd64 Packages
     1.85.0+dfsg3-1~deb12u3 500
        500 http://deb.debian.org/debian bookworm/main amd64 Packages
bpftool:
  Installed: 7.1.0+6.1.192-2
  Candidate: 7.1.0+6.1.192-2
  Version table:
 *** 7.1.0+6.1.192-2 500
        100 /var/lib/dpkg/status
linux-tools-common:
  Installed: (none)
  Candidate: (none)
  Version table:
";

    #[test]
    fn policy_tells_installed_and_candidate_versions() {
        let packages = parse_policy(POLICY);
        assert_eq!(packages["rustc-web"].installed, None);
        assert_eq!(packages["rustc-web"].candidate.as_deref(), Some("1.96.0+dfsg1-1~deb12u2"));
        assert_eq!(packages["bpftool"].installed.as_deref(), Some("7.1.0+6.1.192-2"));
        assert_eq!(packages["linux-tools-common"], Package::default());
        assert_eq!(packages.len(), 3);
    }

    #[test]
    fn policy_of_nothing_known_is_empty() {
        assert!(parse_policy("").is_empty());
    }

    #[test]
    fn dependencies_tell_the_llvm() {
        let text = "rustc-web\n  Depends: libc6\n  Depends: libstd-rust-web-dev\n\
                    libstd-rust-web-1.96\n  Depends: libc6\n  Depends: libllvm22\nlibllvm22\n  Depends: libedit2\n";
        assert_eq!(parse_llvm(text), Some(22));
    }

    #[test]
    fn dependencies_without_llvm_tell_none() {
        assert_eq!(parse_llvm("rustc\n  Depends: libc6\n"), None);
    }
}
