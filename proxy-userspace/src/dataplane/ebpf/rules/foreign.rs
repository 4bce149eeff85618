//! iptables' FORWARD chain in nftables, where no iptables command is installed: our chain beside it, through nft.

use super::Marks;
use crate::kernel::iptables::Family;

const CHAIN: &str = "SHUNT-FORWARD";

/// The chain to ask nft for.
pub(super) fn forward_chain(family: Family) -> String {
    format!("{} filter FORWARD", family.nft())
}

/// The chain of ours.
pub(super) fn own_chain(family: Family) -> String {
    format!("{} filter {CHAIN}", family.nft())
}

/// The script that lets Services' traffic through, if this listing of FORWARD keeps any back and ours is not there.
pub(super) fn repair(family: Family, forward: &str, own: Option<&str>, marks: Marks) -> Option<String> {
    let table = format!("{} filter", family.nft());
    let rules = rules(forward);
    let is_ruled = forward.contains("policy drop") || rules.iter().any(|rule| !rule.contains(CHAIN));
    let jumps = rules.iter().any(|rule| rule.contains(CHAIN));
    let comment = comment(marks);
    let is_whole = own.is_some_and(|own| own.matches(&comment).count() == 2);
    if jumps && is_whole || !is_ruled && own.is_none() {
        return None;
    }
    let masquerade = format!("{:#010x}", marks.masquerade);
    let jump = if jumps { "" } else { &*format!("insert rule {table} FORWARD counter jump {CHAIN}\n") };
    Some(format!(
        r#"add chain {table} {CHAIN}
flush chain {table} {CHAIN}
add rule {table} {CHAIN} meta mark & {masquerade} != 0 counter accept comment "{comment}"
add rule {table} {CHAIN} ct state established,related counter accept comment "{comment}"
{jump}"#
    ))
}

/// The script that removes the chain of ours, and the jumps to it that a listing of FORWARD with handles shows.
pub(super) fn removal(family: Family, forward: &str) -> String {
    let table = format!("{} filter", family.nft());
    let handles = rules(forward).into_iter().filter(|rule| rule.contains(CHAIN));
    let handles = handles.filter_map(|rule| rule.rsplit_once("# handle ")).map(|(_, handle)| handle.trim());
    let jumps = handles.map(|handle| format!("delete rule {table} FORWARD handle {handle}\n"));
    let jumps = jumps.collect::<Vec<_>>().concat();
    format!("{jumps}flush chain {table} {CHAIN}\ndelete chain {table} {CHAIN}\n")
}

fn comment(marks: Marks) -> String {
    format!("shunt: traffic of Services ({:#x})", marks.masquerade)
}

/// The rules in a listing of one chain.
fn rules(listing: &str) -> Vec<&str> {
    let lines = listing.lines().map(str::trim);
    lines
        .filter(|line| {
            !["table ", "chain ", "type ", "}"].iter().any(|head| line.starts_with(head)) && !line.is_empty()
        })
        .collect()
}
