//! Parses what `nft -j list table` prints (libnftables-json(5)).

mod expression;
mod text;

use std::collections::BTreeMap;

use serde_json::Value;

use self::expression::{bits_changed, matches_of};
use super::ruleset::{Action, BaseChain, Chain, Family, Hook, Match, Rule, Source, Table};

/// Parses the tables in an output of `nft -j list table` or `nft -j list ruleset`.
pub fn parse(json: &str) -> Result<Vec<Table>, serde_json::Error> {
    let listing: Value = serde_json::from_str(json)?;
    let mut tables: Vec<Table> = Vec::new();
    let objects = listing["nftables"].as_array().into_iter().flatten();
    for (kind, object) in objects.filter_map(only_member) {
        match kind {
            "table" => tables.push(new_table(object)),
            "chain" => {
                let chain = parse_chain(object);
                find_table(&mut tables, object).chains.insert(chain.name.clone(), chain);
            }
            "rule" => {
                let rule = parse_rule(object, &listing);
                find_table(&mut tables, object).add_rule(&string(&object["chain"]), rule);
            }
            // Sets, maps, flowtables and so on matter only if a rule uses them.
            _ => {}
        }
    }
    Ok(tables)
}

/// Parses the output of `nft -j list tables`: family and name of each table.
pub fn parse_names(json: &str) -> Result<Vec<(String, String)>, serde_json::Error> {
    let listing: Value = serde_json::from_str(json)?;
    let objects = listing["nftables"].as_array().into_iter().flatten();
    let tables = objects.filter_map(only_member).filter(|(kind, _)| *kind == "table");
    Ok(tables.map(|(_, table)| (string(&table["family"]), string(&table["name"]))).collect())
}

/// Returns the only member of an object: nearly everything in this format is named so.
fn only_member(object: &Value) -> Option<(&str, &Value)> {
    let (name, value) = object.as_object()?.iter().next()?;
    Some((name, value))
}

fn string(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// A family that shunt does not know is judged as a bridge's, where nothing is allowed.
fn new_table(object: &Value) -> Table {
    let family = Family::parse(&string(&object["family"])).unwrap_or(Family::Bridge);
    Table { source: Source::Nft, family, name: string(&object["name"]), chains: BTreeMap::new() }
}

/// Returns the table of a chain or rule. A listing has the table first; otherwise it is added.
fn find_table<'a>(tables: &'a mut Vec<Table>, object: &Value) -> &'a mut Table {
    let mut wanted = new_table(object);
    wanted.name = string(&object["table"]);
    let known = tables.iter().position(|table| (table.family, &table.name) == (wanted.family, &wanted.name));
    let position = known.unwrap_or_else(|| {
        tables.push(wanted);
        tables.len() - 1
    });
    &mut tables[position]
}

fn parse_chain(object: &Value) -> Chain {
    let hook = object["hook"].as_str().map(|hook| match hook {
        "ingress" => Hook::Ingress,
        "prerouting" => Hook::Prerouting,
        "input" => Hook::Input,
        "forward" => Hook::Forward,
        "output" => Hook::Output,
        "postrouting" => Hook::Postrouting,
        "egress" => Hook::Egress,
        _ => Hook::Unknown,
    });
    let base = hook.map(|hook| BaseChain {
        hook,
        is_nat: object["type"] == "nat",
        // A priority that cannot be read is as good as the first.
        priority: object["prio"].as_i64().and_then(|prio| prio.try_into().ok()).unwrap_or(i32::MIN),
        accepts: object["policy"] == "accept",
    });
    Chain { name: string(&object["name"]), base, rules: Vec::new() }
}

fn parse_rule(object: &Value, listing: &Value) -> Rule {
    let mut rule = Rule::default();
    let statements = object["expr"].as_array().map(Vec::as_slice).unwrap_or_default();
    for statement in statements {
        match only_member(statement) {
            Some((kind, value)) => read_statement(kind, value, (object, listing), &mut rule),
            None => rule.actions.push(Action::Unknown(statement.to_string())),
        }
    }
    rule.text = text::of_statements(statements);
    rule
}

/// Reads a statement. `place` is its rule and the listing, for named maps.
fn read_statement(kind: &str, value: &Value, place: (&Value, &Value), rule: &mut Rule) {
    match kind {
        "match" => rule.matches.extend(matches_of(&value["left"], &value["op"], &value["right"])),
        "vmap" => {
            rule.matches.extend(matches_of(&value["key"], &Value::Null, &Value::Null));
            rule.actions.extend(verdicts_of(&value["data"], place));
        }
        "limit" => rule.matches.push(Match::Plain),
        "mangle" => rule.actions.push(change(&value["key"], &value["value"])),
        "xt" => {
            // An extension of iptables, whose options nft cannot show.
            let name = value["name"].as_str().map_or_else(|| "xt".to_owned(), |name| format!("xt {name}"));
            if value["type"] != "target" {
                rule.matches.push(Match::Unknown(name.clone()));
            }
            if value["type"] != "match" {
                rule.actions.push(Action::Unknown(name));
            }
        }
        "counter" | "continue" => {}
        _ => rule.actions.push(verdict(kind, value)),
    }
}

