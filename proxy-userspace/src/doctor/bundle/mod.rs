//! Writes a bug report: an archive with what others need to find a fault, without secrets.

mod collect;
mod secrets;

use std::{
    fs::{File, OpenOptions},
    io::{self, Write as _, stdout},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use jiff::Timestamp;
use ruzstd::encoding::{CompressionLevel, compress_to_vec};

use self::collect::Collected;
use super::Report;
use crate::{
    kernel::command::Launcher,
    output_file::{self, is_standard_output},
    probe::Evaluation,
};

/// The folder in the archive.
const FOLDER: &str = "shunt-bundle";
/// Only the owner may read it.
const MODE: u32 = 0o600;
/// What the archive says about itself.
const README: &str = "\
A bug report of shunt. Look at it before you give it to others: it has the names and addresses of
Services, endpoints, clients and links of this node, and the firewall rules of all programs.

It has no tokens, private keys, passwords, kubeconfigs and no environment variables. Values that look
like secrets are replaced by REDACTED.

The log is not in it, because shunt does not keep it: kubectl -n kube-system logs POD
errors.txt says what could not be collected.
";

/// The archive cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum BundleError {
    /// The file is there.
    #[error("{} exists already: choose another name for --bundle, or remove it", .0.display())]
    Exists(PathBuf),
    /// It cannot be written.
    #[error("cannot write {}", output_file::name(path))]
    Write {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// A file in the archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BundledFile {
    /// Its name.
    pub name: String,
    /// Its length in bytes.
    pub bytes: usize,
}

/// Collects everything, and writes the archive. Returns what is in it.
pub(super) fn write(
    path: &Path,
    report: &Report,
    evaluation: &Evaluation,
    launcher: &Launcher,
) -> Result<Vec<BundledFile>, BundleError> {
    // Before all the work.
    let target = if is_standard_output(path) { Target::StandardOutput } else { create(path)? };
    let mut collected = Collected::collect(launcher);
    collected.add_json("doctor.json", report);
    collected.add_json("probe.json", evaluation);
    let Collected { mut files, errors, .. } = collected;
    let version = format!("shunt {} at {:.0}\n", env!("CARGO_PKG_VERSION"), Timestamp::now());
    files.push(("version.txt".to_owned(), version));
    files.push(("errors.txt".to_owned(), errors.join("\n")));
    files.push(("README.txt".to_owned(), README.to_owned()));
    files.sort_unstable();
    let failed = |source| BundleError::Write { path: path.to_owned(), source };
    archive(&files).and_then(|archive| target.save(&archive)).map_err(failed)?;
    Ok(files.into_iter().map(|(name, text)| BundledFile { name, bytes: text.len() }).collect())
}

/// Where the archive goes.
enum Target {
    File(File),
    StandardOutput,
}

impl Target {
    fn save(self, archive: &[u8]) -> io::Result<()> {
        match self {
            Self::File(mut file) => {
                file.write_all(archive)?;
                file.sync_all()
            }
            Self::StandardOutput => {
                let mut output = stdout().lock();
                output.write_all(archive)?;
                output.flush()
            }
        }
    }
}

fn create(path: &Path) -> Result<Target, BundleError> {
    let created = OpenOptions::new().write(true).create_new(true).mode(MODE).open(path);
    created.map(Target::File).map_err(|source| match source.kind() {
        io::ErrorKind::AlreadyExists => BundleError::Exists(path.to_owned()),
        _ => BundleError::Write { path: path.to_owned(), source },
    })
}

/// Returns the bytes of the archive.
fn archive(files: &[(String, String)]) -> io::Result<Vec<u8>> {
    let mut archive = tar::Builder::new(Vec::new());
    let now = u64::try_from(Timestamp::now().as_second()).unwrap_or(0);
    for (name, text) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(text.len() as u64);
        header.set_mode(MODE);
        header.set_mtime(now);
        archive.append_data(&mut header, format!("{FOLDER}/{name}"), text.as_bytes())?;
    }
    let archive = archive.into_inner()?;
    Ok(compress_to_vec(&*archive, CompressionLevel::Fastest))
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt as _};

    use super::*;

    #[test]
    fn an_archive_is_for_its_owner_and_replaces_no_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a.tar.zst");
        let file = create(&path).expect("a new file");
        let archive = archive(&[("a.txt".to_owned(), "a".repeat(100_000))]).expect("an archive");
        file.save(&archive).expect("saved");
        assert_eq!(fs::metadata(&path).expect("the file").permissions().mode() & 0o777, MODE);
        assert!(matches!(create(&path), Err(BundleError::Exists(_))));
        let compressed = fs::read(&path).expect("the file");
        assert!(compressed.len() < 10_000, "{} bytes", compressed.len());
        let decoder = ruzstd::decoding::StreamingDecoder::new(&*compressed).expect("zstd");
        let mut archive = tar::Archive::new(decoder);
        let names: Vec<_> = archive
            .entries()
            .expect("a tar archive")
            .map(|entry| entry.expect("an entry").path().expect("a path").display().to_string())
            .collect();
        assert_eq!(names, ["shunt-bundle/a.txt"]);
    }
}
