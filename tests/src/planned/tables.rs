//! iptables' tables as text: what iptables-restore makes of its input.

use std::collections::BTreeMap;

/// Rules by table and chain, without their `-A` and chain.
#[derive(Clone, Debug, Default)]
pub struct Tables {
    chains: BTreeMap<(String, String), Vec<String>>,
}

impl Tables {
    /// Takes an input in, as `iptables-restore --noflush` does. What it refuses ends the test.
    pub fn restore(&mut self, input: &str) {
        let mut table = "";
        for line in input.lines() {
            let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
            match word {
                "COMMIT" | "-S" => {}
                "-A" => {
                    let (chain, rule) = rest.split_once(' ').expect("a rule");
                    self.chain(table, chain).push(rule.to_owned());
                }
                "-I" => {
                    let (chain, rule) = rest.split_once(' ').expect("a rule");
                    // Built-in chains are always there.
                    self.chains.entry(key(table, chain)).or_default().insert(0, rule.to_owned());
                }
                "-X" => {
                    assert!(self.chain(table, rest).is_empty(), "{rest} is not empty");
                    self.chains.remove(&key(table, rest));
                }
                _ if word.starts_with('*') => table = &word[1..],
                _ if word.starts_with(':') => {
                    self.chains.insert(key(table, &word[1..]), Vec::new());
                }
                _ => panic!("a line that iptables-restore would not take: {line}"),
            }
        }
        self.check();
    }

    fn chain(&mut self, table: &str, chain: &str) -> &mut Vec<String> {
        self.chains.get_mut(&key(table, chain)).unwrap_or_else(|| panic!("there is no {table} {chain}"))
    }

    /// Every rule leads to a chain that is there.
    fn check(&self) {
        for ((table, chain), rule) in self.rules() {
            let Some(target) = target(rule).filter(|target| target.starts_with("KUBE-")) else { continue };
            assert!(self.chains.contains_key(&key(table, target)), "{table} {chain}: {rule}: no such chain");
        }
    }

    /// All rules, with their table and chain.
    pub fn rules(&self) -> impl Iterator<Item = ((&str, &str), &str)> {
        self.chains.iter().flat_map(|((table, chain), rules)| {
            rules.iter().map(move |rule| ((table.as_str(), chain.as_str()), rule.as_str()))
        })
    }

    /// The rules of a chain; none of one that is not there.
    pub fn of(&self, table: &str, chain: &str) -> &[String] {
        self.chains.get(&key(table, chain)).map_or(&[], Vec::as_slice)
    }
}

fn key(table: &str, chain: &str) -> (String, String) {
    (table.to_owned(), chain.to_owned())
}

/// The target of a rule.
pub fn target(rule: &str) -> Option<&str> {
    let words = rule.rsplit_once('"').map_or(rule, |(_, after)| after);
    let (_, after) = words.rsplit_once("-j ")?;
    after.split(' ').next()
}
