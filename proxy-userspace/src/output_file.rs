//! A file that a command writes, or its standard output: `-` on the command line.

use std::{
    borrow::Cow,
    fs::File,
    io::{self, Write, stdout},
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

/// Creates the file. What is in it is overwritten.
pub fn create(path: &Path) -> io::Result<Box<dyn Write>> {
    if is_standard_output(path) { Ok(Box::new(stdout())) } else { Ok(Box::new(File::create(path)?)) }
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
}
