//! iptables, through its save and restore commands: one pair for each backend (legacy or on nftables) and IP family.

use std::{fmt, fs, time::Duration};

use super::{
    KernelError,
    command::{Command, SearchPath},
};

/// How long restore waits for the lock that all iptables commands share, in seconds; upstream's figure.
const LOCK_SECONDS: &str = "5";
/// With many thousand rules, as another proxy may have left them, saving and restoring take their time.
const LIMIT: Duration = Duration::from_mins(1);
/// For an input of unknown size.
const LARGE_LIMIT: Duration = Duration::from_mins(5);

/// What keeps the rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Backend {
    /// nftables tables named `filter`, `nat` and so on.
    Nft,
    /// The kernel's own tables of old.
    Legacy,
}

/// Whose packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Family {
    /// Both.
    pub const ALL: [Self; 2] = [Self::V4, Self::V6];

    /// nft's word for it.
    pub const fn nft(self) -> &'static str {
        match self {
            Self::V4 => "ip",
            Self::V6 => "ip6",
        }
    }

    const fn command(self) -> &'static str {
        match self {
            Self::V4 => "iptables",
            Self::V6 => "ip6tables",
        }
    }

    /// Whether this thread's network namespace has the family: a kernel may be told to go without IPv6.
    pub fn is_available(self) -> bool {
        self == Self::V4 || fs::exists("/proc/thread-self/net/if_inet6").unwrap_or(false)
    }
}

/// The commands of one backend and family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Iptables {
    /// What keeps the rules.
    pub backend: Backend,
    /// Whose packets.
    pub family: Family,
    /// What the commands' names begin with, such as `iptables-nft`.
    prefix: String,
    path: SearchPath,
}

impl fmt::Display for Iptables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.prefix)
    }
}

impl Iptables {
    /// The installed commands for a family, nftables' first; each backend at most once.
    pub fn installed(family: Family, path: &SearchPath) -> Vec<Self> {
        let plain = family.command();
        let of = |backend, prefix: String| Self { backend, family, prefix, path: path.clone() };
        let mut found =
            vec![of(Backend::Nft, format!("{plain}-nft")), of(Backend::Legacy, format!("{plain}-legacy"))];
        found.retain(Self::is_installed);
        // Where both are installed, the plain name is one of them.
        if found.len() < 2 {
            let plain = of(Backend::Legacy, plain.into());
            if let Some(plain) = plain.is_installed().then(|| plain.with_its_backend()).flatten()
                && found.iter().all(|other| other.backend != plain.backend)
            {
                found.push(plain);
            }
        }
        found
    }

    fn is_installed(&self) -> bool {
        ["save", "restore"].iter().all(|verb| self.path.find(&format!("{}-{verb}", self.prefix)).is_some())
    }

    /// Versions before 1.8 had the old backend only and name none.
    fn with_its_backend(self) -> Option<Self> {
        let version = self.command("restore", &["--version"]).run().ok()?.stdout;
        let backend = if version.contains("nf_tables") { Backend::Nft } else { Backend::Legacy };
        Some(Self { backend, ..self })
    }

    /// Whether a table is there. Of legacy ones it is asked first, since looking into one makes it.
    pub fn has_table(&self, table: &str) -> bool {
        let names = match (self.backend, self.family) {
            (Backend::Nft, _) => return true,
            (Backend::Legacy, Family::V4) => "/proc/thread-self/net/ip_tables_names",
            (Backend::Legacy, Family::V6) => "/proc/thread-self/net/ip6_tables_names",
        };
        fs::read_to_string(names).is_ok_and(|names| names.lines().any(|name| name == table))
    }

    /// All rules of a table in the words of iptables-save; empty where there is no such table.
    pub fn save(&self, table: &str) -> Result<String, KernelError> {
        if !self.has_table(table) {
            return Ok(String::new());
        }
        match self.command("save", &["-t", table]).run() {
            Ok(output) => Ok(output.stdout),
            // A kernel without nftables.
            Err(KernelError::CommandFailed { stderr, .. })
                if stderr.contains("Could not fetch rule set generation id")
                    && !stderr.contains("permi")
                    && !stderr.contains("Permi") =>
            {
                Ok(String::new())
            }
            Err(error) => Err(error),
        }
    }

    /// Whether a table is in what [`Self::save`] returned for it. iptables-nft leaves out one with a rule in it that it does not know,
    /// such as one that nft put there; chains without such rules it lists all the same, and takes changes to them.
    pub fn is_shown(saved: &str) -> bool {
        !saved.contains("' is incompatible, use 'nft' tool")
    }

    /// Takes in text of iptables-save, leaving all that it does not name as it is. A table is changed at once or not at all.
    pub fn restore(&self, text: &str) -> Result<(), KernelError> {
        self.command("restore", &["-w", LOCK_SECONDS, "--noflush"]).stdin(text).run().map(drop)
    }

    /// The same, with a time limit of its own: a first input of another proxy's size takes a while. A rule's or chain's counter
    /// is set to what stands before or after it in brackets. What commands of the input print is left out.
    pub fn restore_all(&self, text: String) -> Result<(), KernelError> {
        let args = ["-w", LOCK_SECONDS, "--noflush", "--counters"];
        self.command("restore", &args).limit(LARGE_LIMIT).stdin(text).run().map(drop)
    }

    /// A chain as commands that make it; none where it is not there.
    pub fn list(&self, table: &str, chain: &str) -> Result<Option<String>, KernelError> {
        if !self.has_table(table) {
            return Ok(None);
        }
        let args = ["-w", LOCK_SECONDS, "-t", table, "-S", chain];
        match Command::new(self.prefix.clone(), &self.path).args(args).limit(LIMIT).run() {
            Ok(output) => Ok(Some(output.stdout)),
            // All other errors have other numbers.
            Err(KernelError::CommandFailed { status, .. }) if status.code() == Some(1) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The commands' version, as in 1.8.9; none where they do not say.
    pub fn version(&self) -> Result<Option<[u32; 3]>, KernelError> {
        Ok(version(&self.command("restore", &["--version"]).run()?.stdout))
    }

    fn command(&self, verb: &str, args: &[&str]) -> Command {
        Command::new(format!("{}-{verb}", self.prefix), &self.path).args(args).limit(LIMIT)
    }
}

/// Reads `iptables-restore v1.8.9 (nf_tables)`.
fn version(text: &str) -> Option<[u32; 3]> {
    let numbers = text.split_whitespace().find_map(|word| word.strip_prefix('v'))?;
    let mut numbers = numbers.split('.').map(str::parse);
    let mut next = || numbers.next().unwrap_or(Ok(0)).ok();
    Some([next()?, next()?, next()?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_as_they_are_printed() {
        assert_eq!(version("iptables-restore v1.8.9 (nf_tables)\n"), Some([1, 8, 9]));
        assert_eq!(version("iptables-restore v1.6\n"), Some([1, 6, 0]));
        assert_eq!(version("something else"), None);
    }
}
