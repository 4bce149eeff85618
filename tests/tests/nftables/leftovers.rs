//! What stays in the tables when kube-proxy takes them over from shunt.

use std::{collections::BTreeSet, net::SocketAddr, sync::Arc};

use proxy_userspace::{
    dataplane::{
        Dataplane as _,
        nftables::{LeftoverRemoval, Nftables, NftablesSettings, TABLE},
    },
    model::{Dirty, Frontend, FrontendKind, IpFamily, Protocol, ResolvedPort, Snapshot, TrafficPolicy},
};
use shunt_tests::{
    kube_proxy::{SERVICE_CHAIN, nftables_rules},
    resolved::{key, port},
};

use super::{Namespace, listing, nft};

/// Serves Services with lists of several sizes, in both families, as a process of the nftables
/// mode.
fn serve() {
    let mut snapshot = Snapshot::default();
    for (name, vip, endpoints) in [
        ("web", "10.96.0.80:80", &["10.244.1.1:8080", "10.244.1.2:8080", "10.244.1.3:8080"][..]),
        ("dns", "10.96.0.53:53", &["10.244.1.1:53"]),
        ("web", "[fd96::80]:80", &["[fd44::1]:8080", "[fd44::2]:8080"]),
    ] {
        let address = |text: &str| text.parse::<SocketAddr>().expect("an address");
        let endpoints: Vec<_> = endpoints.iter().map(|text| address(text)).collect();
        let port = with_node_port(port(address(vip), &endpoints));
        snapshot.ports.insert(key(name, Protocol::Tcp, address(vip).ip()), port.into());
    }
    let settings = NftablesSettings { masquerade: 1 << 14 };
    let mut dataplane = Nftables::new(&settings, Arc::default()).expect("nf_tables");
    let mut state = dataplane.observe().expect("the tables can be read");
    let plan = Nftables::plan(&state, &snapshot, &Dirty::everything());
    dataplane.apply(&mut state, plan).expect("the kernel accepts it");
}

fn with_node_port(port: ResolvedPort) -> ResolvedPort {
    let number = port.frontends[0].port.saturating_add(30_000);
    let node_port = Frontend { kind: FrontendKind::NodePort, address: None, port: number };
    ResolvedPort {
        frontends: [port.frontends, vec![node_port]].concat(),
        external_policy: TrafficPolicy::Local,
        local_endpoints: port.cluster_endpoints.clone(),
        ..port
    }
}

/// Applies what kube-proxy writes when it starts.
fn start_kube_proxy() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), nftables_rules()).expect("written");
    nft(&["-f", &file.path().display().to_string()]);
    assert!(listing().contains(SERVICE_CHAIN), "nft takes it");
}

/// Returns the lines with chains, sets and maps.
fn objects() -> BTreeSet<String> {
    let listing = listing();
    let is_object = |line: &&str| ["\tchain ", "\tset ", "\tmap "].iter().any(|kind| line.starts_with(kind));
    let names = listing.lines().filter(is_object).map(|line| line.trim_matches(['\t', ' ', '{']).to_owned());
    names.collect()
}

fn remove() -> (usize, Vec<IpFamily>) {
    let LeftoverRemoval { removed, in_use, errors } = Nftables::remove_leftovers();
    assert!(errors.is_empty(), "{errors:?}");
    (removed, in_use)
}

/// The chains with kube-proxy's names that kube-proxy 1.33 does not have stay: later ones have
/// them.
#[test]
fn what_only_shunt_has_is_removed_once_kube_proxy_has_taken_the_tables_over() {
    let _namespace = Namespace::enter();
    start_kube_proxy();
    let of_kube_proxy = objects();
    nft(&["flush", "ruleset"]);
    serve();
    start_kube_proxy();
    assert!(objects().len() > of_kube_proxy.len() + 30, "{:?}", objects());
    let before = listing();
    let (removed, in_use) = remove();
    assert!(removed > 50 && in_use.is_empty(), "{removed} {in_use:?}");
    let kube_proxys_of_later_versions = [
        "chain filter-forward",
        "chain filter-input",
        "chain filter-output",
        "chain filter-output-pre-dnat",
        "chain filter-prerouting-pre-dnat",
        "set hairpin-connections",
        "set nodeport-ips",
    ];
    let left: BTreeSet<_> = objects().difference(&of_kube_proxy).cloned().collect();
    assert_eq!(left, kube_proxys_of_later_versions.map(str::to_owned).into());
    assert!(objects().is_superset(&of_kube_proxy), "{before}\n{}", listing());
    for (family, rule) in [("ip", "10.96.0.80 . tcp . 80"), ("ip6", "fd96::80 . tcp . 80")] {
        let services = nft(&["list", "map", family, TABLE, "service-ips"]);
        assert!(services.contains(&format!("{rule} : goto {SERVICE_CHAIN}")), "{services}");
    }
    assert_eq!(remove(), (0, Vec::new()), "nothing is left to remove");
}

#[test]
fn tables_that_shunt_serves_are_left_as_they_are() {
    let _namespace = Namespace::enter();
    assert_eq!(remove(), (0, Vec::new()), "there are no tables");
    serve();
    let before = listing();
    assert_eq!(remove(), (0, IpFamily::ALL.to_vec()));
    assert_eq!(listing(), before);
    nft(&["delete", "table", "ip6", TABLE]);
    assert_eq!(remove(), (0, vec![IpFamily::V4]));
}
