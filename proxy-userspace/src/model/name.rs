//! Names of objects and ports, in the syntax that the API server allows.

use std::sync::Arc;

use super::{Interner, validated_text::shows_its_text};

/// A name that was validated as the API server does it, or empty text. It has only lower-case
/// letters, digits, `-` and `.`, so it can be written into the input of iptables-restore and of
/// other commands as it is. Text from objects gets there only with this type.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(Arc<str>);

/// Text is not a valid name. The message is a noun that names what is allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidName {
    /// The text is not an RFC 1123 label.
    #[error("an RFC 1123 label: lower-case letters, digits and '-', at most 63, no '-' at either end")]
    Label,
    /// The text is not an RFC 1123 subdomain.
    #[error(
        "an RFC 1123 subdomain: parts of lower-case letters, digits and '-', with '.' between, at most 253"
    )]
    Subdomain,
}

/// `DNS1123LabelMaxLength` of apimachinery's `validation.go`.
const MAX_LABEL: usize = 63;
/// `DNS1123SubdomainMaxLength` of apimachinery's `validation.go`.
const MAX_SUBDOMAIN: usize = 253;

impl Name {
    /// Parses an RFC 1123 label (apimachinery's `IsDNS1123Label`): the name of a namespace, of a
    /// Service since Kubernetes 1.34 (before, labels without a digit at the start), or of a port.
    pub fn label(text: &str) -> Result<Self, InvalidName> {
        Self::is_label(text).then(|| Self(text.into())).ok_or(InvalidName::Label)
    }

    /// Parses a label that many objects repeat, as a shared copy.
    pub(crate) fn shared_label(text: &str, strings: &mut Interner<str>) -> Result<Self, InvalidName> {
        Self::is_label(text).then(|| Self(strings.intern_text(text))).ok_or(InvalidName::Label)
    }

    /// Parses an RFC 1123 subdomain (apimachinery's `IsDNS1123Subdomain`): the name of an
    /// `EndpointSlice`, of a Node or of a `ServiceCIDR`. Its parts may be longer than labels.
    pub fn subdomain(text: &str) -> Result<Self, InvalidName> {
        Self::is_subdomain(text).then(|| Self(text.into())).ok_or(InvalidName::Subdomain)
    }

    fn is_label(text: &str) -> bool {
        text.len() <= MAX_LABEL && is_part(text)
    }

    /// Returns true if the text is an RFC 1123 subdomain.
    pub(super) fn is_subdomain(text: &str) -> bool {
        // Most names are one part.
        text.len() <= MAX_SUBDOMAIN && (is_part(text) || text.split('.').all(is_part))
    }

    /// Replaces the text by a shared copy.
    pub(crate) fn share(&mut self, strings: &mut Interner<str>) {
        strings.share(&mut self.0);
    }
}

/// Returns true if the text is `[a-z0-9]([-a-z0-9]*[a-z0-9])?`.
fn is_part(text: &str) -> bool {
    let is_alphanumeric = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let bytes = text.as_bytes();
    // The loop ends nowhere else, so that the compiler can use vector instructions.
    bytes.iter().fold(true, |is_valid, byte| is_valid & (is_alphanumeric(byte) || *byte == b'-'))
        && [bytes.first(), bytes.last()].into_iter().all(|edge| edge.is_some_and(is_alphanumeric))
}

impl Default for Name {
    /// Returns the empty name: the namespace of cluster-scoped objects, or the name of an only
    /// port.
    fn default() -> Self {
        Self("".into())
    }
}

impl From<&'static str> for Name {
    /// Converts a name that is written in the program.
    ///
    /// # Panics
    /// Panics if it is neither empty nor a subdomain.
    fn from(text: &'static str) -> Self {
        if text.is_empty() {
            return Self::default();
        }
        Self::subdomain(text).unwrap_or_else(|allowed| panic!("{text:?} is not {allowed}"))
    }
}

shows_its_text!(Name);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_of_the_api_server_are_valid() {
        let (label, subdomain) = ("a".repeat(63), "a".repeat(253));
        for name in ["a", "0", "web", "web-1", "1-web", "a--b", &*label] {
            assert_eq!(Name::label(name).expect(name).to_string(), name);
        }
        for name in ["a", "web.shop", "ip-10-0-0-1.eu-west-1.compute.internal", &*label, &*subdomain] {
            assert_eq!(Name::subdomain(name).expect(name).to_string(), name);
        }
    }

    #[test]
    fn everything_else_is_refused() {
        let (label, subdomain) = ("a".repeat(64), "a".repeat(254));
        let bad = [
            "",
            "-",
            "-a",
            "a-",
            "A",
            "a b",
            "a\n",
            "\na",
            "a\"",
            "a'",
            "a;b",
            "a\\",
            "a\0",
            "a/b",
            "a:b",
            "a_b",
            "ä",
            "a\u{2028}b",
            "ａ",
            "{a}",
            "$a",
            "a`b",
        ];
        for text in bad {
            assert_eq!(Name::label(text), Err(InvalidName::Label), "{text:?}");
            assert_eq!(Name::subdomain(text), Err(InvalidName::Subdomain), "{text:?}");
        }
        for text in ["a.b", &*label] {
            assert_eq!(Name::label(text), Err(InvalidName::Label), "{text:?}");
        }
        for text in [".", ".a", "a.", "a..b", "a.-b", "a-.b", &*subdomain] {
            assert_eq!(Name::subdomain(text), Err(InvalidName::Subdomain), "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn no_text_becomes_a_name_with_a_character_that_commands_interpret(text in "\\PC*|[-a-z0-9.\n \"]*") {
            for name in [Name::label(&text), Name::subdomain(&text)].into_iter().flatten() {
                prop_assert!(name.chars().all(|c| matches!(c, 'a'..='z' | '0'..='9' | '-' | '.')), "{name:?}");
                prop_assert_eq!(&*name, &*text);
            }
        }
    }
}
