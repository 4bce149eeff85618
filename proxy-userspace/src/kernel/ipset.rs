//! ipsets, through `ipset save` and `ipset restore`: one process each, whatever the number of sets and entries.

use std::{collections::BTreeMap, time::Duration};

use super::{
    KernelError,
    command::{Command, Launcher},
};

const PROGRAM: &str = "ipset";
/// With many thousand entries it takes its time.
const LIMIT: Duration = Duration::from_mins(2);

/// The command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ipset {
    launcher: Launcher,
}

/// What `ipset save` prints of a set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Saved {
    /// What follows its name where it is made: its type and options.
    pub made_as: String,
    /// Its entries.
    pub entries: Vec<String>,
}

impl Ipset {
    /// The command of this path.
    pub fn new(launcher: &Launcher) -> Self {
        Self { launcher: launcher.clone() }
    }

    /// All sets by name.
    pub fn save(&self) -> Result<BTreeMap<String, Saved>, KernelError> {
        Ok(parse(&self.command(&["save"]).run()?.stdout))
    }

    /// The names of all sets.
    pub fn names(&self) -> Result<Vec<String>, KernelError> {
        let listed = self.command(&["list", "-name"]).run()?.stdout;
        Ok(listed.lines().map(String::from).collect())
    }

    /// Makes the changes that these lines say, in the words of `ipset restore`, and stops at the first that fails. To make or
    /// add what is there already, and to delete what is not, is no failure.
    pub fn restore(&self, lines: String) -> Result<(), KernelError> {
        self.command(&["restore", "-exist"]).stdin(lines).run().map(drop)
    }

    /// Removes a set. Nothing may use it any more.
    pub fn destroy(&self, name: &str) -> Result<(), KernelError> {
        self.command(&["destroy", name]).run().map(drop)
    }

    fn command(&self, args: &[&str]) -> Command {
        Command::new(PROGRAM, &self.launcher).args(args).limit(LIMIT)
    }
}

fn parse(text: &str) -> BTreeMap<String, Saved> {
    let mut sets: BTreeMap<String, Saved> = BTreeMap::new();
    for line in text.lines() {
        let mut words = line.splitn(3, ' ');
        let (Some(verb), Some(name), Some(rest)) = (words.next(), words.next(), words.next()) else {
            continue;
        };
        let set = sets.entry(name.to_owned()).or_default();
        match verb {
            "create" => rest.clone_into(&mut set.made_as),
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
    fn sets_are_read_with_their_entries() {
        let saved = parse(
            "create A hash:ip,port family inet hashsize 1024 maxelem 65536\nadd A 10.96.0.10,udp:53\n\
             add A 10.96.0.10,tcp:53\ncreate B bitmap:port range 0-65535\n",
        );
        assert_eq!(saved["A"].entries, ["10.96.0.10,udp:53", "10.96.0.10,tcp:53"]);
        assert_eq!(saved["B"], Saved { made_as: "bitmap:port range 0-65535".into(), entries: Vec::new() });
    }
}
