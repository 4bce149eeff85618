//! Maglev tables in the kernel: the same on every node, repaired, and removed with their Services.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::Arc,
};

use aya::maps::{HashMap, Map, MapData};
use proxy_common::{
    layout::{Endpoint, EndpointKey, EndpointValue, MaglevKey, MaglevPage},
    maglev::TableSize,
};
use proxy_userspace::{
    dataplane::{
        DataplaneRenderer, MaglevCount, Renderer,
        ebpf::{Ebpf, LinkAttachment, Rehearsed, rehearse},
    },
    model::{Balance, Dirty, Protocol, ResolvedPort, ServicePortKey, Snapshot},
};
use shunt_tests::{
    deadline::Deadline,
    resolved::{key, port},
};

use crate::bench::{Bench, WITHIN};

/// A node whose Services ask for tables.
struct Node {
    renderer: Option<DataplaneRenderer<Ebpf>>,
    snapshot: Snapshot,
    bench: Bench,
}

impl Node {
    fn start() -> Self {
        Self::with_pages(1_024)
    }

    /// Starts a node whose map has room for this number of pages.
    fn with_pages(pages: u32) -> Self {
        let mut bench = Bench::new(LinkAttachment::Probe);
        bench.settings.map_sizes.maglev = pages;
        bench.add_veth("one", "other");
        let snapshot = bench.snapshot();
        bench.stop();
        Ebpf::cleanup_at(&bench.settings.pin_dir);
        let mut node = Self { renderer: None, snapshot, bench };
        node.restart();
        node
    }

    fn restart(&mut self) {
        self.renderer = None;
        self.bench.restart();
        let mut dataplane = self.bench.dataplane.take().expect("running");
        dataplane.check_in_threads(|| {}).expect("threads");
        self.renderer = Some(DataplaneRenderer::new(dataplane));
        self.render(&Dirty::everything());
    }

    fn renderer(&mut self) -> &mut DataplaneRenderer<Ebpf> {
        self.renderer.as_mut().expect("running")
    }

    fn render(&mut self, dirty: &Dirty) {
        let Self { renderer, snapshot, .. } = self;
        renderer.as_mut().expect("running").render(snapshot, dirty).expect("served");
    }

    /// Serves a Service at this address with these endpoints. Without endpoints, it is removed.
    fn serve(&mut self, vip: SocketAddr, endpoints: &[SocketAddr]) {
        let name = name(vip);
        if endpoints.is_empty() {
            self.snapshot.ports.remove(&name);
        } else {
            let port = ResolvedPort { balance: Balance::Maglev, ..port(vip, endpoints) };
            self.snapshot.ports.insert(name.clone(), Arc::new(port));
        }
        self.render(&Dirty { ports: [name].into(), ..Dirty::default() });
    }

    /// Does what the sync loop does every `syncPeriod`.
    fn look(&mut self) {
        self.renderer().observe().expect("observe");
        self.render(&Dirty { node: true, ..Dirty::default() });
    }

    fn count(&mut self) -> MaglevCount {
        self.renderer().maglev_count().expect("the ebpf mode has tables")
    }

    fn map<K: aya::Pod, V: aya::Pod>(&self, name: &str) -> HashMap<MapData, K, V> {
        let data = MapData::from_pin(self.bench.settings.pin_dir.join(name)).expect("pinned");
        Map::from_map_data(data).expect("a map").try_into().expect("a hash map")
    }

    /// Returns the pages in the map.
    fn pages(&self) -> BTreeMap<MaglevKey, MaglevPage> {
        let map: HashMap<_, MaglevKey, MaglevPage> = self.map("maglev");
        map.iter().collect::<Result<_, _>>().expect("nothing else writes")
    }

    /// Waits until the map has this number of pages, and returns them.
    fn wait_for_pages(&self, count: usize) -> BTreeMap<MaglevKey, MaglevPage> {
        let settled = || Some(self.pages()).filter(|pages| pages.len() == count);
        Deadline::after(WITHIN).poll(settled).unwrap_or_else(|| panic!("{} pages", self.pages().len()))
    }

