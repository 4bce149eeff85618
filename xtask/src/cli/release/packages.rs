//! Fetches the pinned Debian packages, verifies them, and unpacks them.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use xtask::run::Run;
use xtask::workspace;

use super::digest;
use super::lock::{Lock, Package};
use super::target::Target;

/// The bases of addresses of the archives. The mirror has the newest versions only; the snapshots
/// have every version.
const MIRROR: &str = "http://deb.debian.org";
const SNAPSHOTS: &str = "http://snapshot.debian.org/archive";
/// apt's program that downloads a file and verifies its digest. It uses the machine's proxies.
const HELPER: &str = "/usr/lib/apt/apt-helper";
const LIMIT: Duration = Duration::from_mins(5);

/// An unpacked package.
#[derive(Debug)]
pub(crate) struct Unpacked {
    /// The package.
    pub(crate) package: Package,
    /// The folder of its files.
    pub(crate) folder: PathBuf,
    /// Its description, in dpkg's format.
    pub(crate) control: String,
}

/// Unpacks the packages of an architecture, each into a folder of its own.
pub(crate) fn unpack(
    lock: &Lock,
    target: Target,
    to: &Path,
    each: &mut dyn FnMut(&str),
) -> Result<Vec<Unpacked>> {
    let mut unpacked = Vec::new();
    for package in lock.of(target)? {
        let archive = fetch(lock, package, &cache(), each)?;
        let folder = to.join(target.name()).join(&package.name);
        fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        Run::new("dpkg").arg("--extract").arg(&archive).arg(&folder).limit(LIMIT).check(each)?;
        let control = Run::new("dpkg-deb").arg("--field").arg(&archive).read()?;
        unpacked.push(Unpacked { package: package.clone(), folder, control });
    }
    Ok(unpacked)
}

/// Returns the folder of fetched packages.
fn cache() -> PathBuf {
    workspace::target().join("packages")
}

/// Returns the file of a package from the cache, or fetches it. Its digest is that of the lock.
fn fetch(lock: &Lock, package: &Package, cache: &Path, each: &mut dyn FnMut(&str)) -> Result<PathBuf> {
    fs::create_dir_all(cache).with_context(|| format!("cannot create {}", cache.display()))?;
    let name = package.path.rsplit('/').next().unwrap_or(&package.path);
    let path = cache.join(name);
    if path.exists() && digest::of_file(&path)? == package.sha256 {
        return Ok(path);
    }
    let mut failures = Vec::new();
    for address in addresses(lock, package) {
        let run = Run::new(HELPER).arg("-oAcquire::Retries=5").arg("download-file").arg(&address).arg(&path);
        match run.arg(format!("SHA256:{}", package.sha256)).limit(LIMIT).check(each) {
            Ok(_) => return verified(package, path),
            Err(error) => failures.push(format!("{error:#}")),
        }
    }
    bail!("cannot fetch {} {}:\n{}", package.name, package.version, failures.join("\n"))
}

/// Returns the addresses of a package, the nearest first. The mirror may no longer have it. The
/// snapshots refuse requests at times, so they are tried twice.
fn addresses(lock: &Lock, package: &Package) -> [String; 3] {
    let Package { archive, path, .. } = package;
    let snapshot = format!("{SNAPSHOTS}/{archive}/{}/{path}", lock.snapshot);
    [format!("{MIRROR}/{archive}/{path}"), snapshot.clone(), snapshot]
}

fn verified(package: &Package, path: PathBuf) -> Result<PathBuf> {
    let found = digest::of_file(&path)?;
    if found != package.sha256 {
        drop(fs::remove_file(&path));
        bail!(
            "{} has the SHA-256 {found}; {} pins {}",
            path.display(),
            Lock::path().display(),
            package.sha256
        );
    }
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(sha256: &str) -> Package {
        Package {
            name: "netbase".into(),
            version: "6.5".into(),
            source: "netbase".into(),
            archive: "debian".into(),
            path: "pool/main/n/netbase/netbase_6.5_all.deb".into(),
            sha256: sha256.into(),
        }
    }

    #[test]
    fn file_with_another_digest_is_refused_and_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("netbase_6.5_all.deb");
        fs::write(&path, "something else").unwrap();
        let error = verified(&package("00"), path.clone()).unwrap_err().to_string();
        assert!(error.contains("pins 00"), "{error}");
        assert!(!path.exists());
    }

    #[test]
    fn file_with_the_pinned_digest_is_not_fetched_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("netbase_6.5_all.deb");
        fs::write(&path, "the package").unwrap();
        let lock = Lock { release: "r".into(), snapshot: "s".into(), packages: [].into() };
        let package = package(&digest::sha256(b"the package"));
        assert_eq!(fetch(&lock, &package, folder.path(), &mut |_| ()).unwrap(), path);
    }

    #[test]
    fn snapshots_are_asked_when_the_mirror_has_newer_versions() {
        let lock = Lock { release: "r".into(), snapshot: "20261125T000000Z".into(), packages: [].into() };
        let [mirror, snapshot, again] = addresses(&lock, &package("00"));
        assert!(mirror.ends_with("/debian/pool/main/n/netbase/netbase_6.5_all.deb"), "{mirror}");
        assert!(snapshot.ends_with("/debian/20261125T000000Z/pool/main/n/netbase/netbase_6.5_all.deb"));
        assert_eq!(again, snapshot);
    }
}
