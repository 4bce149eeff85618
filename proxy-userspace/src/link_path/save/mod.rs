//! Parses what `iptables-save` and `ip6tables-save` print, on both backends.

mod options;

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::RangeInclusive,
};

use self::options::Reading;
use super::ruleset::{Action, BaseChain, Chain, Family, Hook, Match, Rule, Source, Table};

/// Parses the tables in an output of `iptables-save`. Lines that are no table, chain or rule are
/// left out: comments, and the end of a table.
pub fn parse(saved: &str, source: Source, family: Family) -> Vec<Table> {
    let mut tables: Vec<Table> = Vec::new();
    for line in saved.lines().map(str::trim_end) {
        if let Some(name) = line.strip_prefix('*') {
            tables.push(Table { source, family, name: name.into(), chains: BTreeMap::new() });
        }
        let Some(table) = tables.last_mut() else { continue };
        if let Some(chain) = line.strip_prefix(':') {
            let chain = declared_chain(&table.name, chain);
            table.chains.extend(chain.map(|chain| (chain.name.clone(), chain)));
        } else if let Some((chain, text)) = rule_line(line) {
            table.add_rule(chain, parse_rule(text));
        }
    }
    tables.iter_mut().for_each(resolve_jumps);
    tables
}

/// Parses `FORWARD DROP [0:0]`.
fn declared_chain(table: &str, line: &str) -> Option<Chain> {
    let mut words = line.split_whitespace();
    let name = words.next()?;
    let policy = words.next()?;
    Some(Chain { name: name.into(), base: base_chain(table, name, policy), rules: Vec::new() })
}

/// Returns where the kernel calls a built-in chain. The priorities are those of
/// `include/uapi/linux/netfilter_ipv4.h`.
fn base_chain(table: &str, chain: &str, policy: &str) -> Option<BaseChain> {
    let hook = match chain {
        "PREROUTING" => Hook::Prerouting,
        "INPUT" => Hook::Input,
        "FORWARD" => Hook::Forward,
        "OUTPUT" => Hook::Output,
        "POSTROUTING" => Hook::Postrouting,
        _ => return None,
    };
    let priority = match (table, hook) {
        ("raw", _) => -300,
        ("mangle", _) => -150,
        ("nat", Hook::Prerouting | Hook::Output) => -100,
        ("nat", _) => 100,
        ("security", _) => 50,
        _ => 0,
    };
    Some(BaseChain { hook, is_nat: table == "nat", priority, accepts: policy == "ACCEPT" })
}

/// Returns chain and rule of `-A CHAIN RULE`, which may follow counters in brackets.
fn rule_line(line: &str) -> Option<(&str, &str)> {
    let line = if line.starts_with('[') { line.split_once("] ")?.1 } else { line };
    let rest = line.strip_prefix("-A ")?;
    Some(rest.split_once(' ').unwrap_or((rest, "")))
}

/// Targets that are chains of the table become jumps.
fn resolve_jumps(table: &mut Table) {
    let names: BTreeSet<String> = table.chains.keys().cloned().collect();
    let rules = table.chains.values_mut().flat_map(|chain| &mut chain.rules);
    let actions = rules.flat_map(|rule| &mut rule.actions);
    for action in actions {
        if let Action::Unknown(name) = action
            && names.contains(name)
        {
            *action = Action::Jump(name.clone());
        }
    }
}

/// Parses a rule without its chain.
fn parse_rule(text: &str) -> Rule {
    let words = split_words(text);
    let mut reader = Reader { words: &words, module: "", is_negated: false, rule: Rule::default() };
    while reader.next() {}
    Rule { text: text.into(), ..reader.rule }
}

/// Splits a rule into words. Words in quotes may contain spaces, and a backslash keeps the next
/// character as it is.
fn split_words(text: &str) -> Vec<String> {
    let (mut words, mut word, mut is_quoted, mut is_word) = (Vec::new(), String::new(), false, false);
    let mut characters = text.chars();
    while let Some(c) = characters.next() {
        match c {
            '"' => (is_quoted, is_word) = (!is_quoted, true),
            '\\' => word.extend(characters.next()),
            ' ' if !is_quoted => {
                if is_word || !word.is_empty() {
                    words.push(std::mem::take(&mut word));
                }
                is_word = false;
            }
            _ => word.push(c),
        }
    }
    if is_word || !word.is_empty() {
        words.push(word);
    }
    words
}

/// Reads a rule from left to right.
struct Reader<'a> {
    /// What is not read yet.
    words: &'a [String],
    /// The match of the last `-m`.
    module: &'a str,
    /// A `!` came last.
    is_negated: bool,
    rule: Rule,
}

