//! Tests which entries are stale after a change.

mod properties;
mod thread;

use std::sync::{Arc, Mutex};

use super::*;
use crate::model::{
    Frontend, FrontendKind, LocalTrafficDetector, NodeView, Protocol, ResolvedEndpoint, ResolvedPort,
    ServicePortKey, ServicePortName, TrafficPolicy,
    testing::{cidrs, ip, key, namespaced, port_number, resolved_port},
};

const VIP: &str = "10.96.0.10:53";
const OLD: &str = "10.244.1.1:5353";
const NEW: &str = "10.244.1.2:5353";
const REMOTE: &str = "10.244.2.1:5353";
const POD: &str = "10.244.1.9:4000";
const CLIENT: &str = "203.0.113.2:4000";

/// A table in memory. Clones share it.
#[derive(Clone, Debug, Default)]
struct Table(Arc<Mutex<Contents>>);

#[derive(Debug, Default)]
struct Contents {
    flows: Vec<UdpFlow>,
    /// The destinations of TCP attempts.
    attempts: Vec<SocketAddr>,
    walks: Vec<UdpFilter>,
    is_broken: bool,
}

impl UdpTable for Table {
    fn delete(
        &mut self,
        filter: UdpFilter,
        is_stale: &mut dyn FnMut(&UdpFlow) -> bool,
    ) -> Result<DeletionCounts, KernelError> {
        let mut contents = self.0.lock().unwrap();
        if contents.is_broken {
            return Err(KernelError::NoConntrackNetlink(std::io::ErrorKind::InvalidInput.into()));
        }
        contents.walks.push(filter);
        let before = contents.flows.len();
        contents.flows.retain(|flow| !(filter.matches(flow) && is_stale(flow)));
        Ok(DeletionCounts { seen: before, deleted: before - contents.flows.len() })
    }

    fn delete_tcp_attempts(
        &mut self,
        family: IpFamily,
        is_stale: &mut dyn FnMut(SocketAddr) -> bool,
    ) -> Result<DeletionCounts, KernelError> {
        let mut contents = self.0.lock().unwrap();
        let before = contents.attempts.len();
        contents.attempts.retain(|to| !(IpFamily::of(to.ip()) == family && is_stale(*to)));
        Ok(DeletionCounts { seen: before, deleted: before - contents.attempts.len() })
    }
}

/// A node with its Services and entries.
#[derive(Debug)]
struct Scene {
    table: Table,
    stale_udp: StaleUdpCleaner,
    snapshot: Snapshot,
}

impl Scene {
    fn new() -> Self {
        let table = Table::default();
        let node = NodeView {
            local_addresses: ["127.0.0.1", "192.168.57.11", "192.168.57.12"].map(ip).into(),
            node_port_addresses: ["127.0.0.1", "192.168.57.11"].map(ip).into(),
            local_detector: LocalTrafficDetector::Cidrs(cidrs(&["10.244.0.0/16"])),
            ..NodeView::default()
        };
        let stale_udp = StaleUdpCleaner::with_table(table.clone(), &[]);
        Self { table, stale_udp, snapshot: Snapshot { node, ..Snapshot::default() } }
    }

    /// Returns a scene with one Service, after the first cleanup.
    fn serving(endpoints: &[&str]) -> Self {
        let mut scene = Self::new();
        scene.set("dns", service(endpoints));
        scene.clean_all();
        scene
    }

    fn set(&mut self, name: &str, port: ResolvedPort) -> Dirty {
        self.snapshot.ports.insert(udp(name), Arc::new(port));
        dirty(name)
    }

    fn remove(&mut self, name: &str) -> Dirty {
        self.snapshot.ports.remove(&udp(name));
        dirty(name)
    }

    /// Returns the remaining entries after a cleanup.
    fn remaining(&mut self, dirty: &Dirty, flows: &[UdpFlow]) -> Vec<UdpFlow> {
        self.table.0.lock().unwrap().flows = flows.to_vec();
        self.stale_udp.delete_stale(&self.snapshot, dirty).expect("the table works");
        self.table.0.lock().unwrap().flows.clone()
    }

