//! Decodes shunt's annotations about direct server return.

use std::{collections::BTreeSet, net::IpAddr};

use super::*;

#[test]
fn annotation_says_how_packets_reach_endpoints_on_other_nodes() {
    let annotated = |value: &str| {
        let mut service = service(&json!({"clusterIP": "10.96.0.10", "ports": [{"port": 80}]}));
        service["metadata"]["annotations"] = json!({"shunt.dev/forwarding": value});
        service
    };
    for (value, expected) in [("dsr", Forwarding::Dsr), ("nat", Forwarding::Nat), ("", Forwarding::Nat)] {
        assert_eq!(good::<Service>(&annotated(value)).forwarding, expected);
    }
    let (problems, service): (_, Service) = faulty(&annotated("DSR"));
    assert_eq!(problems, ["metadata.annotations[shunt.dev/forwarding]: \"DSR\" is not one of nat, dsr"]);
    assert_eq!(service.forwarding, Forwarding::Nat);
}

fn announcing(value: &str) -> Value {
    json!({"metadata": {"name": "n", "annotations": {"shunt.dev/dsr": value, "other": "x"}}})
}

#[test]
fn a_node_announces_at_most_one_address_of_each_family_for_the_tunnel() {
    let addresses = |value: &str| good::<Node>(&announcing(value)).dsr.addresses;
    let parsed = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect::<Vec<_>>();
    let both = ["192.0.2.11:4790", "[2001:db8::11]:4790"];
    assert_eq!(addresses("192.0.2.11:4790"), parsed(&both[..1]));
    assert_eq!(addresses("192.0.2.11:4790, [2001:db8::11]:4790"), parsed(&both));
    assert_eq!(addresses("[2001:db8::11]:4790,192.0.2.11:4790"), parsed(&[both[1], both[0]]));
    assert_eq!(addresses("[::ffff:192.0.2.11]:4790"), parsed(&both[..1]));
    assert_eq!(addresses(""), []);
    assert_eq!(good::<Node>(&json!({"metadata": {"name": "n"}})).dsr.addresses, []);
}

#[test]
fn wrong_addresses_for_the_tunnel_are_named_and_left_out() {
    let text = "192.0.2.11:,192.0.2.11:0,,2001:db8::11:47900,[ff02::1]:4790,[fe80::1%2]:4790,127.0.0.1:4790,0.0.0.0:4790,\
                255.255.255.255:4790,node1:4790,192.0.2.11:4790";
    let (problems, node): (_, Node) = faulty(&announcing(text));
    assert_eq!(node.dsr.addresses, ["192.0.2.11:4790".parse().unwrap()]);
    assert_eq!(problems.len(), 10, "{problems:#?}");
    assert_eq!(
        problems[0],
        "metadata.annotations[shunt.dev/dsr]: \"192.0.2.11:\" is not an address that other nodes reach, with or without \
         a port, like 192.0.2.11:4790, [2001:db8::11]:4790 or 192.0.2.12"
    );
    let twice = "192.0.2.11:4790,[::ffff:192.0.2.12]:4790,[2001:db8::11]:4790";
    let (problems, node): (_, Node) = faulty(&announcing(twice));
    assert_eq!(
        node.dsr.addresses,
        ["192.0.2.11:4790", "[2001:db8::11]:4790"].map(|text| text.parse().unwrap())
    );
    assert_eq!(
        problems,
        [
            "metadata.annotations[shunt.dev/dsr]: \"[::ffff:192.0.2.12]:4790\" is not of another IP family than the one \
          before; one of each is allowed"
        ]
    );
}

#[test]
fn a_node_announces_its_other_addresses_without_a_port() {
    let others =
        |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect::<BTreeSet<IpAddr>>();
    let text = "10.0.0.11,192.0.2.11:4790,fd57::11, ::ffff:10.0.0.12";
    let node = good::<Node>(&announcing(text));
    assert_eq!(node.dsr.addresses, ["192.0.2.11:4790".parse().unwrap()]);
    assert_eq!(node.dsr.others, others(&["10.0.0.11", "10.0.0.12", "fd57::11"]));
    assert_eq!(good::<Node>(&announcing(&node.dsr.to_string())).dsr, node.dsr);
    let wrong = "192.0.2.11:4790,127.0.0.1,::1,fe80::1,fe80::1%2,169.254.20.10,224.0.0.1,0.0.0.0,10.0.0.0/8";
    let (problems, node): (_, Node) = faulty(&announcing(wrong));
    assert_eq!((problems.len(), node.dsr.others), (8, BTreeSet::new()), "{problems:#?}");
    let many: Vec<_> = (1..=40).map(|last| format!("10.0.0.{last}")).collect();
    let (problems, node): (_, Node) = faulty(&announcing(&many.join(",")));
    assert_eq!((problems.len(), node.dsr.others.len()), (8, DsrAnnouncement::MAX_OTHERS));
}