fn verdict(kind: &str, value: &Value) -> Action {
    match kind {
        "accept" => Action::Accept,
        "drop" | "reject" => Action::Drop,
        "return" => Action::Return,
        "jump" => Action::Jump(string(&value["target"])),
        "goto" => Action::Goto(string(&value["target"])),
        "log" => Action::Log,
        "masquerade" | "snat" => Action::SourceNat,
        "dnat" | "redirect" => Action::DestinationNat,
        other => Action::Unknown(other.into()),
    }
}

/// Returns the verdicts of a verdict map, which is written in the rule or has a name.
fn verdicts_of(data: &Value, (rule, listing): (&Value, &Value)) -> Vec<Action> {
    let unknown = || vec![Action::Unknown("vmap".into())];
    let elements = match data {
        Value::String(name) => named_map(name.trim_start_matches('@'), rule, listing),
        _ => data["set"].as_array(),
    };
    let Some(elements) = elements else { return unknown() };
    let verdicts = elements.iter().map(|element| {
        let (kind, value) = only_member(element.get(1)?)?;
        Some(verdict(kind, value)).filter(|_| kind != "continue")
    });
    verdicts.flatten().collect()
}

/// Returns the elements of a named map in the table of a rule. A map without elements decides
/// nothing; a map to which rules add elements has a type that nobody may add verdicts to.
fn named_map<'a>(name: &str, rule: &Value, listing: &'a Value) -> Option<&'a Vec<Value>> {
    static NONE: Vec<Value> = Vec::new();
    let maps = listing["nftables"].as_array()?.iter().filter_map(|object| object.get("map"));
    let map = maps.into_iter().find(|map| {
        map["name"] == name && map["table"] == rule["table"] && map["family"] == rule["family"]
    })?;
    map.get("elem").map_or(Some(&NONE), Value::as_array)
}