    fn clean_all(&mut self) {
        self.remaining(&Dirty::everything(), &[]);
        self.walks();
    }

    /// Returns the filters of the walks since the last call.
    fn walks(&mut self) -> Vec<UdpFilter> {
        std::mem::take(&mut self.table.0.lock().unwrap().walks)
    }
}

fn udp(name: &str) -> ServicePortKey {
    let name = ServicePortName {
        service: namespaced(&format!("default/{name}")),
        port: "".into(),
        protocol: Protocol::Udp,
    };
    ServicePortKey { name, ..key("default/x", "") }
}

fn dirty(name: &str) -> Dirty {
    Dirty { ports: [udp(name)].into(), ..Dirty::default() }
}

fn at(kind: FrontendKind, destination: &str) -> Frontend {
    let address: SocketAddr = destination.parse().unwrap();
    let address_of_kind = (kind != FrontendKind::NodePort).then_some(address.ip());
    Frontend { kind, address: address_of_kind, port: port_number(address.port()) }
}

/// Endpoints in 10.244.2.0/24 are on another node.
fn service(endpoints: &[&str]) -> ResolvedPort {
    let endpoint = |address: &&str| ResolvedEndpoint {
        address: address.parse().unwrap(),
        is_local: !address.starts_with("10.244.2."),
    };
    let endpoints: Vec<_> = endpoints.iter().map(endpoint).collect();
    ResolvedPort {
        frontends: vec![at(FrontendKind::ClusterIp, VIP)],
        cluster_endpoints: endpoints.clone(),
        has_endpoints: !endpoints.is_empty(),
        serving: endpoints,
        ..resolved_port()
    }
}

fn node_port(endpoints: &[&str]) -> ResolvedPort {
    let frontends = vec![at(FrontendKind::ClusterIp, VIP), at(FrontendKind::NodePort, "0.0.0.0:30053")];
    ResolvedPort { frontends, ..service(endpoints) }
}

fn flow(source: &str, destination: &str, reply_source: &str) -> UdpFlow {
    let [source, destination, reply_source] = [source, destination, reply_source].map(|a| a.parse().unwrap());
    UdpFlow { source, destination, reply_source, zone: 0 }
}

fn to_vip(reply_source: &str) -> UdpFlow {
    flow(POD, VIP, reply_source)
}

#[test]
fn only_entries_to_removed_endpoints_are_deleted() {
    let mut scene = Scene::serving(&[OLD, REMOTE]);
    let dirty = scene.set("dns", service(&[NEW, REMOTE]));
    let remaining = scene.remaining(&dirty, &[to_vip(OLD), to_vip(NEW), to_vip(REMOTE)]);
    assert_eq!(remaining, [to_vip(NEW), to_vip(REMOTE)]);
}

#[test]
fn entries_to_the_last_endpoint_are_deleted() {
    let mut scene = Scene::serving(&[OLD]);
    let dirty = scene.set("dns", service(&[]));
    assert_eq!(scene.remaining(&dirty, &[to_vip(OLD)]), []);
}

#[test]
fn untranslated_entries_are_deleted_with_the_first_endpoint() {
    let mut scene = Scene::serving(&[]);
    let dirty = scene.set("dns", service(&[NEW]));
    assert_eq!(scene.remaining(&dirty, &[to_vip(VIP)]), []);
}

#[test]
fn translated_entries_of_a_deleted_service_are_deleted() {
    let mut scene = Scene::serving(&[OLD]);
    let dirty = scene.remove("dns");
    let other_translation = to_vip("192.0.2.1:53");
    let remaining = scene.remaining(&dirty, &[to_vip(OLD), to_vip(VIP), other_translation]);
    assert_eq!(remaining, [to_vip(VIP), other_translation], "another program may use the address");
    assert_eq!(
        scene.remaining(&dirty, &[to_vip(OLD)]),
        [to_vip(OLD)],
        "the cleaner does not remember deleted Services"
    );
}

