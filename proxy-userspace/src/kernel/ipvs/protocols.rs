//! Finds out which protocols the kernel's IPVS knows. Netlink does not tell: IPVS accepts a virtual
//! server of a protocol that it was built without, and then never sees its packets.

use std::{
    fs::File,
    io::{BufRead, BufReader},
};

/// The symbols of the kernel and its modules. Their names are readable also where their addresses
/// are hidden (`kernel.kptr_restrict`).
const SYMBOLS: &str = "/proc/kallsyms";
/// Functions of `net/netfilter/ipvs/ip_vs_proto_tcp.c` and `ip_vs_proto_sctp.c`. IPVS calls them
/// through a table, so the compiler keeps them.
const OF_TCP: &str = "tcp_snat_handler";
const OF_SCTP: &str = "sctp_snat_handler";

/// Returns true if IPVS was built without SCTP (`CONFIG_IP_VS_PROTO_SCTP`). Returns false if that
/// cannot be told. Takes some tenths of a second. The module must be loaded.
pub fn lacks_sctp() -> bool {
    File::open(SYMBOLS).is_ok_and(|symbols| is_without_sctp(BufReader::new(symbols)))
}

fn is_without_sctp(symbols: impl BufRead) -> bool {
    let (mut knows_tcp, mut knows_sctp) = (false, false);
    for line in symbols.lines().map_while(Result::ok) {
        let name = line.split_ascii_whitespace().nth(2);
        knows_tcp |= name == Some(OF_TCP);
        knows_sctp |= name == Some(OF_SCTP);
    }
    knows_tcp && !knows_sctp
}

#[cfg(test)]
mod tests {
    use super::*;

    const TCP: &str = "0000000000000000 t tcp_snat_handler\t[ip_vs]\n";
    const SCTP: &str = "0000000000000000 t sctp_snat_handler\t[ip_vs]\n";
    const OTHER: &str = "0000000000000000 T sctp_manip_pkt\t[nf_nat]\n";

    #[test]
    fn sctp_is_lacked_only_if_the_symbols_of_ipvs_are_there_without_it() {
        for (symbols, expected) in [
            (format!("{OTHER}{TCP}"), true),
            (format!("{SCTP}{TCP}"), false),
            (format!("{TCP}{SCTP}"), false),
            (OTHER.to_owned(), false),
            (String::new(), false),
        ] {
            assert_eq!(is_without_sctp(symbols.as_bytes()), expected, "{symbols}");
        }
    }
}
