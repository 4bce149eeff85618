//! `cargo xtask release`: makes everything that a release consists of, and publishes nothing.

mod artefacts;
pub(crate) mod binaries;
mod compiler;
mod crates;
mod deploy;
mod digest;
mod embedded;
mod image;
mod inputs;
mod linked;
mod lock;
mod notes;
mod oci;
mod packages;
mod provenance;
mod rootfs;
mod sbom;
mod settings;
mod source;
mod target;
mod tree;
mod trial;
mod verify;

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use clap::{Args, ValueEnum as _};
use xtask::workspace;

use self::artefacts::CHECKSUMS;
use self::image::Layers;
use self::lock::Lock;
use self::settings::Settings;
pub(crate) use self::target::Target;
use self::tree::{Node, Tree};
use super::progress::Progress;
use super::setup;

/// Arguments of `cargo xtask release`.
#[derive(Debug, Clone, Args)]
pub(crate) struct Release {
    /// The folder for the files of the release [default: target/release-VERSION].
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
    /// Only these architectures [default: all].
    #[arg(long, value_delimiter = ',')]
    target: Vec<Target>,
    /// Also with changes that are not committed. The provenance then says so.
    #[arg(long)]
    allow_changes: bool,
    #[command(flatten)]
    instead: Instead,
}

/// What to do instead of writing a release.
#[derive(Debug, Clone, Args)]
struct Instead {
    /// Make the release twice, in clones in different folders, and compare every byte.
    #[arg(long, conflicts_with_all = ["out", "allow_changes"])]
    verify: bool,
    /// Make no release. Build the image of this machine's architecture, and run it in a private
    /// containerd as the `DaemonSet` would: it serves a Service in the modes ebpf, nftables and
    /// iptables. Needs root.
    #[arg(long = "try", exclusive = true)]
    trial: bool,
    /// Make no release. Pin the newest versions of the image's Debian packages in
    /// deploy/image/packages.json.
    #[arg(long, exclusive = true)]
    update_packages: bool,
}

/// Does what the arguments ask for.
pub(crate) fn run(what: &Release) -> Result<()> {
    if what.instead.update_packages {
        return update_packages();
    }
    if what.instead.trial {
        return trial::run();
    }
    let targets = if what.target.is_empty() { Target::value_variants() } else { &what.target };
    // Before the builds, which take minutes.
    notes::check(&inputs::changelog()?, &Settings::read()?.version)?;
    if what.instead.verify {
        return verify::run(targets);
    }
    make(targets, what.out.as_deref(), what.allow_changes)
}

fn update_packages() -> Result<()> {
    let changes =
        Progress::during("update packages", |progress| Lock::update(&mut |line| progress.line(line)))?;
    for change in &changes {
        println!("{change}");
    }
    println!("{} changes in {}", changes.len(), Lock::path().display());
    Ok(())
}

fn make(targets: &[Target], out: Option<&Path>, allow_changes: bool) -> Result<()> {
    let settings = Settings::read()?;
    let default = || workspace::target().join(format!("release-{}", settings.version));
    let out = out.map_or_else(default, Path::to_owned);
    ensure_replaceable(&out)?;
    setup::ensure_release()?;
    let inputs = inputs::read(settings, targets, allow_changes, &binaries::build)?;
    let made = Progress::during("write the release", |_| artefacts::make(&inputs))?;
    if out.exists() {
        fs::remove_dir_all(&out).with_context(|| format!("cannot remove {}", out.display()))?;
    }
    write(&made.files, &out)?;
    for Layers { target, packages, shunt } in made.layers {
        let [packages, shunt] = [packages, shunt].map(megabytes);
        println!("image of {}: {packages} MB of packages, {shunt} MB of shunt", target.name());
    }
    println!("{}", out.display());
    Ok(())
}

fn megabytes(bytes: usize) -> String {
    format!("{}.{}", bytes / 1_000_000, bytes / 100_000 % 10)
}

/// Fails if a folder has other things than an earlier release.
fn ensure_replaceable(out: &Path) -> Result<()> {
    let is_empty = |folder: &Path| fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_none());
    ensure!(
        !out.exists() || out.join(CHECKSUMS).is_file() || is_empty(out),
        "{} is neither empty nor an earlier release: name another folder with --out",
        out.display()
    );
    Ok(())
}

/// Writes files below a folder.
fn write(files: &Tree, out: &Path) -> Result<()> {
    fs::create_dir_all(out).with_context(|| format!("cannot create {}", out.display()))?;
    for (path, node) in files.iter() {
        let path = out.join(path);
        let written = match node {
            Node::Folder(_) => fs::create_dir_all(&path),
            Node::Link(target) => std::os::unix::fs::symlink(target, &path),
            Node::File { mode, bytes } => fs::write(&path, bytes)
                .and_then(|()| fs::set_permissions(&path, Permissions::from_mode(*mode))),
        };
        written.with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}
