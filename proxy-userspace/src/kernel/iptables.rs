//! The commands iptables-save and iptables-restore: one pair for each backend (nftables or legacy)
//! and IP family.

use std::{fmt, fs, time::Duration};

use super::{
    KernelError,
    command::{Command, Launcher},
    netns,
};
use crate::net::IpFamily;

/// How long restore waits for the lock that all iptables commands share, in seconds. The value is
/// upstream's.
const LOCK_SECONDS: &str = "5";
/// Another proxy may have left many thousand rules. Saving and restoring them takes time.
const LIMIT: Duration = Duration::from_mins(1);
/// The limit for inputs of any size.
const LARGE_LIMIT: Duration = Duration::from_mins(5);

/// Rules of the kinds that Services need.
const TRIAL: &str = "\
*filter
-A FORWARD -m mark --mark 1 -m conntrack --ctstate INVALID -m comment --comment shunt -j DROP
-A FORWARD -m mark --mark 1 -p tcp -j REJECT --reject-with tcp-reset
COMMIT
*nat
-A POSTROUTING -m mark --mark 1 -j MASQUERADE
COMMIT
";

/// The end of the line that iptables-save prints in place of a table. It begins with `# Table` and
/// the name.
const INCOMPATIBLE: &str = "' is incompatible, use 'nft' tool";

/// Returns the lines of a table in the output for all tables: none if the table does not exist.
/// Returns `None` if its end is missing.
fn find_table<'a>(saved: &'a str, name: &str) -> Option<&'a str> {
    let (begin, incompatible) = (format!("*{name}"), format!("# Table `{name}{INCOMPATIBLE}"));
    let (mut start, mut end) = (None, 0);
    for line in saved.split_inclusive('\n') {
        let begins = end;
        end += line.len();
        match (start, line.trim_end()) {
            (None, text) if text.starts_with(&incompatible) => return Some(&saved[begins..end]),
            (None, text) if text == begin => start = Some(begins),
            (Some(start), "COMMIT") => return Some(&saved[start..end]),
            _ => {}
        }
    }
    if start.is_none() { Some("") } else { None }
}

/// Where iptables keeps the rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Backend {
    /// In nftables tables named `filter`, `nat` and so on.
    Nft,
    /// In the tables of `ip_tables`.
    Legacy,
}

/// Returns true if this thread's network namespace has the family. IPv6 may be disabled.
pub fn is_available(family: IpFamily) -> bool {
    family == IpFamily::V4 || fs::exists("/proc/thread-self/net/if_inet6").unwrap_or(false)
}

/// The commands of one backend and family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Iptables {
    /// Where they keep the rules.
    pub backend: Backend,
    /// The IP family of the packets.
    pub family: IpFamily,
    /// The first part of the commands' names, such as `iptables-nft`.
    prefix: String,
    launcher: Launcher,
}

impl fmt::Display for Iptables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.prefix)
    }
}

impl Iptables {
    /// Returns the installed commands of a family, nftables' first; each backend at most once.
    pub fn installed(family: IpFamily, launcher: &Launcher) -> Vec<Self> {
        let plain = match family {
            IpFamily::V4 => "iptables",
            IpFamily::V6 => "ip6tables",
        };
        let of = |backend, prefix: String| Self { backend, family, prefix, launcher: launcher.clone() };
        let mut found =
            vec![of(Backend::Nft, format!("{plain}-nft")), of(Backend::Legacy, format!("{plain}-legacy"))];
        found.retain(Self::is_installed);
        // If both are installed, the plain name is one of them.
        if found.len() < 2 {
            let plain = of(Backend::Legacy, plain.into());
            if let Some(plain) = plain.is_installed().then(|| plain.with_detected_backend()).flatten()
                && found.iter().all(|other| other.backend != plain.backend)
            {
                found.push(plain);
            }
        }
        found
    }

    fn is_installed(&self) -> bool {
        ["save", "restore"]
            .iter()
            .all(|verb| self.launcher.find(&format!("{}-{verb}", self.prefix)).is_some())
    }

    /// Versions before 1.8 print no backend. They only have the legacy one.
    fn with_detected_backend(self) -> Option<Self> {
        let version = self.command("restore", &["--version"]).run().ok()?.stdout;
        let backend = if version.contains("nf_tables") { Backend::Nft } else { Backend::Legacy };
        Some(Self { backend, ..self })
    }