    /// Returns the endpoint of each entry of the only table. `None` while it is not written.
    fn table(&self) -> Option<Vec<Endpoint>> {
        let endpoints: HashMap<_, EndpointKey, EndpointValue> = self.map("endpoints");
        let pages = self.pages();
        let entry = |(key, slot): (&MaglevKey, &u16)| {
            let slot = EndpointKey { service: key.service, list: key.list, slot: u32::from(*slot) };
            endpoints.get(&slot, 0).ok().map(|value| value.endpoint)
        };
        let slots = pages.iter().flat_map(|(key, page)| page.slots.iter().map(move |slot| (key, slot)));
        let table: Option<Vec<_>> =
            slots.filter(|(_, slot)| **slot != MaglevPage::NO_SLOT).map(entry).collect();
        table.filter(|table| table.len() == 16_381)
    }

    /// Asks a copy of the link program for the endpoint of a client.
    fn endpoint_of(&self, client: SocketAddr, vip: SocketAddr) -> SocketAddr {
        let rehearsed = rehearse(&self.bench.settings.pin_dir, client, vip, Protocol::Tcp);
        match rehearsed.expect("the program runs") {
            Rehearsed::Sent(endpoint) => endpoint,
            other => panic!("{other:?}"),
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let errors = self.renderer.as_mut().map_or_else(Vec::new, Renderer::cleanup);
        assert!(std::thread::panicking() || errors.is_empty(), "{errors:?}");
    }
}

fn name(vip: SocketAddr) -> ServicePortKey {
    key(&vip.to_string(), Protocol::Tcp, vip.ip())
}

fn vip(number: u8) -> SocketAddr {
    (Ipv4Addr::new(10, 96, 0, number), 80).into()
}

fn endpoints(numbers: impl IntoIterator<Item = u8>) -> Vec<SocketAddr> {
    numbers.into_iter().map(|number| (IpAddr::from([10, 244, 1, number]), 8080).into()).collect()
}

/// The pages of a table of the default size.
fn pages_of_table() -> usize {
    TableSize::default().pages() as usize
}

#[test]
fn two_nodes_choose_alike_whatever_their_services_went_through() {
    let (mut here, mut there) = (Node::start(), Node::start());
    here.serve(vip(2), &endpoints(100..110));
    here.serve(vip(2), &[]);
    for last in [5, 30, 12, 25] {
        here.serve(vip(1), &endpoints(3..=last));
    }
    here.serve(vip(1), &endpoints((1..=20).rev()));
    there.serve(vip(1), &endpoints(1..=20));
    let same = || here.table().filter(|table| there.table().as_ref() == Some(table));
    let table = Deadline::after(WITHIN).poll(same).expect("the same table on both nodes");
    let slots = |node: &Node| node.pages().into_values().collect::<Vec<_>>();
    assert_ne!(slots(&here), slots(&there), "the endpoints have other slots");
    for endpoint in endpoints(1..=20) {
        let share = table.iter().filter(|other| **other == endpoint.into()).count();
        assert!((819..=820).contains(&share), "{endpoint} has {share} of 16381 entries");
    }
    for port in 40_000..40_006 {
        let client = (Ipv4Addr::new(192, 0, 2, 50), port).into();
        assert_eq!(here.endpoint_of(client, vip(1)), there.endpoint_of(client, vip(1)), "{client}");
    }
}

#[test]
fn damaged_pages_are_repaired_and_those_of_no_table_are_removed() {
    let mut node = Node::start();
    node.serve(vip(1), &endpoints(1..=3));
    let pages = node.wait_for_pages(pages_of_table());
    let mut map: HashMap<_, MaglevKey, MaglevPage> = node.map("maglev");
    let (first, second) = (pages.keys().next().expect("a page"), pages.keys().nth(1).expect("a page"));
    map.remove(first).expect("in the map");
    map.insert(second, MaglevPage::EMPTY, 0).expect("room");
    map.insert(MaglevKey { service: 77, ..*first }, MaglevPage::EMPTY, 0).expect("room");
    map.insert(MaglevKey { size: 251, ..*first }, MaglevPage::EMPTY, 0).expect("room");
    let repaired = || {
        node.look();
        (node.pages() == pages).then_some(())
    };
    assert!(Deadline::after(WITHIN).poll(repaired).is_some(), "{} pages", node.pages().len());
}

#[test]
fn tables_of_an_earlier_process_stay_if_a_service_needs_them() {
    let mut node = Node::start();
    node.serve(vip(1), &endpoints(1..=3));
    node.serve(vip(2), &endpoints(4..=6));
    let before = node.wait_for_pages(2 * pages_of_table());
    node.renderer = None;
    assert_eq!(node.pages(), before, "they serve without the process");
    node.snapshot.ports.remove(&name(vip(2)));
    node.restart();
    let kept = node.wait_for_pages(pages_of_table());
    assert_eq!(node.count(), MaglevCount { with_tables: 1, without_room: 0 });
    assert!(kept.iter().all(|(key, page)| before.get(key) == Some(page)), "nothing was written anew");
}

#[test]
fn table_follows_the_number_of_endpoints_and_goes_with_its_service() {
    let mut node = Node::start();
    node.serve(vip(1), &endpoints(1..=163));
    node.wait_for_pages(pages_of_table());
    node.serve(vip(1), &endpoints(1..=164));
    let larger = TableSize::of_entries(32_749).expect("a size");
    node.wait_for_pages(larger.pages() as usize);
    node.serve(vip(1), &endpoints(1..=1));
    node.wait_for_pages(TableSize::of_entries(251).expect("a size").pages() as usize);
    node.serve(vip(1), &[]);
    node.wait_for_pages(0);
    assert_eq!(node.count(), MaglevCount::default());
}

#[test]
fn table_goes_if_another_service_port_takes_the_address() {
    let mut node = Node::start();
    node.serve(vip(1), &endpoints(1..=3));
    let before = node.wait_for_pages(pages_of_table());
    let port = node.snapshot.ports.remove(&name(vip(1))).expect("served");
    let other = name(vip(2));
    node.snapshot.ports.insert(other.clone(), port);
    node.render(&Dirty { ports: [name(vip(1)), other].into(), ..Dirty::default() });
    let replaced = || {
        let pages = node.pages();
        (pages.len() == before.len() && pages.keys().all(|key| !before.contains_key(key))).then_some(())
    };
    assert!(Deadline::after(WITHIN).poll(replaced).is_some(), "{} pages", node.pages().len());
    assert_eq!(node.count(), MaglevCount { with_tables: 1, without_room: 0 });
}

#[test]
fn service_whose_table_has_no_room_gets_it_when_another_goes() {
    let mut node = Node::with_pages(100);
    node.serve(vip(1), &endpoints(1..=3));
    node.serve(vip(2), &endpoints(4..=6));
    let first = node.wait_for_pages(pages_of_table());
    assert_eq!(node.count(), MaglevCount { with_tables: 1, without_room: 1 });
    let client = (Ipv4Addr::new(192, 0, 2, 50), 40_000).into();
    let served = node.endpoint_of(client, vip(2));
    assert!(endpoints(4..=6).contains(&served), "it is served: {served}");
    node.serve(vip(1), &[]);
    let replaced = || {
        let pages = node.pages();
        (pages.len() == pages_of_table() && pages.keys().all(|key| !first.contains_key(key))).then_some(())
    };
    Deadline::after(WITHIN).poll(replaced).expect("the other Service has its table");
    assert_eq!(node.count(), MaglevCount { with_tables: 1, without_room: 0 });
}
