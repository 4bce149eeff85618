//! The errors of the iptables mode, and what the message of a failed iptables-restore means.

use crate::{
    dataplane::FamilyError,
    kernel::KernelError,
    model::{IpFamily, ServicePortKey},
};

/// An option that shunt can do without.
pub(super) const RANDOM_FULLY: &str = "random-fully";
/// See [`RANDOM_FULLY`].
pub(super) const NFACCT: &str = "nfacct";

/// An error of the iptables mode.
#[derive(Debug, thiserror::Error)]
pub enum IptablesError {
    /// A command or the kernel failed.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// iptables-restore rejected rules. It changed the tables that come before the rejected one in
    /// the input, but not this one and not those after it.
    #[error("cannot write {family} rules{}: {source}", position(line.as_ref()))]
    Restore {
        /// The family.
        family: IpFamily,
        /// The number and text of the line of the input that the command named.
        line: Option<(usize, String)>,
        /// Why.
        source: KernelError,
    },
    /// Only one family failed. The other is as it should be.
    #[error(transparent)]
    OfFamily(#[from] FamilyError<IptablesError>),
    /// Some service ports are not served. All others are.
    #[error("{count} service ports are left out because their rules were rejected; the first is {first}")]
    LeftOut {
        /// The number of service ports.
        count: usize,
        /// One of them.
        first: ServicePortKey,
    },
}

fn position(line: Option<&(usize, String)>) -> String {
    line.map_or_else(String::new, |(number, text)| format!(" at line {number}, {text:?}"))
}

impl IptablesError {
    /// The error of iptables-restore for this input.
    pub(in crate::dataplane) fn of_restore(family: IpFamily, input: &str, source: KernelError) -> Self {
        let number = match &source {
            KernelError::CommandFailed { stderr, .. } => line_number(stderr),
            _ => None,
        };
        let line =
            number.and_then(|number| Some((number, input.lines().nth(number.checked_sub(1)?)?.to_owned())));
        Self::Restore { family, line, source }
    }

    /// Returns the text of the line that the command named.
    pub(super) fn line(&self) -> Option<&str> {
        let Self::Restore { line: Some((_, text)), .. } = self else { return None };
        Some(text)
    }

    /// Returns true if the input was rejected. The command did not fail for lack of the lock or of
    /// time.
    pub(in crate::dataplane) fn is_rejection(&self) -> bool {
        // `RESOURCE_PROBLEM` of `include/xtables.h`. iptables-nft also ends with it when the kernel
        // rejects rules, but then it names a line.
        const BUSY: i32 = 4;
        matches!(self, Self::Restore { line, source: KernelError::CommandFailed { status, .. }, .. }
            if line.is_some() || status.code().is_some_and(|code| code != BUSY))
    }

    /// Returns the option that iptables or the kernel does not support, and logs it.
    pub(super) fn unsupported_option(&self) -> Option<&'static str> {
        let Self::Restore { source, .. } = self else { return None };
        let message = source.to_string();
        let is_named = |option: &&str| {
            message.contains(*option) || self.line().is_some_and(|line| line.contains(*option))
        };
        let option = [RANDOM_FULLY, NFACCT].into_iter().find(is_named)?;
        tracing::warn!(
            option,
            "iptables or the kernel does not support this option: rules are written without it"
        );
        Some(option)
    }
}

/// Parses `line 7 failed`, `Error occurred at line: 7`, or `line 7: RULE_APPEND failed (…)`,
/// depending on version and backend.
fn line_number(stderr: &str) -> Option<usize> {
    stderr.match_indices("line").find_map(|(at, word)| {
        let rest = stderr[at + word.len()..].trim_start_matches([':', ' ']);
        let digits = rest.split(|c: char| !c.is_ascii_digit()).next()?;
        digits.parse().ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_numbers_are_parsed_from_messages_of_all_versions() {
        for stderr in [
            "iptables-restore: line 7 failed",
            "iptables-restore v1.8.9 (nf_tables): \nline 7: RULE_APPEND failed (No such file or directory): rule in chain X",
            "iptables-restore v1.8.9 (nf_tables): Couldn't load match `x'\n\nError occurred at line: 7\nTry `iptables-restore -h'",
        ] {
            assert_eq!(line_number(stderr), Some(7), "{stderr}");
        }
        assert_eq!(line_number("Another app is currently holding the xtables lock"), None);
    }
}