impl<'a> Reader<'a> {
    fn take(&mut self) -> Option<&'a str> {
        let (first, rest) = self.words.split_first()?;
        self.words = rest;
        Some(first)
    }

    /// Reads an option with its arguments. Returns false at the end of the rule.
    fn next(&mut self) -> bool {
        let Some(word) = self.take() else { return false };
        match word {
            "!" => {
                self.is_negated = true;
                return true;
            }
            "-m" => self.begin_match(),
            "-j" => {
                let target = self.take().unwrap_or_default();
                let action = read_target(target, self.words);
                self.rule.actions.extend(action);
                return false;
            }
            "-g" => {
                let target = self.take().unwrap_or_default();
                self.rule.actions.push(Action::Goto(target.into()));
                return false;
            }
            option => self.read_option(option),
        }
        self.is_negated = false;
        true
    }

    fn begin_match(&mut self) {
        self.module = self.take().unwrap_or_default();
        if self.module == "rpfilter" {
            self.rule.matches.push(Match::ReversePath);
        } else if !options::knows_match(self.module) && self.module != "eui64" {
            self.rule.matches.push(Match::Unknown(self.module.into()));
        }
    }

    fn read_option(&mut self, option: &str) {
        let Some((count, reading)) = options::find(self.module, option) else {
            self.rule.matches.push(Match::Unknown(option.into()));
            return;
        };
        let end = count.min(self.words.len());
        let (arguments, rest) = self.words.split_at(end);
        self.words = rest;
        let argument = arguments.last().map_or("", String::as_str);
        self.rule.matches.extend(read_match(reading, argument, self.is_negated));
    }
}

fn read_match(reading: Reading, argument: &str, is_negated: bool) -> Option<Match> {
    let parts = || argument.split(',');
    let destination_if = |has: bool| if has { Match::Destination } else { Match::Source };
    Some(match reading {
        Reading::Nothing => return None,
        Reading::Plain => Match::Plain,
        Reading::Source => Match::Source,
        Reading::Ports if is_negated => Match::Destination,
        Reading::Ports => ports(argument).map_or(Match::Destination, Match::DestinationPorts),
        Reading::DestinationType if argument == "LOCAL" && !is_negated => Match::LocalDestination,
        Reading::Destination | Reading::DestinationType => Match::Destination,
        Reading::Set => destination_if(parts().any(|part| part != "src")),
        Reading::Fields => destination_if(parts().any(|part| part.starts_with("dst"))),
        Reading::Mark => Match::Mark(mask(argument)),
        Reading::ConnectionMark => Match::ConnectionMark(mask(argument)),
        Reading::State if parts().any(|state| matches!(state, "DNAT" | "SNAT")) => Match::Translation,
        Reading::State => Match::ConnectionState,
        Reading::ConnectionAddress => Match::ConnectionAddress,
        Reading::OriginalDestination => Match::OriginalDestination,
        Reading::ReversePath => Match::ReversePath,
    })
}

/// Parses a list of ports and ranges, such as `80,8000:8080`.
fn ports(list: &str) -> Option<Vec<RangeInclusive<u16>>> {
    let range = |part: &str| {
        let (low, high) = part.split_once(':').unwrap_or((part, part));
        Some(low.parse().ok()?..=high.parse().ok()?)
    };
    list.split(',').map(range).collect()
}

/// Returns the mask of `0x4000/0xc000`; all bits if there is none, or if it is not understood.
fn mask(argument: &str) -> u32 {
    argument.split_once('/').and_then(|(_, mask)| number(mask)).unwrap_or(u32::MAX)
}

fn number(text: &str) -> Option<u32> {
    text.strip_prefix("0x").map_or_else(|| text.parse().ok(), |digits| u32::from_str_radix(digits, 16).ok())
}

/// Returns the bits that `--set-xmark 0x1/0x3` changes: those of the value and those of the mask.
fn changed_bits(argument: &str) -> u32 {
    let value = argument.split_once('/').and_then(|(value, _)| number(value)).unwrap_or(u32::MAX);
    value | mask(argument)
}

