//! A file that a command writes, or its standard output: `-` on the command line.

use std::{
    borrow::Cow,
    fs::File,
    io::{self, ErrorKind, Write, stdout},
    path::Path,
};

/// Returns true if the path on the command line stands for standard output. Messages then go to
/// standard error.
pub fn is_standard_output(path: &Path) -> bool {
    path == Path::new("-")
}

/// Returns the path, or what it stands for.
pub fn name(path: &Path) -> Cow<'_, str> {
    if is_standard_output(path) { "standard output".into() } else { path.to_string_lossy() }
}

/// Creates the file. Fails if it exists ([`check_new`]).
pub fn create(path: &Path) -> io::Result<Box<dyn Write>> {
    if is_standard_output(path) {
        return Ok(Box::new(stdout()));
    }
    match File::create_new(path) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Err(exists()),
        created => Ok(Box::new(created?)),
    }
}

/// Fails if the path on the command line is a file that exists, or that cannot be looked up.
pub fn check_new(path: &Path) -> io::Result<()> {
    if is_standard_output(path) || !path.try_exists()? { Ok(()) } else { Err(exists()) }
}

fn exists() -> io::Error {
    io::Error::new(ErrorKind::AlreadyExists, "it exists already: choose another name, or remove it")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hyphen_is_standard_output_and_every_other_path_a_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("-");
        create(&path).and_then(|mut file| file.write_all(b"a")).expect("written");
        assert_eq!(std::fs::read(&path).expect("the file"), b"a");
        assert_eq!(name(Path::new("-")), "standard output");
    }

    #[test]
    fn a_file_that_exists_is_not_overwritten() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a");
        check_new(&path).expect("it is new");
        std::fs::write(&path, "mine").expect("written");
        for refused in [check_new(&path), create(&path).map(drop)] {
            let error = refused.expect_err("it exists").to_string();
            assert_eq!(error, "it exists already: choose another name, or remove it");
        }
        assert_eq!(std::fs::read(&path).expect("the file"), b"mine");
        check_new(Path::new("-")).expect("standard output is no file");
    }
}
