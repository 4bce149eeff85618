//! nftables, through the command nft: whole transactions in, listings out.

use std::time::Duration;

use super::{
    KernelError,
    command::{Command, Launcher},
};

const NFT: &str = "nft";
/// A listing or a transaction may have to wait for another program's large one.
const LIMIT: Duration = Duration::from_secs(30);

/// The command nft, in this thread's network namespace.
#[derive(Clone, Debug)]
pub struct Nft {
    launcher: Launcher,
}

impl Nft {
    /// nft as it is found there; whether it is shows when it is used.
    pub const fn new(launcher: Launcher) -> Self {
        Self { launcher }
    }

    /// Applies a script as one transaction: all of it or nothing.
    pub fn apply(&self, script: &str) -> Result<(), KernelError> {
        self.command(&["-f", "-"]).stdin(script).run().map(drop)
    }

    /// Removes one table, such as `inet filter`, whether or not it is there, in a kernel that has nftables; also while the process ends.
    pub fn delete_table(&self, table: &str) -> Result<(), KernelError> {
        let script = format!("table {table}\ndelete table {table}\n");
        self.command(&["-f", "-"]).stdin(script).undoing().run().map(drop)
    }

    /// Removes one table, such as `inet filter`, where it is there.
    pub fn remove_table(&self, table: &str) -> Result<(), KernelError> {
        match self.list_table(table)? {
            Some(_) => self.delete_table(table),
            None => Ok(()),
        }
    }

    /// Lists one table, such as `inet filter`; none where it does not exist.
    pub fn list_table(&self, table: &str) -> Result<Option<String>, KernelError> {
        existing(self.list(&[], "table", table))
    }

    /// Lists one chain, such as `ip filter FORWARD`, with the handles of its rules; none where it does not exist.
    pub fn list_chain(&self, chain: &str) -> Result<Option<String>, KernelError> {
        existing(self.list(&["-a"], "chain", chain))
    }

    /// Lists the heads of all chains, by table.
    pub fn list_chains(&self) -> Result<String, KernelError> {
        self.list(&[], "chains", "")
    }

    fn list(&self, options: &[&str], kind: &str, name: &str) -> Result<String, KernelError> {
        let words = options.iter().copied().chain(["list", kind]).chain(name.split_whitespace());
        Ok(self.command(&words.collect::<Vec<_>>()).run()?.stdout)
    }

    fn command(&self, args: &[&str]) -> Command {
        Command::new(NFT, &self.launcher).args(args).limit(LIMIT)
    }
}

/// What nft says of a table that does not exist, and of a kernel without nftables; it has no exit status for that.
const NOTHING_THERE: [&str; 3] =
    ["No such file or directory", "Protocol not supported", "Operation not supported"];

fn existing(listed: Result<String, KernelError>) -> Result<Option<String>, KernelError> {
    match listed {
        Ok(text) => Ok(Some(text)),
        Err(KernelError::CommandFailed { stderr, .. })
            if NOTHING_THERE.iter().any(|words| stderr.contains(words)) =>
        {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}
