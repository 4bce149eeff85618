//! The rules as one nftables table: the script that creates it, and the check of a listing.

use super::{MASQUERADED_PORTS, Marks};

/// The table, with its nftables family.
pub(super) const TABLE: &str = "inet shunt";
const POSTROUTING: &str = "postrouting";

/// What the table has at the hook where netfilter masquerades.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Nat {
    /// The rules that masquerade.
    Masquerade,
    /// An empty chain of type `nat`, because the link programs masquerade. Conntrack still
    /// translates connections, and it does that only while there is such a chain.
    Keep,
    /// Nothing, and no rule of the table needs conntrack. The kernel then tracks no connections,
    /// unless other programs want it to.
    Nothing,
}

/// Returns the script that creates the table in one transaction. If it `exists`, the script
/// replaces it.
///
/// - shunt masquerades before others do (`srcnat`, the priority of iptables' nat table too). The
///   first one decides for the connection. A CNI that masquerades pods with another address than
///   the node's must not decide for clients of a Service.
/// - Masqueraded datagrams leave only from ports of [`MASQUERADED_PORTS`].
/// - Packets are refused after conntrack (`raw` < conntrack < `mangle`), so that the answer belongs
///   to the connection. Kernel 5.10 (f53b9b0bdc59) is the first that can refuse before routing. The
///   node may have no route to a VIP.
/// - Packets that conntrack calls invalid are dropped, not masqueraded: they would leave with the
///   client's address, and the endpoint would reset a connection that it does not know
///   (kubernetes/kubernetes#74839).
/// - Rules of another mode may have translated a connection that the programs do not know.
///   Conntrack continues to translate it without those rules, so it is not refused. A connection
///   that IPVS carries is not refused either, until it is handed over to conntrack.
pub(super) fn script(marks: Marks, nat: Nat, exists: bool) -> String {
    let reject = marks.reject;
    let removal = if exists { format!("delete table {TABLE}\n") } else { String::new() };
    let [refused_tcp, refused, to_refuse] = refusal_comments(marks);
    let (exempt, masquerading) = match nat {
        Nat::Masquerade => (exemptions(marks), masquerade_chains(marks)),
        Nat::Keep => {
            let chain = "type nat hook postrouting priority srcnat - 1; policy accept;";
            (exemptions(marks), format!("\tchain {POSTROUTING} {{\n\t\t{chain}\n\t}}\n"))
        }
        Nat::Nothing => (String::new(), String::new()),
    };
    format!(
        r#"{removal}table {TABLE} {{
	chain refuse {{
{exempt}		meta l4proto tcp reject with tcp reset comment "{refused_tcp}"
		reject with icmpx type port-unreachable comment "{refused}"
	}}
	chain prerouting {{
		type filter hook prerouting priority mangle; policy accept;
		meta mark & {reject:#010x} != 0 goto refuse comment "{to_refuse}"
	}}
{masquerading}}}
"#
    )
}

