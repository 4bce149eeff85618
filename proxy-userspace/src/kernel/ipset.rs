//! The command ipset: one `ipset save` reads all sets, and one `ipset restore` changes them.

use std::{collections::BTreeMap, time::Duration};

use super::{
    KernelError,
    command::{Command, Launcher},
};

const PROGRAM: &str = "ipset";
/// With many thousand entries the command takes long.
const LIMIT: Duration = Duration::from_mins(2);

/// The command ipset.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ipset {
    launcher: Launcher,
}

/// A set as `ipset save` prints it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SavedSet {
    /// The type and options, which follow the name in the `create` line.
    pub definition: String,
    /// The entries.
    pub entries: Vec<String>,
}

impl Ipset {
    /// The command, started by this launcher.
    pub fn new(launcher: &Launcher) -> Self {
        Self { launcher: launcher.clone() }
    }

    /// Returns all sets, by name.
    pub fn save(&self) -> Result<BTreeMap<String, SavedSet>, KernelError> {
        Ok(parse(&self.command(&["save"]).run()?.stdout))
    }

    /// Returns the names of all sets.
    pub fn names(&self) -> Result<Vec<String>, KernelError> {
        let listed = self.command(&["list", "-name"]).run()?.stdout;
        Ok(listed.lines().map(String::from).collect())
    }

    /// Runs `ipset restore` with these lines. It stops at the first line that fails. It is not a
    /// failure to create a set or to add an entry that exists, or to delete an entry that does not
    /// exist.
    pub fn restore(&self, lines: String) -> Result<(), KernelError> {
        self.command(&["restore", "-exist"]).stdin(lines).run().map(drop)
    }

    /// Destroys sets. No rule may use them any more. Continues after errors and returns them all.
    pub fn destroy(&self, names: &[&str]) -> Vec<KernelError> {
        let lines: String = names.iter().flat_map(|name| ["destroy ", name, "\n"]).collect();
        if lines.is_empty() || self.restore(lines).is_ok() {
            return Vec::new();
        }
        // `ipset restore` stops at the first set that cannot be destroyed.
        let left = match self.names() {
            Ok(left) => left,
            Err(error) => return vec![error],
        };
        let left = left.iter().filter(|name| names.contains(&name.as_str()));
        left.filter_map(|name| self.command(&["destroy", name]).run().err()).collect()
    }

    fn command(&self, args: &[&str]) -> Command {
        Command::new(PROGRAM, &self.launcher).args(args).limit(LIMIT)
    }
}

pub(super) fn parse(text: &str) -> BTreeMap<String, SavedSet> {
    let mut sets: BTreeMap<String, SavedSet> = BTreeMap::new();
    for line in text.lines() {
        let mut words = line.splitn(3, ' ');
        let (Some(verb), Some(name), Some(rest)) = (words.next(), words.next(), words.next()) else {
            continue;
        };
        let set = sets.entry(name.to_owned()).or_default();
        match verb {
            "create" => rest.clone_into(&mut set.definition),
            "add" => set.entries.push(rest.to_owned()),
            _ => {}
        }
    }
    sets
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_are_parsed_with_their_entries() {
        let saved = parse(
            "create A hash:ip,port family inet hashsize 1024 maxelem 65536\nadd A 10.96.0.10,udp:53\n\
             add A 10.96.0.10,tcp:53\ncreate B bitmap:port range 0-65535\n",
        );
        assert_eq!(saved["A"].entries, ["10.96.0.10,udp:53", "10.96.0.10,tcp:53"]);
        assert_eq!(
            saved["B"],
            SavedSet { definition: "bitmap:port range 0-65535".into(), entries: Vec::new() }
        );
    }
}