    fn has_table(&self, table: &str) -> bool {
        self.backend == Backend::Nft || Self::has_legacy_table(self.family, table)
    }

    /// Returns true if a table exists in `ip_tables`. The commands of that backend would create a
    /// table by reading it.
    pub fn has_legacy_table(family: IpFamily, table: &str) -> bool {
        Self::legacy_tables(family).lines().any(|name| name == table)
    }

    /// Returns true if `ip_tables` has a table of either family.
    pub fn has_legacy_tables() -> bool {
        IpFamily::ALL.into_iter().any(|family| !Self::legacy_tables(family).is_empty())
    }

    /// Returns the names of the tables in `ip_tables`, in the network namespace of the caller; an
    /// empty text if the kernel does not have the module.
    fn legacy_tables(family: IpFamily) -> String {
        let names = match family {
            IpFamily::V4 => "/proc/thread-self/net/ip_tables_names",
            IpFamily::V6 => "/proc/thread-self/net/ip6_tables_names",
        };
        fs::read_to_string(names).unwrap_or_default()
    }

    /// Returns the output of iptables-save for a table; an empty text if the table does not exist.
    pub fn save(&self, table: &str) -> Result<String, KernelError> {
        if self.has_table(table) { self.run_save(&["-t", table]) } else { Ok(String::new()) }
    }

    /// Saves several tables with one command, which takes less time than one for each. If it fails,
    /// for example because of a rule in another table, each table is saved by itself.
    pub fn save_tables(&self, names: &[&str]) -> Vec<Result<String, KernelError>> {
        if let [name] = names {
            return vec![self.save(name)];
        }
        // Some versions of the legacy commands fail if `ip_tables` has no table.
        let is_empty = self.backend == Backend::Legacy && Self::legacy_tables(self.family).is_empty();
        let all = if is_empty { Some(String::new()) } else { self.run_save(&[]).ok() };
        let found = |name| all.as_deref().and_then(|all| find_table(all, name)).map(String::from);
        names.iter().map(|name| found(name).map_or_else(|| self.save(name), Ok)).collect()
    }