/// Returns the rules for connections that are not refused, because conntrack or IPVS has them.
fn exemptions(marks: Marks) -> String {
    let not_refused = !marks.reject;
    let [translated, carried] = exemption_comments();
    format!(
        r#"		meta l4proto tcp ct status dnat meta mark set meta mark & {not_refused:#010x} accept comment "{translated}"
		meta l4proto tcp ct state established meta mark set meta mark & {not_refused:#010x} accept comment "{carried}"
"#
    )
}

fn masquerade_chains(marks: Marks) -> String {
    let masquerade = marks.masquerade;
    let keep = !masquerade;
    let [invalid, datagrams, masqueraded] = masquerade_comments(marks);
    let (first, last) = MASQUERADED_PORTS.into_inner();
    format!(
        r#"	chain forward {{
		type filter hook forward priority filter; policy accept;
		meta mark & {masquerade:#010x} != 0 ct state invalid drop comment "{invalid}"
	}}
	chain postrouting {{
		type nat hook postrouting priority srcnat - 1; policy accept;
		meta mark & {masquerade:#010x} != 0 meta l4proto udp meta mark set meta mark & {keep:#010x} masquerade to :{first}-{last} fully-random comment "{datagrams}"
		meta mark & {masquerade:#010x} != 0 meta mark set meta mark & {keep:#010x} masquerade fully-random comment "{masqueraded}"
	}}
"#
    )
}

/// Returns true if a listing of the table has rules that masquerade.
pub(super) fn masquerades(listing: &str) -> bool {
    listing.lines().any(|line| line.contains(" masquerade "))
}

/// Returns true if a listing of the table has the chain of type `nat`.
pub(super) fn has_nat_chain(listing: &str) -> bool {
    chain_names(listing).any(|chain| chain == POSTROUTING)
}

fn chain_names(listing: &str) -> impl Iterator<Item = &str> {
    listing.lines().filter_map(|line| line.trim().strip_prefix("chain ")?.strip_suffix(" {"))
}

/// Returns a comment for each rule, in order. Versions of nft print rules differently, but all
/// print comments alike. Comments contain the marks too.
fn comments(marks: Marks, nat: Nat) -> Vec<String> {
    let exemptions = (nat != Nat::Nothing).then(exemption_comments);
    let masquerade = (nat == Nat::Masquerade).then(|| masquerade_comments(marks));
    let exemptions = exemptions.into_iter().flatten();
    exemptions.chain(refusal_comments(marks)).chain(masquerade.into_iter().flatten()).collect()
}

fn exemption_comments() -> [String; 2] {
    [
        "shunt: accept connections that conntrack already translates".into(),
        "shunt: accept connections that IPVS already handles".into(),
    ]
}

fn refusal_comments(Marks { reject, .. }: Marks) -> [String; 3] {
    [
        "shunt: a Service without endpoints resets connections".into(),
        "shunt: other packets to a Service without endpoints get an ICMP error".into(),
        format!("shunt: to a Service without endpoints ({reject:#x})"),
    ]
}

fn masquerade_comments(Marks { masquerade, .. }: Marks) -> [String; 3] {
    [
        format!("shunt: what conntrack does not know is not masqueraded ({masquerade:#x})"),
        format!("shunt: masqueraded datagrams use ports that are no node ports ({masquerade:#x})"),
        format!("shunt: replies of a Service return through this node ({masquerade:#x})"),
    ]
}

/// Returns true if a listing of the table contains exactly its chains and rules.
pub(super) fn is_whole(listing: &str, marks: Marks, masquerade: bool) -> bool {
    let lines = || listing.lines().map(str::trim);
    let is_rule =
        |line: &&str| !line.is_empty() && *line != "}" && !line.ends_with('{') && !line.starts_with("type ");
    let rules: Vec<&str> = lines().filter(is_rule).collect();
    let nat = match (masquerade, has_nat_chain(listing)) {
        (true, _) => Nat::Masquerade,
        (false, true) => Nat::Keep,
        (false, false) => Nat::Nothing,
    };
    let comments = comments(marks, nat);
    let chains: &[_] = match nat {
        Nat::Masquerade => &["refuse", "prerouting", "forward", POSTROUTING],
        Nat::Keep => &["refuse", "prerouting", POSTROUTING],
        Nat::Nothing => &["refuse", "prerouting"],
    };
    let has_comment = |(rule, comment): (&&str, &String)| rule.ends_with(&format!("comment \"{comment}\""));
    chain_names(listing).eq(chains.iter().copied())
        && lines().filter(|line| line.starts_with("type ")).count() == chains.len() - 1
        && rules.len() == comments.len()
        && rules.iter().zip(&comments).all(has_comment)
}

/// Returns the tables of other programs that drop forwarded packets by policy, which no rule in
/// another table can change. `chains` is a listing of all chains.
pub(super) fn dropping_tables(chains: &str) -> Vec<String> {
    let (mut table, mut dropping) = ("", Vec::new());
    for line in chains.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix("table ") {
            table = name.trim_end_matches(" {");
        } else if line.contains("hook forward") && line.contains("policy drop") {
            dropping.push(table.to_owned());
        }
    }
    // These tables are iptables', and their FORWARD has a rule of shunt.
    dropping.retain(|table| !matches!(&**table, "ip filter" | "ip6 filter"));
    dropping
}