#[test]
fn draining_endpoint_keeps_its_entries() {
    let mut scene = Scene::serving(&[OLD]);
    let mut draining = service(&[OLD, NEW]);
    draining.cluster_endpoints.remove(0);
    let dirty = scene.set("dns", draining);
    assert_eq!(scene.remaining(&dirty, &[to_vip(OLD)]), [to_vip(OLD)]);
}

#[test]
fn other_port_of_the_same_pod_is_another_endpoint() {
    let mut scene = Scene::serving(&[OLD]);
    let dirty = scene.set("dns", service(&["10.244.1.1:5354"]));
    assert_eq!(scene.remaining(&dirty, &[to_vip(OLD)]), []);
}

#[test]
fn local_policy_deletes_entries_to_other_nodes_for_affected_clients() {
    let internal = ResolvedPort { internal_policy: TrafficPolicy::Local, ..node_port(&[OLD, REMOTE]) };
    let external = ResolvedPort { external_policy: TrafficPolicy::Local, ..node_port(&[OLD, REMOTE]) };
    let from = |source, destination| flow(source, destination, REMOTE);
    let at_node = "192.168.57.11:30053";
    for (policy, stale) in [
        (internal, vec![from(POD, VIP), from(CLIENT, VIP)]),
        // The policy does not apply to pods and to the node itself.
        (external, vec![from(CLIENT, at_node)]),
    ] {
        let mut scene = Scene::new();
        scene.set("dns", node_port(&[OLD, REMOTE]));
        scene.clean_all();
        let dirty = scene.set("dns", policy);
        let all = [
            from(POD, VIP),
            from(CLIENT, VIP),
            from(POD, at_node),
            from(CLIENT, at_node),
            from("192.168.57.12:9", at_node),
            to_vip(OLD),
        ];
        let stays: Vec<_> = all.into_iter().filter(|flow| !stale.contains(flow)).collect();
        assert_eq!(scene.remaining(&dirty, &all), stays);
    }
}

/// The rules match such sources with `fib saddr type local`.
#[test]
fn client_whose_address_is_local_by_route_is_inside() {
    let mut scene = Scene::new();
    scene.snapshot.node.local_routes = cidrs(&["198.51.100.0/24"]);
    scene.set("dns", ResolvedPort { external_policy: TrafficPolicy::Local, ..node_port(&[OLD, REMOTE]) });
    let [inside, outside] =
        ["198.51.100.9:40000", "203.0.113.9:40000"].map(|client| flow(client, "192.168.57.11:30053", REMOTE));
    assert_eq!(scene.remaining(&Dirty::everything(), &[inside, outside]), [inside]);
}

#[test]
fn undetectable_client_keeps_its_entries() {
    let mut scene = Scene::new();
    scene.snapshot.node.local_detector = LocalTrafficDetector::InterfaceNamePrefix("cali".into());
    scene.set("dns", ResolvedPort { external_policy: TrafficPolicy::Local, ..node_port(&[OLD, REMOTE]) });
    let flow = flow(CLIENT, "192.168.57.11:30053", REMOTE);
    assert_eq!(scene.remaining(&Dirty::everything(), &[flow]), [flow]);
}

#[test]
fn new_and_removed_external_ips_delete_their_entries() {
    let external = "198.51.100.1:53";
    let mut scene = Scene::serving(&[OLD]);
    let mut port = service(&[OLD]);
    port.frontends.push(at(FrontendKind::ExternalIp, external));
    let [untranslated, own] = [external, OLD].map(|reply_source| flow(CLIENT, external, reply_source));
    let dirty = scene.set("dns", port);
    assert_eq!(scene.remaining(&dirty, &[untranslated, own, to_vip(OLD)]), [own, to_vip(OLD)]);
    scene.set("dns", service(&[OLD]));
    assert_eq!(scene.remaining(&dirty, &[untranslated, own, to_vip(OLD)]), [untranslated, to_vip(OLD)]);
}