    fn run_save(&self, args: &[&str]) -> Result<String, KernelError> {
        match self.command("save", args).run() {
            Ok(output) => Ok(output.stdout),
            // The kernel does not have nftables.
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

    /// Returns true if the output of iptables-save contains the table. iptables-nft leaves out a
    /// table that holds a rule that it does not know, for example one that nft wrote. It still
    /// lists chains without such rules, and accepts changes to them.
    pub fn is_complete(saved: &str) -> bool {
        !saved.contains(INCOMPATIBLE)
    }

    /// Adds rules of the kinds that Services need, and does not remove them: the calling thread
    /// must be in a network namespace of its own.
    pub fn try_rules(&self) -> Result<(), KernelError> {
        self.restore(TRIAL)
    }

    /// Returns why the kernel accepts no rules of these commands, those of IPv6, although it
    /// accepts those of IPv4 (`v4`): for example because it has no IPv6 table `nat`. If IPv4 fails
    /// too, the reason is another one, such as a missing privilege or a lock.
    pub fn ipv6_refusal(&self, v4: &Self) -> Option<KernelError> {
        let in_new = |of: &Self| netns::within_new(|| of.try_rules());
        match (in_new(self), in_new(v4)) {
            (Ok(Err(refusal)), Ok(Ok(()))) => Some(refusal),
            (Ok(_), Ok(_)) => None,
            // Without CAP_SYS_ADMIN. Upstream's test is weaker, and needs no namespace.
            _ => self.read_nat().err().filter(|_| v4.read_nat().is_ok()),
        }
    }

    /// Lists the chain POSTROUTING of the table nat, as upstream's `Present`
    /// (`pkg/util/iptables/iptables.go`) to find out whether iptables works.
    fn read_nat(&self) -> Result<(), KernelError> {
        let args = ["-w", LOCK_SECONDS, "-t", "nat", "-S", "POSTROUTING"];
        Command::new(self.prefix.clone(), &self.launcher).args(args).limit(LIMIT).run().map(drop)
    }

    /// Runs iptables-restore, which changes only what the text names. It makes all changes of a
    /// table or none.
    pub fn restore(&self, text: &str) -> Result<(), KernelError> {
        self.command("restore", &["-w", LOCK_SECONDS, "--noflush"]).stdin(text).run().map(drop)
    }

    /// Does the same with an input of any size: the first input with thousands of Services takes a
    /// while. Sets the counters of rules and chains to the values in brackets. The output of
    /// commands in the input is discarded.
    pub fn restore_all(&self, text: String) -> Result<(), KernelError> {
        let args = ["-w", LOCK_SECONDS, "--noflush", "--counters"];
        self.command("restore", &args).limit(LARGE_LIMIT).stdin(text).run().map(drop)
    }

    /// Returns the output of `iptables -S` for a chain; `None` if the chain does not exist.
    pub fn list(&self, table: &str, chain: &str) -> Result<Option<String>, KernelError> {
        if !self.has_table(table) {
            return Ok(None);
        }
        let args = ["-w", LOCK_SECONDS, "-t", table, "-S", chain];
        match Command::new(self.prefix.clone(), &self.launcher).args(args).limit(LIMIT).run() {
            Ok(output) => Ok(Some(output.stdout)),
            // All other errors have other exit codes.
            Err(KernelError::CommandFailed { status, .. }) if status.code() == Some(1) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns true if the commands support `MASQUERADE --random-fully`, as from 1.6.2 on.
    pub fn supports_random_fully(&self) -> Result<bool, KernelError> {
        let output = self.command("restore", &["--version"]).run()?.stdout;
        Ok(version(&output).is_none_or(|version| version >= [1, 6, 2]))
    }

    fn command(&self, verb: &str, args: &[&str]) -> Command {
        Command::new(format!("{}-{verb}", self.prefix), &self.launcher).args(args).limit(LIMIT)
    }
}

/// Parses `iptables-restore v1.8.9 (nf_tables)`.
fn version(text: &str) -> Option<[u32; 3]> {
    let numbers = text.split_whitespace().find_map(|word| word.strip_prefix('v'))?;
    let mut numbers = numbers.split('.').map(str::parse);
    let mut next = || numbers.next().unwrap_or(Ok(0)).ok();
    Some([next()?, next()?, next()?])
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn table_is_found_among_all() {
        let filter = "*filter\n-A FORWARD -m comment --comment \"*nat\" -j X\nCOMMIT\n";
        let mangle = "*mangle\n-A INPUT -m comment --comment \"Table `filter' is incompatible, use 'nft' tool\"\nCOMMIT\n";
        let saved =
            format!("# Generated\n{mangle}# Table `nat' is incompatible, use 'nft' tool.\n{filter}*raw\n");
        assert_eq!(find_table(&saved, "mangle"), Some(mangle));
        assert_eq!(find_table(&saved, "filter"), Some(filter));
        assert!(find_table(&saved, "nat").is_some_and(|saved| !Iptables::is_complete(saved)));
        assert_eq!(find_table(&saved, "security"), Some(""));
        assert_eq!(find_table(&saved, "raw"), None, "its end is missing");
    }

    #[test]
    fn table_that_cannot_be_saved_does_not_hide_the_others() {
        // The test of a CPU profile changes the directory for temporary files to one that may not
        // allow to execute them.
        let directory = tempfile::tempdir_in("/tmp").expect("a directory");
        let script = "#!/bin/sh\n[ \"$2\" = nat ] && printf '*nat\\nCOMMIT\\n' && exit\necho no match geoip >&2; exit 1\n";
        for name in ["iptables-nft-save", "iptables-nft-restore"] {
            let path = directory.path().join(name);
            fs::write(&path, script).expect("a script");
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("executable");
        }
        let launcher = Launcher::only_in([directory.path().to_owned()]);
        let commands = Iptables::installed(IpFamily::V4, &launcher).pop().expect("installed");
        let saved = commands.save_tables(&["nat", "raw"]);
        let [Ok(nat), Err(raw)] = &saved[..] else { panic!("{saved:?}") };
        assert_eq!(nat, "*nat\nCOMMIT\n");
        assert!(raw.to_string().contains("geoip"), "{raw}");
    }

    #[test]
    fn printed_versions_are_parsed() {
        assert_eq!(version("iptables-restore v1.8.9 (nf_tables)\n"), Some([1, 8, 9]));
        assert_eq!(version("iptables-restore v1.6\n"), Some([1, 6, 0]));
        assert_eq!(version("something else"), None);
    }
}
