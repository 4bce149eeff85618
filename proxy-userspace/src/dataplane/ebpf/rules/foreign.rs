//! shunt's rules in iptables' FORWARD chain if no iptables command is installed: nft changes the
//! chain, which is in nftables.

use super::Marks;
use crate::model::IpFamily;

const CHAIN: &str = "SHUNT-FORWARD";

const fn table(family: IpFamily) -> &'static str {
    match family {
        IpFamily::V4 => "ip filter",
        IpFamily::V6 => "ip6 filter",
    }
}

/// The name of the FORWARD chain, for nft.
pub(super) fn forward_chain(family: IpFamily) -> String {
    format!("{} FORWARD", table(family))
}

/// The name of shunt's chain, for nft.
pub(super) fn own_chain(family: IpFamily) -> String {
    format!("{} {CHAIN}", table(family))
}

/// Returns the script that accepts traffic of Services; `None` if it is accepted already. `forward`
/// is a listing of FORWARD, `own` a listing of shunt's chain.
pub(super) fn repair(family: IpFamily, forward: &str, own: Option<&str>, marks: Marks) -> Option<String> {
    let table = table(family);
    let rules = rules(forward);
    let filters = forward.contains("policy drop") || rules.iter().any(|rule| !rule.contains(CHAIN));
    let has_jump = rules.iter().any(|rule| rule.contains(CHAIN));
    let comment = format!("shunt: traffic of Services ({:#x})", marks.masquerade);
    let is_whole = own.is_some_and(|own| own.matches(&comment).count() == 2);
    if has_jump && is_whole || !filters && own.is_none() {
        return None;
    }
    let masquerade = format!("{:#010x}", marks.masquerade);
    let jump = if has_jump { "" } else { &*format!("insert rule {table} FORWARD counter jump {CHAIN}\n") };
    Some(format!(
        r#"add chain {table} {CHAIN}
flush chain {table} {CHAIN}
add rule {table} {CHAIN} meta mark & {masquerade} != 0 counter accept comment "{comment}"
add rule {table} {CHAIN} ct state established,related counter accept comment "{comment}"
{jump}"#
    ))
}

/// Returns the script that removes shunt's chain, and the jumps to it in a listing of FORWARD with
/// handles.
pub(super) fn removal(family: IpFamily, forward: &str) -> String {
    let table = table(family);
    let jumps = rules(forward).into_iter().filter(|rule| rule.contains(CHAIN));
    let handles = jumps.filter_map(|rule| rule.rsplit_once("# handle ")).map(|(_, handle)| handle.trim());
    let mut lines: Vec<String> =
        handles.map(|handle| format!("delete rule {table} FORWARD handle {handle}\n")).collect();
    lines.push(format!("flush chain {table} {CHAIN}\ndelete chain {table} {CHAIN}\n"));
    lines.concat()
}

/// Returns the rules in a listing of one chain.
fn rules(listing: &str) -> Vec<&str> {
    let is_rule = |line: &&str| {
        !line.is_empty() && !["table ", "chain ", "type ", "}"].iter().any(|head| line.starts_with(head))
    };
    listing.lines().map(str::trim).filter(is_rule).collect()
}