/// Returns what a `set` statement changes.
fn change(key: &Value, value: &Value) -> Action {
    match only_member(key) {
        Some(("meta", meta)) if meta["key"] == "mark" => Action::SetMark(bits_changed(key, value)),
        Some(("ct", ct)) if ct["key"] == "mark" => Action::ConnectionMark(bits_changed(key, value)),
        Some(("tcp option", _)) => Action::Modify,
        Some(("payload", payload))
            if matches!(payload["field"].as_str(), Some("ttl" | "hoplimit" | "dscp" | "ecn")) =>
        {
            Action::Modify
        }
        _ => Action::Unknown(format!("{} set", text::of_expression(key))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parses the statements of one rule in a chain, beside a verdict map `m`.
    fn rule(statements: &str) -> Rule {
        let json = format!(
            r#"{{"nftables": [{{"metainfo": {{}}}}, {{"table": {{"family": "inet", "name": "t", "handle": 1}}}},
            {{"map": {{"family": "inet", "name": "m", "table": "t", "type": "mark", "map": "verdict",
                "elem": [[80, {{"jump": {{"target": "a"}}}}], [81, {{"drop": null}}]]}}}},
            {{"rule": {{"family": "inet", "table": "t", "chain": "c", "expr": [{statements}]}}}}]}}"#
        );
        parse(&json).expect("valid")[0].chains["c"].rules[0].clone()
    }

    fn matched(left: &str, op: &str, right: &str) -> Vec<Match> {
        rule(&format!(r#"{{"match": {{"op": "{op}", "left": {left}, "right": {right}}}}}"#)).matches
    }

    #[test]
    fn a_base_chain_has_hook_priority_and_policy() {
        let json = r#"{"nftables": [{"table": {"family": "inet", "name": "t"}}, {"chain": {"family": "inet",
            "table": "t", "name": "c", "type": "nat", "hook": "prerouting", "prio": -90, "policy": "drop"}}]}"#;
        let tables = parse(json).expect("valid");
        assert_eq!(tables[0].to_string(), "nft inet t");
        let base = BaseChain { hook: Hook::Prerouting, is_nat: true, priority: -90, accepts: false };
        assert_eq!(tables[0].chains["c"].base, Some(base));
    }

    #[test]
    fn addresses_and_ports_are_told_apart() {
        let field =
            |protocol, field| format!(r#"{{"payload": {{"protocol": "{protocol}", "field": "{field}"}}}}"#);
        assert_eq!(matched(&field("ip", "saddr"), "==", r#""1.2.3.4""#), [Match::Source]);
        assert_eq!(matched(&field("ip6", "daddr"), "==", r#""::1""#), [Match::Destination]);
        assert_eq!(matched(&field("ip", "ttl"), "==", "1"), [Match::Plain]);
        let ports = r#"{"set": [80, {"range": [90, 99]}]}"#;
        assert_eq!(
            matched(&field("tcp", "dport"), "==", ports),
            [Match::DestinationPorts(vec![80..=80, 90..=99])]
        );
        assert_eq!(matched(&field("th", "dport"), "!=", "80"), [Match::Destination]);
        assert_eq!(matched(&field("th", "dport"), "==", r#""@s""#), [Match::Destination]);
        let both = format!(r#"{{"concat": [{}, {}]}}"#, field("ip", "saddr"), field("tcp", "dport"));
        assert_eq!(matched(&both, "==", r#""@s""#), [Match::Source, Match::Destination]);
        let raw = r#"{"payload": {"base": "th", "offset": 16, "len": 16}}"#;
        assert_eq!(matched(raw, "==", "80"), [Match::Unknown("payload".into())]);
    }

    #[test]
    fn connections_and_routes_are_told_apart() {
        assert_eq!(matched(r#"{"ct": {"key": "state"}}"#, "in", r#""new""#), [Match::ConnectionState]);
        assert_eq!(matched(r#"{"ct": {"key": "status"}}"#, "in", r#""dnat""#), [Match::Translation]);
        let original = r#"{"ct": {"key": "ip daddr", "dir": "original"}}"#;
        assert_eq!(matched(original, "==", r#""1.2.3.4""#), [Match::OriginalDestination]);
        let kind = r#"{"fib": {"result": "type", "flags": ["daddr"]}}"#;
        assert_eq!(matched(kind, "==", r#""local""#), [Match::LocalDestination]);
        assert_eq!(matched(kind, "!=", r#""local""#), [Match::Destination]);
        let route = r#"{"fib": {"result": "oif", "flags": ["saddr", "iif"]}}"#;
        assert_eq!(matched(route, "==", "false"), [Match::ReversePath]);
    }

    #[test]
    fn marks_have_their_masks() {
        let mark = r#"{"meta": {"key": "mark"}}"#;
        assert_eq!(matched(&format!(r#"{{"&": [{mark}, 64]}}"#), "==", "64"), [Match::Mark(64)]);
        assert_eq!(matched(mark, "==", "64"), [Match::Mark(u32::MAX)]);
        let set =
            |value: &str| rule(&format!(r#"{{"mangle": {{"key": {mark}, "value": {value}}}}}"#)).actions;
        assert_eq!(set(&format!(r#"{{"|": [{mark}, 64]}}"#)), [Action::SetMark(64)]);
        let cleared = format!(r#"{{"|": [{{"&": [{mark}, 4294967280]}}, 1]}}"#);
        assert_eq!(set(&cleared), [Action::SetMark(15)]);
        assert_eq!(set("5"), [Action::SetMark(u32::MAX)]);
    }

    #[test]
    fn verdict_maps_have_all_their_verdicts() {
        let state = r#"{"ct": {"key": "state"}}"#;
        let written = rule(&format!(
            r#"{{"vmap": {{"key": {state}, "data": {{"set": [["established", {{"accept": null}}]]}}}}}}"#
        ));
        assert_eq!((written.matches, written.actions), (vec![Match::ConnectionState], vec![Action::Accept]));
        let named = |name| rule(&format!(r#"{{"vmap": {{"key": {state}, "data": "{name}"}}}}"#)).actions;
        assert_eq!(named("@m"), [Action::Jump("a".into()), Action::Drop]);
        assert_eq!(named("@gone"), [Action::Unknown("vmap".into())]);
    }

    #[test]
    fn what_is_not_known_has_its_name() {
        assert_eq!(rule(r#"{"notrack": null}"#).actions, [Action::Unknown("notrack".into())]);
        assert_eq!(
            rule(r#"{"flow": {"op": "add", "flowtable": "@f"}}"#).actions,
            [Action::Unknown("flow".into())]
        );
        let extension = rule(r#"{"xt": {"type": "match", "name": "bpf"}}, {"drop": null}"#);
        assert_eq!(extension.matches, [Match::Unknown("xt bpf".into())]);
        assert_eq!(extension.actions, [Action::Drop]);
        let hidden = rule(r#"{"xt": null}"#);
        assert_eq!((hidden.matches.len(), hidden.actions.len()), (1, 1));
    }

    #[test]
    fn a_rule_is_printed_as_nft_prints_it() {
        let text = rule(
            r#"{"match": {"op": "!=", "left": {"payload": {"protocol": "tcp", "field": "dport"}}, "right": 80}},
            {"match": {"op": "in", "left": {"ct": {"key": "status"}}, "right": "dnat"}},
            {"counter": {"packets": 1, "bytes": 2}}, {"jump": {"target": "a"}}"#,
        )
        .text;
        assert_eq!(text, "tcp dport != 80 ct status dnat counter jump a");
    }
}
