//! The state of the repository that a release is made of.

use anyhow::{Result, ensure};
use xtask::run::Run;
use xtask::workspace;

/// A commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Source {
    /// Its hash.
    pub(crate) commit: String,
    /// When it was committed, in UTC, as RFC 3339 writes it.
    pub(crate) date: String,
    /// True if the release has changes that are not in the commit.
    pub(crate) is_changed: bool,
}

impl Source {
    /// Reads the current commit. Changes that are not committed are an error unless
    /// `allow_changes`: nobody could make the release again.
    pub(crate) fn read(allow_changes: bool) -> Result<Self> {
        let changes = git(&["status", "--porcelain"])?;
        ensure!(
            allow_changes || changes.is_empty(),
            "these changes are not committed, so nobody could make this release again:\n{changes}\n\
             Commit them, or try the release with --allow-changes"
        );
        // %cd with a format of its own, because git's ISO formats keep the zone of the committer.
        let date = ["log", "-1", "--format=%cd", "--date=format-local:%Y-%m-%dT%H:%M:%SZ"];
        Ok(Self { commit: git(&["rev-parse", "HEAD"])?, date: git(&date)?, is_changed: !changes.is_empty() })
    }

    #[cfg(test)]
    pub(crate) fn example() -> Self {
        Self {
            commit: "0123456789abcdef0123456789abcdef01234567".into(),
            date: "2026-11-25T12:00:00Z".into(),
            is_changed: false,
        }
    }
}

fn git(args: &[&str]) -> Result<String> {
    let run = Run::new("git").args(args).dir(workspace::root()).env("TZ", "UTC").env("LC_ALL", "C");
    Ok(run.read()?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn date_of_the_commit_is_in_utc() {
        let source = Source::read(true).unwrap();
        assert_eq!(source.commit.len(), 40);
        assert!(source.date.len() == 20 && source.date.ends_with('Z'), "{}", source.date);
    }
}
