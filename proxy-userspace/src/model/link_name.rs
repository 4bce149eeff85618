//! Names of network links that the configuration gives.

use std::sync::Arc;

use super::validated_text::shows_its_text;

/// The name of a link, or the start of names. It has only characters that need no quotation marks
/// in the input of iptables-restore. `LinkName` is stricter than the kernel, which allows all
/// characters but `/`, `:` and white space (`dev_valid_name`).
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct LinkName(Arc<str>);

/// Text is not the name of a link. The message says what it must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("must be 1 to 15 letters, digits, '.', '_', '-' and '@', without '-' at the start")]
pub struct InvalidLinkName;

/// The kernel's `IFNAMSIZ` without the terminating zero.
const MAX_LENGTH: usize = 15;

impl LinkName {
    /// Validates a name.
    pub fn parse(text: &str) -> Result<Self, InvalidLinkName> {
        let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-@".contains(&byte);
        let fits = (1..=MAX_LENGTH).contains(&text.len()) && text.bytes().all(is_allowed);
        // iptables takes a word with '-' at the start for an option.
        let is_valid = fits && !text.starts_with('-');
        is_valid.then(|| Self(text.into())).ok_or(InvalidLinkName)
    }
}

impl From<&'static str> for LinkName {
    /// Converts a name that is written in the program.
    ///
    /// # Panics
    /// Panics if it is invalid.
    fn from(text: &'static str) -> Self {
        Self::parse(text).unwrap_or_else(|error| panic!("{text:?} {error}"))
    }
}

shows_its_text!(LinkName);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_words_without_special_characters_are_names() {
        for name in ["cbr0", "eth0.100", "veth", "br-1a2b3c4d5e6f", "vlan_7", "if3@eth0"] {
            assert_eq!(LinkName::parse(name).expect(name).to_string(), name);
        }
        for text in [
            "",
            "-i",
            "a b",
            "a\nb",
            "a\"",
            "a'",
            "a\\",
            "a;b",
            "a/b",
            "a:b",
            "a+",
            "!a",
            "ä",
            "sixteen-letters0",
        ] {
            assert_eq!(LinkName::parse(text), Err(InvalidLinkName), "{text:?}");
        }
    }
}
