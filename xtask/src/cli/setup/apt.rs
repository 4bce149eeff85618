//! Asks apt about packages, and installs them. Reading needs no privileges.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result};
use nix::unistd::Uid;
use xtask::run::Run;
use xtask::search;

use crate::cli::progress::Progress;

const LIMIT: Duration = Duration::from_mins(20);
/// How often the lists are fetched at most, and the pause between.
const TRIES: u32 = 3;
const PAUSE: Duration = Duration::from_secs(20);

/// A package as `apt-cache policy` prints it.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Package {
    /// The installed version.
    pub(crate) installed: Option<String>,
    /// The version that would be installed.
    pub(crate) candidate: Option<String>,
}

/// Packages by name. Unknown packages are left out.
pub(crate) type Packages = BTreeMap<String, Package>;

/// Returns true if this machine has apt.
pub(crate) fn is_there() -> bool {
    search::program("apt-get").is_some() && search::program("apt-cache").is_some()
}

/// Returns true if this user may install packages.
pub(crate) fn may_install() -> bool {
    is_there() && Uid::effective().is_root()
}

/// Asks apt for the state of `names`.
pub(crate) fn policy<'a>(names: impl IntoIterator<Item = &'a str>) -> Result<Packages> {
    let text = apt("apt-cache").arg("policy").args(names).read().context("cannot ask apt for packages")?;
    Ok(parse_policy(&text))
}

/// Returns the LLVM major version that `package` brings along, from its dependency on libllvmN.
pub(crate) fn llvm_of(package: &str) -> Option<u32> {
    parse_llvm(&depends(apt("apt-cache"), package).read().ok()?)
}

/// Adds arguments to `apt-cache`: it lists everything that `package` depends on, also indirectly.
pub(crate) fn depends(apt_cache: Run, package: &str) -> Run {
    let others = ["recommends", "suggests", "conflicts", "breaks", "replaces", "enhances"];
    let others = others.iter().map(|kind| format!("--no-{kind}"));
    apt_cache.args(["depends", "--recurse"]).args(others).arg(package)
}

/// Fetches the lists of packages. apt fails at once if another program has locked them, such as the
/// daily update of a machine that has just started. A mirror can fail for a moment. So it is tried
/// several times.
pub(crate) fn update() -> Result<()> {
    let fetch = || {
        let options = ["-oAPT::Update::Error-Mode=any", "-oAcquire::Retries=5"];
        Progress::run("apt-get update", apt("apt-get").args(options).arg("update").limit(LIMIT))
    };
    for _ in 1..TRIES {
        let Err(error) = fetch() else { return Ok(()) };
        eprintln!("it is tried again: {error:#}");
        thread::sleep(PAUSE);
    }
    fetch()
}

/// Installs packages; removes nothing (rustc-web and rustc exclude each other, for instance).
pub(crate) fn install(names: &[String]) -> Result<()> {
    eprintln!("packages: {}", names.join(" "));
    Progress::run("apt-get install", install_with(&["--no-remove", "-oDPkg::Lock::Timeout=300"], names))
}

/// Returns the packages that apt would remove to install these. The list is empty if apt cannot
/// install them at all.
pub(crate) fn would_remove(names: &[String]) -> Vec<String> {
    let plan = install_with(&["--simulate"], names).read().unwrap_or_default();
    parse_removals(&plan)
}

/// Downloads packages, and those they need that a machine with this `status` of dpkg lacks.
pub(crate) fn download(names: &[String], status: &Path, to: &Path, each: &mut dyn FnMut(&str)) -> Result<()> {
    fs::create_dir_all(to.join("partial")).context("cannot make a folder for packages")?;
    let own = [
        format!("-oDir::State::status={}", status.display()),
        format!("-oDir::Cache::archives={}", to.display()),
        // apt's caches describe the machine as it is. Without them nothing is changed, and no lock
        // is needed.
        "-oDir::Cache::pkgcache=".into(),
        "-oDir::Cache::srcpkgcache=".into(),
        "-oDebug::NoLocking=true".into(),
        "-oAPT::Sandbox::User=root".into(),
        "--download-only".into(),
    ];
    let own: Vec<&str> = own.iter().map(String::as_str).collect();
    install_with(&own, names).check(each).map(drop)
}

/// Unpacks every package in a folder. Nothing is installed.
pub(crate) fn unpack_all(folder: &Path, to: &Path, each: &mut dyn FnMut(&str)) -> Result<()> {
    for entry in fs::read_dir(folder).context("cannot list the packages")? {
        let package = entry.context("cannot list the packages")?.path();
        if package.extension().is_some_and(|extension| extension == "deb") {
            Run::new("dpkg").arg("--extract").arg(package).arg(to).limit(LIMIT).check(each)?;
        }
    }
    Ok(())
}

fn install_with(how: &[&str], names: &[String]) -> Run {
    let run = apt("apt-get").args(["install", "--yes", "--no-install-recommends"]);
    run.args(how).args(names).limit(LIMIT)
}

fn apt(program: &str) -> Run {
    // The output is parsed, so it must not be translated. No package may ask questions.
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

/// Returns the packages that a simulated `apt-get install` removes: `Remv NAME [VERSION]`.
fn parse_removals(plan: &str) -> Vec<String> {
    let removed = plan.lines().filter_map(|line| line.strip_prefix("Remv ")?.split(' ').next());
    removed.map(str::to_owned).collect()
}

fn version_or_none(version: &str) -> Option<String> {
    Some(version.trim().to_owned()).filter(|version| version != "(none)")
}

/// Returns the highest N of the packages libllvmN in the output of `apt-cache depends`.
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
    fn policy_shows_installed_and_candidate_versions() {
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
    fn simulation_shows_removed_packages() {
        let plan = "The following packages will be REMOVED:\n  qemu-utils\n\
                    Remv qemu-utils [1:10.0.2+ds-2]\nInst busybox-static (1:1.35.0-4 Debian [amd64])\n";
        assert_eq!(parse_removals(plan), ["qemu-utils"]);
        assert!(parse_removals("Inst kmod (30)\nConf kmod (30)\n").is_empty());
    }

    #[test]
    fn dependencies_show_the_llvm_version() {
        let text = "rustc-web\n  Depends: libc6\n  Depends: libstd-rust-web-dev\n\
                    libstd-rust-web-1.96\n  Depends: libc6\n  Depends: libllvm22\nlibllvm22\n  Depends: libedit2\n";
        assert_eq!(parse_llvm(text), Some(22));
    }

    #[test]
    fn dependencies_without_llvm_show_no_version() {
        assert_eq!(parse_llvm("rustc\n  Depends: libc6\n"), None);
    }
}
