//! The command nft: it applies scripts as transactions, and lists tables and chains.

use std::time::Duration;

use super::{
    KernelError,
    command::{Command, Launcher},
};

const NFT: &str = "nft";
/// nft may have to wait for a large transaction or listing of another program.
const LIMIT: Duration = Duration::from_secs(30);

/// The command nft, in this thread's network namespace.
#[derive(Clone, Debug)]
pub struct Nft {
    launcher: Launcher,
}

impl Nft {
    /// The command, started by this launcher. It may be missing; then its use fails.
    pub const fn new(launcher: Launcher) -> Self {
        Self { launcher }
    }

    /// Applies a script as one transaction.
    pub fn apply(&self, script: &str) -> Result<(), KernelError> {
        self.command(&["-f", "-"]).stdin(script).run().map(drop)
    }

    /// Removes a table, such as `inet filter`, whether or not it exists. Fails if the kernel has no
    /// nftables. Also works while the process ends.
    pub fn delete_table(&self, table: &str) -> Result<(), KernelError> {
        let script = format!("table {table}\ndelete table {table}\n");
        self.command(&["-f", "-"]).stdin(script).undoing().run().map(drop)
    }

    /// Removes a table, such as `inet filter`, if it exists.
    pub fn remove_table(&self, table: &str) -> Result<(), KernelError> {
        match self.list_table(table)? {
            Some(_) => self.delete_table(table),
            None => Ok(()),
        }
    }

    /// Lists a table, such as `inet filter`; `None` if it does not exist.
    pub fn list_table(&self, table: &str) -> Result<Option<String>, KernelError> {
        none_if_not_found(self.list(&[], "table", table))
    }

    /// Lists a chain, such as `ip filter FORWARD`, with the handles of its rules; `None` if it does
    /// not exist.
    pub fn list_chain(&self, chain: &str) -> Result<Option<String>, KernelError> {
        none_if_not_found(self.list(&["-a"], "chain", chain))
    }

    /// Lists the declarations of all chains, by table.
    pub fn list_chains(&self) -> Result<String, KernelError> {
        self.list(&[], "chains", "")
    }

    /// Lists family and name of all tables, as JSON.
    pub fn list_tables_json(&self) -> Result<String, KernelError> {
        let none = || r#"{"nftables": []}"#.to_owned();
        Ok(none_if_not_found(self.list(&["-j"], "tables", ""))?.unwrap_or_else(none))
    }

    /// Lists a table, such as `inet filter`, as JSON; `None` if it does not exist. Elements of sets
    /// and maps are left out, unless the table has a map of verdicts.
    pub fn list_table_json(&self, table: &str) -> Result<Option<String>, KernelError> {
        let terse = none_if_not_found(self.list(&["-j", "-t"], "table", table))?;
        match terse {
            Some(json) if json.contains(r#""map": "verdict""#) => {
                none_if_not_found(self.list(&["-j"], "table", table))
            }
            terse => Ok(terse),
        }
    }

    fn list(&self, options: &[&str], kind: &str, name: &str) -> Result<String, KernelError> {
        let words = options.iter().copied().chain(["list", kind]).chain(name.split_whitespace());
        Ok(self.command(&words.collect::<Vec<_>>()).run()?.stdout)
    }

    fn command(&self, args: &[&str]) -> Command {
        Command::new(NFT, &self.launcher).args(args).limit(LIMIT)
    }
}

/// The messages of nft if a table does not exist, or if the kernel has no nftables. nft has no exit
/// status for that.
const NOT_FOUND: [&str; 3] =
    ["No such file or directory", "Protocol not supported", "Operation not supported"];

fn none_if_not_found(listed: Result<String, KernelError>) -> Result<Option<String>, KernelError> {
    match listed {
        Ok(text) => Ok(Some(text)),
        Err(KernelError::CommandFailed { stderr, .. })
            if NOT_FOUND.iter().any(|words| stderr.contains(words)) =>
        {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}
