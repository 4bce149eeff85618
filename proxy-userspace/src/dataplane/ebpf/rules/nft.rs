//! The rules as one nftables table: the script that makes it, and whether a listing shows it.

use super::{MASQUERADED_PORTS, Marks};

/// The table, with its family.
pub(super) const TABLE: &str = "inet shunt";

/// The script that makes the table in one transaction, in place of what there is of it.
///
/// - Masquerading comes before that of others (`srcnat`, where iptables' nat table is too): whoever comes first decides for the
///   connection, and a CNI that gives pods another address than the node's must not decide for a Service's clients.
/// - Masqueraded datagrams leave from ports of [`MASQUERADED_PORTS`] alone.
/// - Refusing comes after conntrack (`raw` < conntrack < `mangle`), so that the answer belongs to the connection. Kernel 5.10
///   (f53b9b0bdc59) is the first that can refuse before routing, which may know no way to a Service's address.
/// - What conntrack calls invalid is not masqueraded: it would leave with the client's address, and its endpoint would reset a
///   connection it knows nothing of (kubernetes/kubernetes#74839).
/// - A connection of which the programs know nothing may be one that rules of another mode translated as it began. Conntrack goes on
///   with it without those rules, so it is not refused. Nor is one that IPVS carries, until it is handed over to conntrack.
pub(super) fn script(marks: Marks, is_there: bool) -> String {
    let Marks { masquerade, reject } = marks;
    let keep = !masquerade;
    let removal = if is_there { format!("delete table {TABLE}\n") } else { String::new() };
    let not_refused = !reject;
    let [translated, carried, refused_tcp, refused, to_refuse, invalid, datagrams, masqueraded] =
        comments(marks);
    let (first, last) = MASQUERADED_PORTS.into_inner();
    format!(
        r#"{removal}table {TABLE} {{
	chain refuse {{
		meta l4proto tcp ct status dnat meta mark set meta mark & {not_refused:#010x} accept comment "{translated}"
		meta l4proto tcp ct state established meta mark set meta mark & {not_refused:#010x} accept comment "{carried}"
		meta l4proto tcp reject with tcp reset comment "{refused_tcp}"
		reject with icmpx type port-unreachable comment "{refused}"
	}}
	chain prerouting {{
		type filter hook prerouting priority mangle; policy accept;
		meta mark & {reject:#010x} != 0 goto refuse comment "{to_refuse}"
	}}
	chain forward {{
		type filter hook forward priority filter; policy accept;
		meta mark & {masquerade:#010x} != 0 ct state invalid drop comment "{invalid}"
	}}
	chain postrouting {{
		type nat hook postrouting priority srcnat - 1; policy accept;
		meta mark & {masquerade:#010x} != 0 meta l4proto udp meta mark set meta mark & {keep:#010x} masquerade to :{first}-{last} fully-random comment "{datagrams}"
		meta mark & {masquerade:#010x} != 0 meta mark set meta mark & {keep:#010x} masquerade fully-random comment "{masqueraded}"
	}}
}}
"#
    )
}

/// A comment for each rule, in their order. nft versions print rules differently, but comments alike; they tell the marks too.
fn comments(Marks { masquerade, reject }: Marks) -> [String; 8] {
    [
        "shunt: but conntrack goes on with what other rules translated".into(),
        "shunt: and IPVS with what it carries".into(),
        "shunt: a Service without endpoints resets connections".into(),
        "shunt: and is unreachable to all else".into(),
        format!("shunt: to a Service without endpoints ({reject:#x})"),
        format!("shunt: what conntrack does not know is not masqueraded ({masquerade:#x})"),
        format!("shunt: answers to datagrams come to none of its node ports ({masquerade:#x})"),
        format!("shunt: answers of a Service come back through this node ({masquerade:#x})"),
    ]
}

/// Whether a listing of the table shows all its chains and rules, and nothing else.
pub(super) fn is_whole(listing: &str, marks: Marks) -> bool {
    let after = |word: &str| -> Vec<String> {
        let of_lines = listing.lines().map(str::trim);
        of_lines.filter_map(|line| line.strip_prefix(word)).map(str::to_owned).collect()
    };
    let rules: Vec<&str> = listing
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && *line != "}" && !line.ends_with('{') && !line.starts_with("type "))
        .collect();
    let comments = comments(marks);
    after("chain ") == ["refuse {", "prerouting {", "forward {", "postrouting {"]
        && after("type ").len() == 3
        && rules.len() == comments.len()
        && rules
            .iter()
            .zip(&comments)
            .all(|(rule, comment)| rule.ends_with(&format!("comment \"{comment}\"")))
}

/// Tables of others that drop what is forwarded unless they know better, which no rule of another table can change.
pub(super) fn dropping_tables(chains: &str) -> Vec<String> {
    let (mut table, mut dropping) = ("", Vec::new());
    for line in chains.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix("table ") {
            table = name.trim_end_matches(" {");
        } else if line.contains("hook forward") && line.contains("policy drop") {
            dropping.push(table.to_owned());
        }
    }
    // Those are iptables', whose FORWARD has a rule of ours.
    dropping.retain(|table| !matches!(&**table, "ip filter" | "ip6 filter"));
    dropping
}