#[test]
fn node_ports_exist_only_on_their_addresses() {
    let to = |destination| flow(CLIENT, destination, OLD);
    let mut scene = Scene::new();
    scene.set("dns", node_port(&[NEW]));
    let elsewhere = [to("192.168.57.12:30053"), to("192.168.57.11:30054"), to("127.0.0.1:30053")];
    let all = [&elsewhere[..], &[to("192.168.57.11:30053")]].concat();
    assert_eq!(scene.remaining(&Dirty::everything(), &all), elsewhere, "this mode does not serve loopback");

    scene.stale_udp = StaleUdpCleaner::with_table(scene.table.clone(), &[IpFamily::V4]);
    let all = [to("127.0.0.1:30053"), to("127.0.0.7:30053"), to("127.0.0.7:30054")];
    assert_eq!(scene.remaining(&Dirty::everything(), &all), [to("127.0.0.7:30054")]);
}

#[test]
fn moved_node_port_address_deletes_stale_entries() {
    let mut scene = Scene::new();
    scene.set("dns", node_port(&[OLD]));
    scene.clean_all();
    scene.snapshot.node.node_port_addresses = [ip("192.168.57.12")].into();
    let [former, now] = ["192.168.57.11:30053", "192.168.57.12:30053"];
    let stay = [flow(CLIENT, former, former), flow(CLIENT, now, OLD)];
    let go = [flow(CLIENT, former, OLD), flow(CLIENT, now, now)];
    let remaining = scene.remaining(&Dirty { node: true, ..Dirty::default() }, &[stay, go].concat());
    assert_eq!(remaining, stay);
}

#[test]
fn removed_node_port_existed_only_on_former_addresses() {
    let mut scene = Scene::new();
    scene.set("dns", node_port(&[OLD]));
    scene.clean_all();
    scene.snapshot.node.node_port_addresses.insert(ip("192.168.57.12"));
    let dirty = Dirty { node: true, ..scene.remove("dns") };
    let [own, strangers] = ["192.168.57.11:30053", "192.168.57.12:30053"].map(|to| flow(CLIENT, to, OLD));
    assert_eq!(scene.remaining(&dirty, &[own, strangers]), [strangers]);
}

#[test]
fn moved_address_belongs_to_its_new_service() {
    let mut scene = Scene::serving(&[OLD]);
    scene.remove("dns");
    let mut dirty = scene.set("other", service(&[NEW]));
    dirty.ports.insert(udp("dns"));
    assert_eq!(scene.remaining(&dirty, &[to_vip(OLD), to_vip(NEW), to_vip(VIP)]), [to_vip(NEW)]);
}

#[test]
fn entries_of_other_programs_stay() {
    let mut scene = Scene::serving(&[OLD]);
    let strangers = [
        flow(POD, "10.96.0.10:54", "10.96.0.10:54"),
        flow(POD, "10.96.0.11:53", OLD),
        flow(POD, OLD, OLD),
        flow(CLIENT, "192.168.57.11:53", "192.168.57.11:53"),
    ];
    let dirty = scene.set("dns", service(&[]));
    assert_eq!(scene.remaining(&dirty, &strangers), strangers);
    assert_eq!(scene.remaining(&Dirty::everything(), &strangers), strangers);
}

#[test]
fn translated_entries_of_former_destinations_are_deleted() {
    let mut scene = Scene::new();
    scene.set("dns", service(&[OLD]));
    for former in [VIP, "10.96.0.11:53", "0.0.0.0:30053"] {
        scene.stale_udp.add_former_destination(former.parse().unwrap());
    }
    let stay = [to_vip(OLD), flow(POD, "10.96.0.11:53", "10.96.0.11:53"), flow(POD, "10.96.0.12:53", OLD)];
    let go = [flow(POD, "10.96.0.11:53", OLD), flow(CLIENT, "192.168.57.11:30053", OLD)];
    let all = [&stay[..], &go].concat();
    assert_eq!(scene.remaining(&Dirty::everything(), &all), stay);
    assert_eq!(scene.remaining(&Dirty::everything(), &all), all, "former destinations are checked once");
}

