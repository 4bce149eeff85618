//! The UDP destinations that the rules of an earlier process translate.

use std::net::SocketAddr;

use crate::{
    dataplane::iptables_text::{SavedLine, saved_lines},
    model::IpFamily,
};

/// Returns the UDP destinations in the output of iptables-save: VIPs, and node ports with the
/// unspecified address.
pub(super) fn udp_destinations(saved: &str, family: IpFamily) -> Vec<SocketAddr> {
    let destination = |line| {
        let SavedLine::Rule { chain, rule } = line else { return None };
        if !rule.contains("-p udp ") {
            return None;
        }
        let address = match chain {
            "KUBE-NODEPORTS" => family.unspecified(),
            "KUBE-SERVICES" => argument(rule, "-d ")?.split('/').next()?.parse().ok()?,
            _ => return None,
        };
        Some(SocketAddr::new(address, argument(rule, "--dport ")?.parse().ok()?))
    };
    saved_lines(saved).filter_map(destination).collect()
}

fn argument<'a>(rule: &'a str, option: &str) -> Option<&'a str> {
    rule.split_once(option)?.1.split(' ').next()
}

#[cfg(test)]
mod tests {
    use super::{super::fixed_chains::MODE, *};
    use crate::dataplane::iptables_text::{Table, TableState};

    const SAVED: &str = "\
*nat
:PREROUTING ACCEPT [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-PROXY-CANARY - [0:0]
-A PREROUTING -m comment --comment kubernetes_of_another -j KUBE-SERVICES
-A OUTPUT -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES
-A KUBE-SERVICES -d 10.96.0.10/32 -p udp -m comment --comment \"kube-system/dns cluster IP\" -m udp --dport 53 -j KUBE-SVC-FYZB2HTOW53NRIPL
-A KUBE-SERVICES -d 10.96.0.10/32 -p tcp -m comment --comment \"kube-system/dns cluster IP\" -m tcp --dport 53 -j KUBE-SVC-FYZB2HTOW53NRIPL
-A KUBE-NODEPORTS -p udp -m comment --comment \"a/b\" -m udp --dport 30053 -m nfacct --nfacct-name  n -j KUBE-EXT-FYZB2HTOW53NRIPL
COMMIT
";

    #[test]
    fn chains_jumps_and_rules_are_read_from_a_table() {
        let state = TableState::read(&MODE, Table::Nat, SAVED);
        assert_eq!(state.chains.len(), 3, "KUBE-NODEPORTS is not declared, but has a rule");
        assert_eq!(state.rules, 3);
        let portals: Vec<_> = state.jumps.iter().map(|jump| jump.from).collect();
        assert_eq!(portals, ["OUTPUT"], "the jump of another program is not counted");
    }

    #[test]
    fn udp_destinations_of_an_earlier_process_are_found() {
        let found = udp_destinations(SAVED, IpFamily::V4);
        assert_eq!(found, ["10.96.0.10:53".parse().unwrap(), "0.0.0.0:30053".parse().unwrap()]);
    }
}
