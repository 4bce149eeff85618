//! What can go wrong, and what a failed iptables-restore says of its input.

use super::names::Chain;
use crate::{
    dataplane::OneFamily,
    kernel::KernelError,
    model::{IpFamily, ServicePortKey},
};

/// Options that a restore can go without.
pub(super) const RANDOM_FULLY: &str = "random-fully";
/// See [`RANDOM_FULLY`].
pub(super) const NFACCT: &str = "nfacct";

/// What can go wrong.
#[derive(Debug, thiserror::Error)]
pub enum IptablesError {
    /// A command or the kernel.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// Rules were not taken. Of a table that was named before that one all were, of this one and those after none.
    #[error("{family} rules were refused{}: {source}", shown(line.as_ref()))]
    Restore {
        /// The family.
        family: IpFamily,
        /// The line of the input that the command named, and what stands there.
        line: Option<(usize, String)>,
        /// Why.
        source: KernelError,
    },
    /// One family alone failed; all of the other is as it should be.
    #[error(transparent)]
    OfFamily(#[from] OneFamily<IptablesError>),
    /// Some service ports are not served; all others are.
    #[error("{count} service ports are left out because their rules were refused; the first is {first}")]
    LeftOut {
        /// How many.
        count: usize,
        /// One of them.
        first: ServicePortKey,
    },
}

fn shown(line: Option<&(usize, String)>) -> String {
    line.map_or_else(String::new, |(number, text)| format!(" at line {number}, {text:?}"))
}

impl IptablesError {
    /// The rule that was refused.
    pub(super) fn rule(&self) -> Option<&str> {
        let Self::Restore { line: Some((_, text)), .. } = self else { return None };
        text.starts_with("-A ").then_some(text)
    }

    /// The input was looked at and refused; it was not the lock, or time, that was missing.
    pub(super) fn is_refusal(&self) -> bool {
        // `RESOURCE_PROBLEM` of `include/xtables.h`; iptables-nft ends so too where the kernel refuses, but names a line then.
        const BUSY: i32 = 4;
        matches!(self, Self::Restore { line, source: KernelError::CommandFailed { status, .. }, .. }
            if line.is_some() || status.code().is_some_and(|code| code != BUSY))
    }

    /// The chain that could not be removed.
    pub(super) fn unremovable(&self) -> Option<Chain> {
        let Self::Restore { line: Some((_, text)), .. } = self else { return None };
        Chain::parse(text.strip_prefix("-X ")?)
    }

    /// What is to be left out of rules from now on.
    pub(super) fn refused(&self) -> Option<&'static str> {
        let Self::Restore { line, source, .. } = self else { return None };
        let said = source.to_string();
        let is_named =
            |word: &&str| said.contains(*word) || line.as_ref().is_some_and(|(_, text)| text.contains(*word));
        let word = [RANDOM_FULLY, NFACCT].into_iter().find(is_named);
        word.inspect(|word| tracing::warn!(word, "iptables or the kernel does not take it; going without"))
    }
}

/// The error of a restore of this input.
pub(super) fn of_restore(family: IpFamily, input: &str, source: KernelError) -> IptablesError {
    let number = match &source {
        KernelError::CommandFailed { stderr, .. } => line_number(stderr),
        _ => None,
    };
    let line =
        number.and_then(|number| Some((number, input.lines().nth(number.checked_sub(1)?)?.to_owned())));
    IptablesError::Restore { family, line, source }
}

/// `line 7 failed`, `Error occurred at line: 7`, or `line 7: RULE_APPEND failed (…)`, by version and backend.
fn line_number(said: &str) -> Option<usize> {
    said.match_indices("line").find_map(|(at, word)| {
        let rest = said[at + word.len()..].trim_start_matches([':', ' ']);
        let digits = rest.split(|c: char| !c.is_ascii_digit()).next()?;
        digits.parse().ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_is_found_in_the_words_of_every_version() {
        for said in [
            "iptables-restore: line 7 failed",
            "iptables-restore v1.8.9 (nf_tables): \nline 7: RULE_APPEND failed (No such file or directory): rule in chain X",
            "iptables-restore v1.8.9 (nf_tables): Couldn't load match `x'\n\nError occurred at line: 7\nTry `iptables-restore -h'",
        ] {
            assert_eq!(line_number(said), Some(7), "{said}");
        }
        assert_eq!(line_number("Another app is currently holding the xtables lock"), None);
    }
}