/// Reads a target with its options. `None` is returned for targets that do nothing.
fn read_target(target: &str, options: &[String]) -> Option<Action> {
    let option = |name: &str| {
        let position = options.iter().position(|option| option == name)?;
        options.get(position + 1).map(String::as_str)
    };
    Some(match target {
        "" => return None,
        "ACCEPT" => Action::Accept,
        "DROP" | "REJECT" => Action::Drop,
        "RETURN" => Action::Return,
        "MARK" => Action::SetMark(option("--set-xmark").map_or(u32::MAX, changed_bits)),
        "CONNMARK" => {
            let copied = |name| option(name).and_then(number).unwrap_or(u32::MAX);
            let both = copied("--nfmask") | copied("--ctmask");
            Action::ConnectionMark(option("--set-xmark").map_or(both, changed_bits))
        }
        "LOG" | "NFLOG" => Action::Log,
        "TCPMSS" | "DSCP" | "TOS" | "TTL" | "HL" | "CLASSIFY" | "CHECKSUM" => Action::Modify,
        "MASQUERADE" | "SNAT" => Action::SourceNat,
        "DNAT" | "REDIRECT" => Action::DestinationNat,
        // A chain, or a target that shunt does not know.
        other => Action::Unknown(other.into()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(text: &str) -> (Vec<Match>, Vec<Action>) {
        let rule = parse_rule(text);
        (rule.matches, rule.actions)
    }

    #[test]
    fn a_table_has_its_chains_policies_and_jumps() {
        let saved = "# comment\n*raw\n:PREROUTING DROP [1:2]\n:mine - [0:0]\n\
                     [3:4] -A PREROUTING -i eth0 -j mine\n-A mine -g later\n-A mine -j TPROXY\nCOMMIT\n";
        let tables = parse(saved, Source::IptablesNft, Family::Ip6);
        assert_eq!(tables.len(), 1);
        assert_eq!(tables[0].to_string(), "ip6tables-nft raw");
        let base = tables[0].chain("PREROUTING").and_then(|chain| chain.base).expect("built in");
        assert_eq!(base, BaseChain { hook: Hook::Prerouting, is_nat: false, priority: -300, accepts: false });
        let rule = &tables[0].chains["PREROUTING"].rules[0];
        assert_eq!(rule.actions, [Action::Jump("mine".into())]);
        assert_eq!(rule.text, "-i eth0 -j mine");
        let mine = &tables[0].chains["mine"];
        assert_eq!(mine.base, None);
        assert_eq!(mine.rules[0].actions, [Action::Goto("later".into())]);
        assert_eq!(mine.rules[1].actions, [Action::Unknown("TPROXY".into())]);
    }

    #[test]
    fn comments_with_spaces_quotes_and_options_are_one_word() {
        let (matches, actions) = rule(r#"-m comment --comment "a \"-j\" DNAT" -j ACCEPT"#);
        assert_eq!((matches, actions), (Vec::new(), vec![Action::Accept]));
    }

    #[test]
    fn destination_ports_are_known_unless_negated() {
        let (matches, _) = rule("-p tcp -m multiport --dports 80,8000:8080 -j DROP");
        assert_eq!(matches, [Match::Plain, Match::DestinationPorts(vec![80..=80, 8000..=8080])]);
        let (matches, _) = rule("-p tcp -m tcp ! --dport 80 -j DROP");
        assert_eq!(matches, [Match::Plain, Match::Destination]);
    }

    #[test]
    fn local_destinations_are_known_unless_negated() {
        assert_eq!(rule("-m addrtype --dst-type LOCAL -j DROP").0, [Match::LocalDestination]);
        assert_eq!(rule("-m addrtype ! --dst-type LOCAL -j DROP").0, [Match::Destination]);
        assert_eq!(rule("-m addrtype --src-type LOCAL -j DROP").0, [Match::Source]);
    }

    #[test]
    fn sets_are_sources_or_destinations_by_their_parts() {
        assert_eq!(rule("-m set ! --match-set pods src -j DROP").0, [Match::Source]);
        assert_eq!(rule("-m set --match-set pods src,dst -j DROP").0, [Match::Destination]);
    }

    #[test]
    fn marks_have_their_masks() {
        assert_eq!(
            rule("-m mark ! --mark 0x4000/0xc000 -j MARK --set-xmark 0x1/0x2"),
            (vec![Match::Mark(0xc000)], vec![Action::SetMark(3)])
        );
        assert_eq!(rule("-m mark --mark 0x4000 -j RETURN").0, [Match::Mark(u32::MAX)]);
        let restore = rule("-i eni+ -j CONNMARK --restore-mark --nfmask 0x80 --ctmask 0x80").1;
        assert_eq!(restore, [Action::ConnectionMark(0x80)]);
        assert_eq!(rule("-j CONNMARK --save-mark").1, [Action::ConnectionMark(u32::MAX)]);
    }

    #[test]
    fn translated_connections_are_told_from_states() {
        assert_eq!(rule("-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT").0, [Match::ConnectionState]);
        assert_eq!(rule("-m conntrack ! --ctstate NEW,DNAT -j ACCEPT").0, [Match::Translation]);
        assert_eq!(rule("-m conntrack --ctorigdstport 80 -j ACCEPT").0, [Match::OriginalDestination]);
    }

    #[test]
    fn what_is_not_known_has_its_name() {
        assert_eq!(rule("-m bpf --bytecode 1 -j DROP").0[0], Match::Unknown("bpf".into()));
        assert_eq!(rule("-m conntrack --ctstatus ASSURED -j DROP").0[0], Match::Unknown("--ctstatus".into()));
        assert_eq!(rule("-j CT --notrack").1, [Action::Unknown("CT".into())]);
    }

    #[test]
    fn a_rule_that_only_counts_does_nothing() {
        assert_eq!(rule("-m nfacct --nfacct-name x"), (Vec::new(), Vec::new()));
    }
}
