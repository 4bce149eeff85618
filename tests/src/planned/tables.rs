//! iptables tables as text: the result of applying iptables-restore inputs.

use std::collections::BTreeMap;

/// Rules by table and chain, without `-A` and the chain.
#[derive(Clone, Debug, Default)]
pub struct Tables {
    chains: BTreeMap<(String, String), Vec<String>>,
}

impl Tables {
    /// Applies an input as `iptables-restore --noflush` does. Panics if iptables-restore would
    /// reject it.
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
                    // Built-in chains always exist.
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
                _ => panic!("iptables-restore would reject this line: {line}"),
            }
        }
        self.check();
    }

    fn chain(&mut self, table: &str, chain: &str) -> &mut Vec<String> {
        self.chains
            .get_mut(&key(table, chain))
            .unwrap_or_else(|| panic!("the chain {chain} does not exist in the table {table}"))
    }

    /// Panics if a rule jumps to a chain that does not exist.
    fn check(&self) {
        for ((table, chain), rule) in self.rules() {
            let Some(target) = target(rule).filter(|target| target.starts_with("KUBE-")) else { continue };
            assert!(self.chains.contains_key(&key(table, target)), "{table} {chain}: {rule}: no such chain");
        }
    }

    /// Returns all rules with their table and chain.
    pub fn rules(&self) -> impl Iterator<Item = ((&str, &str), &str)> {
        self.chains.iter().flat_map(|((table, chain), rules)| {
            rules.iter().map(move |rule| ((table.as_str(), chain.as_str()), rule.as_str()))
        })
    }

    /// Returns the rules of a chain. Empty if the chain does not exist.
    pub fn chain_rules(&self, table: &str, chain: &str) -> &[String] {
        self.chains.get(&key(table, chain)).map_or(&[], Vec::as_slice)
    }
}

fn key(table: &str, chain: &str) -> (String, String) {
    (table.to_owned(), chain.to_owned())
}

/// Returns the target of a rule.
pub fn target(rule: &str) -> Option<&str> {
    let words = rule.rsplit_once('"').map_or(rule, |(_, after)| after);
    let (_, after) = words.rsplit_once("-j ")?;
    after.split(' ').next()
}
