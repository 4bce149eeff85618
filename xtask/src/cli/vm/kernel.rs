//! Debian's cloud kernels, and the cache of fetched ones.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use clap::ValueEnum;
use xtask::workspace;

use super::apt::Apt;
use super::{cache, modules};
use crate::cli::progress::Progress;
use crate::cli::release::Target;

/// A kernel to boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kernel {
    /// Debian 11.
    #[value(name = "5.10")]
    V5_10,
    /// Debian 12.
    #[value(name = "6.1")]
    V6_1,
    /// Debian 13.
    #[value(name = "6.12")]
    V6_12,
    /// The newest that Debian ships.
    #[value(name = "latest")]
    Latest,
}

/// The source of packages.
pub(crate) const MIRROR: &str = "http://deb.debian.org/debian";
/// The archive has packages that the mirrors no longer have. The first one is tried again, because
/// it can fail for a moment.
const MIRRORS: [&str; 3] = [MIRROR, "http://archive.debian.org/debian", MIRROR];

/// A kernel in the cache.
#[derive(Debug)]
pub(crate) struct Fetched {
    /// The compressed kernel.
    pub(crate) vmlinuz: PathBuf,
    /// An archive with its modules.
    pub(crate) modules: PathBuf,
    /// Its release, as `uname -r` prints it.
    pub(crate) release: String,
}

impl Kernel {
    /// Returns the name on the command line, the names of its steps in tests, one for each part,
    /// and Debian's suite.
    pub(crate) fn names(self) -> [&'static str; 4] {
        match self {
            Self::V5_10 => ["5.10", "kernel 5.10", "kernel 5.10 cases", "bullseye"],
            Self::V6_1 => ["6.1", "kernel 6.1", "kernel 6.1 cases", "bookworm"],
            Self::V6_12 => ["6.12", "kernel 6.12", "kernel 6.12 cases", "trixie"],
            Self::Latest => ["latest", "kernel latest", "kernel latest cases", "sid"],
        }
    }

    /// Returns the sources for apt.
    fn sources(self, mirror: &str) -> Vec<String> {
        let [.., suite] = self.names();
        if self == Self::Latest { vec![format!("{mirror} {suite} main")] } else { stable(mirror, suite) }
    }

    fn is(self, release: &str) -> bool {
        self == Self::Latest || release.starts_with(&format!("{}.", self.names()[0]))
    }

    /// Returns the CPU that qemu emulates for amd64.
    ///
    /// qemu 7.2 emulates cmpxchg16b incorrectly. Kernels whose memory allocator uses it (6.12 does,
    /// if the CPU has it) soon crash. Newer kernels use it rarely, but need it for the memory of
    /// socket storage (`kmalloc_nolock`).
    ///
    /// Without erms and fsrm, kernels copy memory by words. With them, they copy by bytes, and qemu
    /// emulates one byte at a time. That took a third of the verifier's time.
    pub(crate) fn cpu(self) -> &'static str {
        if self == Self::Latest { "max,-erms,-fsrm" } else { "max,-cx16,-erms,-fsrm" }
    }

    /// Returns the kernel from the cache, or fetches it from Debian.
    pub(crate) fn fetch(self, arch: Target) -> Result<Fetched> {
        let [name, step, _, suite] = self.names();
        let _lock = cache::lock()?;
        let folder = cache::folder(&format!("kernel-{name}"), arch);
        if let Some(fetched) = Fetched::read(&folder) {
            return Ok(fetched);
        }
        let mut progress = Progress::start(&format!("fetch {step} of Debian {suite} for {}", arch.name()));
        let fetched = self.fetch_into(arch, &folder, &mut |line| progress.line(line));
        progress.end(fetched.as_ref().map_or("FAILED", |fetched| &fetched.release));
        fetched.with_context(|| cache::cannot_fetch(step, &folder))
    }

    fn fetch_into(self, arch: Target, folder: &Path, each: &mut dyn FnMut(&str)) -> Result<Fetched> {
        let mut failures = Vec::new();
        for mirror in MIRRORS {
            // Packages of two mirrors must not mix.
            let work =
                tempfile::tempdir_in(workspace::vm()).context("cannot create a folder to unpack in")?;
            let unpacked = work.path().join("unpacked");
            let fetched = Apt::prepare(work.path(), &self.sources(mirror), arch)
                .and_then(|apt| apt.unpack_kernel(&unpacked, each))
                .and_then(|()| self.keep(&unpacked, &work.path().join("kept"), each));
            match fetched {
                Ok(()) => {
                    cache::keep(&work.path().join("kept"), folder)?;
                    return Fetched::read(folder).context("the fetched kernel is incomplete");
                }
                Err(error) => failures.push(format!("{mirror}: {error:#}")),
            }
        }
        bail!("{}", failures.join("\n"))
    }

    /// Copies what a guest needs from the unpacked packages.
    fn keep(self, unpacked: &Path, kept: &Path, each: &mut dyn FnMut(&str)) -> Result<()> {
        fs::create_dir_all(kept).context("cannot create a folder")?;
        let (release, tree) = modules::find(unpacked)?;
        ensure!(self.is(&release), "its newest cloud kernel is {release}");
        let places = [unpacked.join(format!("boot/vmlinuz-{release}")), tree.join("vmlinuz")];
        let vmlinuz = places.iter().find(|path| path.is_file());
        let vmlinuz = vmlinuz.with_context(|| format!("the packages of {release} hold no vmlinuz"))?;
        each(&format!("modules of {release}"));
        modules::pack(unpacked, &tree, &release, &kept.join("modules.cpio"))?;
        fs::copy(vmlinuz, kept.join("vmlinuz")).context("cannot copy vmlinuz")?;
        fs::write(kept.join("release"), &release).context("cannot write the release")
    }
}

/// Returns the sources of a stable release for apt. It gets new kernels as security updates.
pub(crate) fn stable(mirror: &str, suite: &str) -> Vec<String> {
    vec![format!("{mirror} {suite} main"), format!("{mirror}-security {suite}-security main")]
}

impl Fetched {
    fn read(folder: &Path) -> Option<Self> {
        let release = fs::read_to_string(folder.join("release")).ok()?;
        let (vmlinuz, modules) = (folder.join("vmlinuz"), folder.join("modules.cpio"));
        (vmlinuz.is_file() && modules.is_file()).then_some(Self { vmlinuz, modules, release })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_is_recognised_by_its_release() {
        assert!(Kernel::V5_10.is("5.10.0-46-cloud-amd64"));
        assert!(!Kernel::V6_1.is("6.12.94+deb13-cloud-amd64"));
        assert!(Kernel::Latest.is("7.2.13+deb14-cloud-amd64"));
    }

    #[test]
    fn command_line_names_are_the_displayed_names() {
        for kernel in Kernel::value_variants() {
            assert_eq!(Kernel::from_str(kernel.names()[0], false).as_ref(), Ok(kernel));
        }
    }

    #[test]
    fn partly_fetched_kernel_is_ignored() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("release"), "6.1.0-50-cloud-amd64").unwrap();
        assert!(Fetched::read(folder.path()).is_none());
    }
}
