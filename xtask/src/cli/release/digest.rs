//! SHA-256 digests, in hexadecimal.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use ring::digest::{SHA256, digest};

/// Returns the digest of bytes.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    digest(&SHA256, bytes).as_ref().iter().fold(String::new(), |mut text, byte| {
        let _infallible = write!(text, "{byte:02x}");
        text
    })
}

/// Returns the digest of a file.
pub(crate) fn of_file(path: &Path) -> Result<String> {
    let bytes = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(sha256(&bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digest_of_nothing_is_the_known_one() {
        assert_eq!(sha256(b""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    }
}
