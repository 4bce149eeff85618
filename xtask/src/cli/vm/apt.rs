//! Fetches packages with apt: of a kernel, or of another architecture. apt uses a state of its own,
//! so the machine's lists and packages do not change.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use xtask::run::Run;

use crate::cli::release::Target;
use crate::cli::setup::{KEYRING, depends, unpack_all};

const LIMIT: Duration = Duration::from_mins(15);
/// Prefixes of the packages of a kernel: one package up to 6.12, several since.
const PARTS: [&str; 4] = ["linux-image-", "linux-binary-", "linux-modules-", "linux-base-"];

/// apt with a state of its own.
pub(crate) struct Apt {
    folder: PathBuf,
    arch: Target,
}

impl Apt {
    /// Creates the state in a folder, for packages of an architecture.
    pub(crate) fn prepare(folder: &Path, sources: &[String], arch: Target) -> Result<Self> {
        for name in ["lists/partial", "cache/archives/partial", "empty", "packages"] {
            fs::create_dir_all(folder.join(name)).context("cannot create a folder for apt")?;
        }
        let options = format!("signed-by={KEYRING} arch={} lang=none target=Packages", arch.name());
        let line = |source| format!("deb [{options}] {source}\n");
        let files = [
            ("status", String::new()),
            ("sources.list", sources.iter().map(line).collect()),
            ("apt.conf", configuration(folder, arch)),
        ];
        for (name, text) in files {
            fs::write(folder.join(name), text).with_context(|| format!("cannot write {name} for apt"))?;
        }
        Ok(Self { folder: folder.to_owned(), arch })
    }

    /// Fetches the newest kernel and unpacks it. Nothing is installed.
    pub(crate) fn unpack_kernel(&self, to: &Path, each: &mut dyn FnMut(&str)) -> Result<()> {
        self.run("apt-get").arg("update").check(each)?;
        let names = self.kernel_packages()?;
        self.run("apt-get").arg("download").args(names).check(each)?;
        unpack_all(&self.packages(), to, each)
    }

    /// Fetches these packages and all that they need, and unpacks them. Nothing is installed.
    pub(crate) fn unpack(&self, names: &[&str], to: &Path, each: &mut dyn FnMut(&str)) -> Result<()> {
        self.run("apt-get").arg("update").check(each)?;
        let install = ["install", "--yes", "--no-install-recommends", "--download-only"];
        // Without it apt asks for root, to lock dpkg's files.
        let install = self.run("apt-get").args(install).arg("-oDebug::NoLocking=true");
        install.args(names).check(each)?;
        unpack_all(&self.folder.join("cache/archives"), to, each)
    }

    fn kernel_packages(&self) -> Result<Vec<String>> {
        // Depends on the newest kernel.
        let newest = format!("linux-image-cloud-{}", self.arch.name());
        let text = depends(self.run("apt-cache"), &newest).read()?;
        let parts = text.lines().filter(|name| is_part(name, self.arch));
        let names: Vec<String> = parts.map(str::to_owned).collect();
        ensure!(!names.is_empty(), "{newest} depends on no kernel");
        Ok(names)
    }

    fn packages(&self) -> PathBuf {
        self.folder.join("packages")
    }

    /// Returns a program of apt that uses this state.
    pub(crate) fn run(&self, program: &str) -> Run {
        // Packages are downloaded into the current folder.
        let run = Run::new(program).dir(self.packages()).env("LC_ALL", "C").limit(LIMIT);
        run.arg("--config-file").arg(self.folder.join("apt.conf"))
    }
}

/// Returns apt's configuration. apt reads it after the machine's own, so the machine's proxies stay
/// in effect.
fn configuration(folder: &Path, arch: Target) -> String {
    let (folder, arch) = (folder.display(), arch.name());
    format!(
        "#clear APT::Update;
#clear DPkg::Post-Invoke;
Dir::State \"{folder}\";
Dir::State::lists \"{folder}/lists\";
Dir::State::status \"{folder}/status\";
Dir::Cache \"{folder}/cache\";
Dir::Etc::sourcelist \"{folder}/sources.list\";
Dir::Etc::sourceparts \"{folder}/empty\";
Dir::Etc::preferences \"{folder}/none\";
Dir::Etc::preferencesparts \"{folder}/empty\";
APT::Architecture \"{arch}\";
APT::Architectures {{ \"{arch}\"; }};
APT::Default-Release \"\";
APT::Sandbox::User \"root\";
APT::Update::Error-Mode \"any\";
Acquire::Retries \"5\";
// Lists of old releases are no longer signed again.
Acquire::Check-Valid-Until \"false\";
"
    )
}

/// Returns true if a package contains a part of a kernel of one version.
fn is_part(name: &str, arch: Target) -> bool {
    let suffix = format!("-cloud-{}", arch.name());
    let version = |prefix| name.strip_prefix(prefix)?.strip_suffix(&suffix);
    PARTS.iter().filter_map(version).any(|version: &str| version.starts_with(|c: char| c.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_packages_are_recognised_by_name() {
        let text = "linux-image-cloud-amd64\n  Depends: linux-base-cloud-amd64\nlinux-base-cloud-amd64\n\
                    linux-image-7.2.13+deb14-cloud-amd64\n  Depends: linux-modules-7.2.13+deb14-cloud-amd64\nlinux-base\n\
                    linux-modules-7.2.13+deb14-cloud-amd64\nlinux-binary-unsigned-7.2.13+deb14-cloud-amd64\nkmod\n";
        let parts: Vec<&str> = text.lines().filter(|name| is_part(name, Target::Amd64)).collect();
        assert_eq!(parts, ["linux-image-7.2.13+deb14-cloud-amd64", "linux-modules-7.2.13+deb14-cloud-amd64"]);
        let older = "linux-image-5.10.0-46-cloud-arm64";
        assert!(is_part(older, Target::Arm64) && !is_part(older, Target::Amd64));
    }

    #[test]
    fn lists_and_packages_of_the_machine_do_not_change() {
        let folder = tempfile::tempdir().unwrap();
        let apt = Apt::prepare(folder.path(), &["http://deb.example/debian sid main".into()], Target::Arm64)
            .unwrap();
        let shown = apt.run("apt-get").to_string();
        assert!(shown.contains(&format!("--config-file {}", folder.path().display())), "{shown}");
        let sources = fs::read_to_string(folder.path().join("sources.list")).unwrap();
        assert!(
            sources.contains("signed-by=")
                && sources.contains("arch=arm64")
                && sources.ends_with("] http://deb.example/debian sid main\n")
        );
    }
}
