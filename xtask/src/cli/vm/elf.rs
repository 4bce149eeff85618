//! Finds the shared libraries of programs of another architecture, which ldd cannot run.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use object::Endianness;
use object::elf::{DT_NEEDED, PT_INTERP};
use object::read::elf::{ElfFile64, ProgramHeader as _};

/// Returns the libraries of these files in a folder of unpacked packages, and the libraries of
/// those.
pub(crate) fn libraries(root: &Path, files: &[&PathBuf]) -> Result<BTreeSet<PathBuf>> {
    let folders = folders(root);
    let mut found = BTreeSet::new();
    let mut unread: Vec<PathBuf> = files.iter().copied().cloned().collect();
    while let Some(file) = unread.pop() {
        for name in needs(&file)? {
            let library = folders.iter().map(|folder| folder.join(&name)).find(|path| path.is_file());
            let library = library
                .with_context(|| format!("{} needs {name}, which no package holds", file.display()))?;
            if found.insert(library.clone()) {
                unread.push(library);
            }
        }
    }
    Ok(found)
}

/// Returns the folders of libraries: lib, and folders like lib/aarch64-linux-gnu.
fn folders(root: &Path) -> Vec<PathBuf> {
    let top = ["lib", "usr/lib"].map(|folder| root.join(folder));
    let below = top.iter().filter_map(|folder| fs::read_dir(folder).ok()).flatten().flatten();
    let below: Vec<PathBuf> = below.map(|entry| entry.path()).collect();
    top.iter().cloned().chain(below).filter(|folder| folder.is_dir()).collect()
}

/// Returns the names of the libraries that a file needs, and of the program that loads it.
fn needs(file: &Path) -> Result<Vec<String>> {
    let failed = || format!("cannot read {}", file.display());
    let bytes = fs::read(file).with_context(failed)?;
    read(&bytes).with_context(failed)
}

/// Reads the same from the bytes of a file.
pub(crate) fn read(bytes: &[u8]) -> Result<Vec<String>> {
    let elf = ElfFile64::<Endianness>::parse(bytes)?;
    let endian = elf.endian();
    let mut names = Vec::new();
    let dynamic = elf.elf_dynamic_table()?;
    for entry in dynamic.iter().filter(|entry| entry.tag == DT_NEEDED) {
        names.push(String::from_utf8(dynamic.string(entry)?.to_vec())?);
    }
    for header in elf.elf_program_headers() {
        if header.p_type(endian) == PT_INTERP {
            let path =
                header.data(endian, bytes).ok().context("the name of its loader is outside of the file")?;
            let path = String::from_utf8(path.to_vec())?;
            names.extend(path.trim_end_matches('\0').rsplit('/').next().map(str::to_owned));
        }
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_program_needs_the_c_library_and_its_loader() {
        let names = needs(Path::new("/proc/self/exe")).unwrap();
        assert!(names.contains(&"libc.so.6".to_owned()), "{names:?}");
        assert!(names.iter().any(|name| name.starts_with("ld-linux")), "{names:?}");
    }

    #[test]
    fn a_library_that_no_package_holds_is_named() {
        let root = tempfile::tempdir().unwrap();
        let error = libraries(root.path(), &[&"/proc/self/exe".into()]).unwrap_err().to_string();
        assert!(error.contains("/proc/self/exe needs ") && error.contains("no package holds"), "{error}");
    }

    #[test]
    fn a_file_of_another_format_is_named() {
        let error = needs(Path::new("/etc/passwd")).unwrap_err().to_string();
        assert!(error.contains("/etc/passwd"), "{error}");
    }
}