#[test]
fn table_is_walked_only_after_relevant_udp_changes() {
    let mut scene = Scene::serving(&[OLD, NEW]);
    let mut unchosen = service(&[OLD, NEW]);
    unchosen.cluster_endpoints.pop();
    scene.set("dns", unchosen);
    let tcp = Dirty { ports: [key("default/web", "")].into(), ..Dirty::default() };
    for dirty in [&dirty("dns"), &tcp, &Dirty::everything(), &Dirty { node: true, ..Dirty::default() }] {
        scene.remaining(dirty, &[]);
        assert_eq!(scene.walks(), [], "{dirty:?}");
    }
    let change = scene.set("dns", service(&[NEW]));
    scene.remaining(&change, &[]);
    let only = UdpFilter { family: IpFamily::V4, destination_port: Some(53) };
    assert_eq!(scene.walks(), [only], "the kernel filters by family and port");
    let change = scene.set("dns", node_port(&[OLD]));
    scene.remaining(&change, &[]);
    assert_eq!(scene.walks(), [UdpFilter { destination_port: None, ..only }]);
}

#[test]
fn recheck_all_checks_all_entries_once() {
    let mut scene = Scene::serving(&[OLD]);
    scene.stale_udp.recheck_all(&scene.snapshot);
    assert_eq!(scene.remaining(&Dirty::default(), &[to_vip(VIP), to_vip(OLD)]), [to_vip(OLD)]);
    assert_eq!(scene.remaining(&Dirty::everything(), &[to_vip(VIP)]), [to_vip(VIP)]);
}

#[test]
fn attempts_to_connect_to_service_ports_are_deleted_after_rules_were_missing() {
    let mut scene = Scene::new();
    let mut tcp = node_port(&[OLD]);
    tcp.frontends.push(at(FrontendKind::ExternalIp, "198.51.100.7:53"));
    scene.snapshot.ports.insert(key("default/web", ""), Arc::new(tcp));
    scene.set(
        "dns",
        ResolvedPort { frontends: vec![at(FrontendKind::ClusterIp, "10.96.0.11:53")], ..service(&[]) },
    );
    scene.clean_all();
    let stay = ["10.96.0.10:54", "10.96.0.11:53", "192.168.57.12:30053", "203.0.113.2:30053", "[fd96::1]:53"];
    let go = [VIP, "198.51.100.7:53", "192.168.57.11:30053"];
    let parse = |text: &str| text.parse::<SocketAddr>().unwrap();
    let all: Vec<_> = stay.into_iter().chain(go).map(parse).collect();
    scene.table.0.lock().unwrap().attempts.clone_from(&all);
    scene.clean_all();
    assert_eq!(scene.table.0.lock().unwrap().attempts, all, "no rules were missing");
    scene.stale_udp.recheck_all(&scene.snapshot);
    scene.clean_all();
    assert_eq!(scene.table.0.lock().unwrap().attempts, stay.map(parse));
}

#[test]
fn failed_cleanup_is_repeated_with_the_next_udp_change() {
    let mut scene = Scene::serving(&[OLD]);
    scene.set("web", ResolvedPort { frontends: vec![], ..service(&[]) });
    scene.clean_all();
    let dirty_dns = scene.remove("dns");
    scene.table.0.lock().unwrap().is_broken = true;
    scene.table.0.lock().unwrap().flows = vec![to_vip(OLD)];
    assert!(scene.stale_udp.delete_stale(&scene.snapshot, &dirty_dns).is_err());
    scene.table.0.lock().unwrap().is_broken = false;
    assert_eq!(
        scene.remaining(&Dirty::default(), &[to_vip(OLD)]),
        [to_vip(OLD)],
        "no UDP service port changed"
    );
    assert_eq!(scene.remaining(&dirty("web"), &[to_vip(OLD)]), []);
}
