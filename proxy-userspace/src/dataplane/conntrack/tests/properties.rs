//! Checks properties for generated Snapshots and entries.

use std::net::IpAddr;

use proptest::{collection::vec, prelude::*, sample::select};

use super::*;
use crate::model::{ClientLocation, testing::snapshot_change};

/// Returns the service port of a destination. Searches in another way than the cleaner.
fn served(snapshot: &Snapshot, loopback: bool, to: SocketAddr) -> Option<(FrontendKind, &ResolvedPort)> {
    let node_address =
        if matches!(to.ip(), IpAddr::V4(v4) if v4.is_loopback()) { ip("127.0.0.1") } else { to.ip() };
    let has_node_ports =
        snapshot.node.node_port_addresses.contains(&node_address) && (loopback || !to.ip().is_loopback());
    let ports = snapshot
        .ports
        .iter()
        .filter(|(key, _)| key.name.protocol == Protocol::Udp && key.family == IpFamily::of(to.ip()));
    let mut frontends = ports.flat_map(|(_, port)| port.frontends.iter().map(move |at| (at, &**port)));
    let found = frontends.find(|(at, _)| {
        at.port.get() == to.port() && at.address.map_or(has_node_ports, |address| address == to.ip())
    });
    found.map(|(at, port)| (at.kind, port))
}

fn serves(port: &ResolvedPort, address: SocketAddr) -> bool {
    port.serving.iter().any(|endpoint| endpoint.address == address)
}

fn any_flow() -> impl Strategy<Value = UdpFlow> {
    let of_family = |sources: &'static [&'static str],
                     to: &'static [&'static str],
                     endpoints: &'static [&'static str]| {
        let to = prop_oneof![
            3 => (select(to), 80..83_u16),
            2 => (select(to), 30_001..30_004_u16),
        ];
        let endpoint = prop_oneof![
            4 => (select(endpoints), 8080..8082_u16).prop_map(Some),
            1 => Just(None),
        ];
        (select(sources), to, endpoint).prop_map(|(source, to, endpoint)| {
            let [source, to, from] = [(source, 4000), to, endpoint.unwrap_or(to)]
                .map(|(address, port)| SocketAddr::new(ip(address), port));
            UdpFlow { source, destination: to, reply_source: from, zone: 0 }
        })
    };
    prop_oneof![
        3 => of_family(
            &["10.244.1.9", "203.0.113.2", "192.168.57.11"],
            &["10.96.0.1", "10.96.0.2", "10.96.0.3", "198.51.100.1", "192.168.57.11", "127.0.0.3", "192.0.2.1"],
            &["10.244.1.1", "10.244.1.2", "10.244.2.1", "10.244.2.2", "192.0.2.9"],
        ),
        1 => of_family(
            &["fd44:1::9", "2001:db8::77"],
            &["fd96::1", "fd96::2", "2001:db8::1", "fd57::11", "::1"],
            &["fd44:1::1", "fd44:2::1", "2001:db8::9"],
        ),
    ]
}

proptest! {
    #[test]
    fn cleanup_deletes_exactly_the_stale_entries(
        (before, now, dirty) in snapshot_change(),
        old_flows in vec(any_flow(), 0..60),
        loopback in any::<bool>(),
    ) {
        let families: &[IpFamily] = if loopback { &IpFamily::ALL } else { &[] };
        let table = Table::default();
        table.0.lock().unwrap().flows.clone_from(&old_flows);
        let mut stale_udp = StaleUdpCleaner::with_table(table.clone(), families);
        stale_udp.delete_stale(&before, &Dirty::everything()).unwrap();
        let between = table.0.lock().unwrap().flows.clone();
        for flow in old_flows.iter().filter(|flow| !between.contains(flow)) {
            prop_assert!(served(&before, loopback, flow.destination).is_some(), "an entry of another program: {flow:?}");
        }
        stale_udp.delete_stale(&now, &dirty).unwrap();
        let after = table.0.lock().unwrap().flows.clone();
        for flow in &after {
            match (served(&now, loopback, flow.destination), served(&before, loopback, flow.destination)) {
                (Some((_, port)), _) => prop_assert!(serves(port, flow.reply_source), "{flow:?}"),
                (None, Some((_, port))) => prop_assert!(!serves(port, flow.reply_source), "{flow:?}"),
                (None, None) => {}
            }
        }
        for flow in between.iter().filter(|flow| !after.contains(flow)) {
            if let Some((kind, port)) = served(&now, loopback, flow.destination) {
                let is_local = |e: &ResolvedEndpoint| e.is_local && e.address == flow.reply_source;
                let policies = [ClientLocation::Inside, ClientLocation::Outside].map(|caller| port.policy(kind, caller));
                prop_assert!(
                    !port.serving.iter().any(is_local)
                        && (!serves(port, flow.reply_source) || policies.contains(&TrafficPolicy::Local)),
                    "not stale: {flow:?}"
                );
            } else {
                prop_assert!(served(&before, loopback, flow.destination).is_some(), "an entry of another program: {flow:?}");
            }
        }
        table.0.lock().unwrap().walks.clear();
        prop_assert_eq!(stale_udp.delete_stale(&now, &Dirty::everything()).unwrap(), []);
        prop_assert_eq!(&table.0.lock().unwrap().walks, &[]);
    }

    #[test]
    fn checking_dirty_ports_is_sufficient(
        (before, now, dirty) in snapshot_change(),
        flows in vec(any_flow(), 0..60),
    ) {
        let remaining = |dirty: &Dirty| {
            let table = Table::default();
            table.0.lock().unwrap().flows.clone_from(&flows);
            let mut stale_udp = StaleUdpCleaner::with_table(table.clone(), &[]);
            stale_udp.delete_stale(&before, &Dirty::everything()).unwrap();
            stale_udp.delete_stale(&now, dirty).unwrap();
            table.0.lock().unwrap().flows.clone()
        };
        prop_assert_eq!(remaining(&dirty), remaining(&Dirty::everything()));
    }
}
