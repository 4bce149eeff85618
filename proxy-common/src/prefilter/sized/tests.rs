//! Tests that no item is ever missing, and how large the prefilter is and how exact.

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
    vec,
    vec::Vec,
};

use proptest::prelude::*;

use super::*;
use crate::Addr;

/// Memory that a program reads after each write.
#[derive(Debug)]
struct Memory {
    mask: Cell<u64>,
    words: Vec<Cell<u64>>,
    program: RefCell<Program>,
    writes: Cell<u32>,
}

/// A program that may have read any mask of the past.
#[derive(Debug, Default)]
struct Program {
    masks: Vec<u64>,
    items: Vec<PrefilterItem>,
}

impl Memory {
    fn new() -> Rc<Self> {
        let words = vec![Cell::new(0); MAX_WORDS as usize];
        let (mask, program, writes) = (Cell::new(0), RefCell::default(), Cell::new(0));
        Rc::new(Self { mask, words, program, writes })
    }

    /// The items that programs of all masks must find from now on.
    fn watch(&self, items: &[PrefilterItem]) {
        *self.program.borrow_mut() = Program { masks: vec![self.mask.get()], items: items.to_vec() };
    }

    fn check(&self) {
        let Program { masks, items } = &*self.program.borrow();
        for (mask, item) in masks.iter().flat_map(|mask| items.iter().map(move |item| (mask, item))) {
            assert!(self.finds(*mask, *item), "{item:?} is missing by the mask {mask:#x}");
        }
    }

    fn finds(&self, mask: u64, item: PrefilterItem) -> bool {
        let index = item.index(u32::try_from(mask).expect("small"));
        self.words[index as usize].get() & item.bits() == item.bits()
    }

    fn may_contain(&self, item: PrefilterItem) -> bool {
        self.finds(self.mask.get(), item)
    }

    /// Checks some moments of many: a copy of all words is as many writes.
    fn written(&self) {
        self.writes.set(self.writes.get() + 1);
        if self.writes.get().is_multiple_of(97) {
            self.check();
        }
    }
}

impl PrefilterMemory for Rc<Memory> {
    fn mask(&self) -> u64 {
        self.mask.get()
    }

    fn set_mask(&self, mask: u64) {
        self.mask.set(mask);
        self.program.borrow_mut().masks.push(mask);
        self.check();
    }

    fn word(&self, index: u32) -> u64 {
        self.words.get(index as usize).map_or(0, Cell::get)
    }

    fn set_word(&self, index: u32, word: u64) {
        self.words[index as usize].set(word);
        self.written();
    }

    fn set_bits(&self, index: u32, bits: u64) {
        self.set_word(index, self.word(index) | bits);
    }

    fn clear_bits(&self, index: u32, bits: u64) {
        self.set_word(index, self.word(index) & !bits);
    }
}

/// What a cluster of so many Services of 4 endpoints has: VIPs in two ports or IP families, node
/// ports of both families, and endpoints, a quarter of them IPv6.
fn cluster(services: u32) -> Vec<PrefilterItem> {
    let mut items = Vec::new();
    for service in 0..services {
        let port = if service % 3 == 0 { 443 } else { 80 };
        items.push(PrefilterItem::of_service(&v4(10, 96, service), port));
        if service % 4 == 0 {
            items.push(PrefilterItem::of_service(&v6(0x96, 0, service), port));
        }
        if service < 2_768 && service % 2 == 0 {
            let node_port = 30_000 + u16::try_from(service).expect("small");
            for any in [Addr::UNSPECIFIED_V4, Addr::UNSPECIFIED_V6] {
                items.push(PrefilterItem::of_service(&any, node_port));
            }
        }
        for endpoint in service * 4..service * 4 + 4 {
            let addr = if service % 4 == 1 {
                v6(0x244, endpoint / 100, endpoint % 100)
            } else {
                v4(10, 244, endpoint)
            };
            items.push(PrefilterItem::of_endpoint(&addr, if service % 5 == 0 { 9_090 } else { 8_080 }));
        }
    }
    items
}

fn v4(first: u8, second: u8, host: u32) -> Addr {
    let base = u32::from_be_bytes([first, second, 0, 0]);
    Addr::from_v4((base + host).to_be_bytes())
}

fn v6(network: u16, subnet: u32, host: u32) -> Addr {
    let mut octets = [0; 16];
    octets[..4].copy_from_slice(&[0xfd, 0x00, 0x00, 0x10]);
    octets[4..6].copy_from_slice(&network.to_be_bytes());
    octets[6..8].copy_from_slice(&u16::try_from(subnet).expect("small").to_be_bytes());
    octets[12..].copy_from_slice(&host.to_be_bytes());
    Addr { octets }
}

/// Addresses and ports of packets that have nothing to do with Services: pods and nodes of the same
/// ranges, ephemeral ports, and hosts elsewhere.
fn others() -> impl Iterator<Item = PrefilterItem> {
    (0..200_000u32).flat_map(|host| {
        let ephemeral = 32_768 + u16::try_from(host % 28_000).expect("small");
        let elsewhere = v4(203, 0, host.wrapping_mul(7));
        [
            PrefilterItem::of_endpoint(&v4(10, 244, host), ephemeral),
            PrefilterItem::of_endpoint(&v6(0x244, host / 100, host % 100), ephemeral),
            PrefilterItem::of_service(&v4(10, 244, host), 8_081),
            PrefilterItem::of_service(&elsewhere, 443),
            PrefilterItem::of_endpoint(&elsewhere, 443),
            PrefilterItem::of_node_port(&elsewhere, ephemeral),
        ]
    })
}

fn insert_all(prefilter: &mut SizedPrefilter<Rc<Memory>>, items: &[PrefilterItem]) {
    for item in items {
        prefilter.insert(*item);
    }
}

/// Returns the prefilter of a cluster that is inserted at once, with its memory.
fn filled(services: u32) -> (SizedPrefilter<Rc<Memory>>, Rc<Memory>) {
    let memory = Memory::new();
    let mut prefilter = SizedPrefilter::open(Rc::clone(&memory));
    let items = cluster(services);
    prefilter.reserve(items.len());
    insert_all(&mut prefilter, &items);
    (prefilter, memory)
}

fn share_that_passes(memory: &Memory) -> f64 {
    let (mut passed, mut all) = (0, 0);
    for item in others() {
        passed += u32::from(memory.may_contain(item));
        all += 1;
    }
    f64::from(passed) / f64::from(all)
}

#[test]
fn size_and_false_positives_follow_the_number_of_services() {
    for (services, words) in
        [(0, MIN_WORDS), (10, MIN_WORDS), (1_000, 1 << 12), (10_000, 1 << 15), (30_000, 1 << 16)]
    {
        let (prefilter, memory) = filled(services);
        assert_eq!(prefilter.words(), words, "{services} Services");
        let (measured, computed) = (share_that_passes(&memory), prefilter.false_positive_ratio());
        std::println!(
            "{services} Services: {} items, {} KiB, {:.3} % measured, {:.3} % computed",
            cluster(services).len(),
            words / 128,
            measured * 100.0,
            computed * 100.0
        );
        assert!(measured < 0.005, "{services} Services: {measured}");
        assert!((measured - computed).abs() < 0.001, "{services} Services: {measured} and {computed}");
    }
}

#[test]
fn cluster_that_doubles_before_copies_are_cleared_has_few_false_positives() {
    let memory = Memory::new();
    let mut prefilter = SizedPrefilter::open(Rc::clone(&memory));
    let items = cluster(30_000);
    let (before, after) = items.split_at(items.len() / 2);
    prefilter.reserve(before.len());
    insert_all(&mut prefilter, before);
    let small = prefilter.words();
    insert_all(&mut prefilter, after);
    assert_eq!(prefilter.words(), 2 * small);
    assert!(share_that_passes(&memory) < 0.01, "{}", prefilter.false_positive_ratio());
    // What the periodic look finds out by a scan of all maps.
    let mut needed = vec![0; prefilter.words() as usize];
    for item in &items {
        needed[item.index(prefilter.words() - 1) as usize] |= item.bits();
    }
    (0..prefilter.words()).zip(&needed).for_each(|(index, needed)| prefilter.clear(index, !needed));
    prefilter.recount();
    assert!(items.iter().all(|item| memory.may_contain(*item)));
    let (fresh, _) = filled(30_000);
    let [cleared, fresh] = [&prefilter, &fresh].map(SizedPrefilter::false_positive_ratio);
    assert!((cleared - fresh).abs() < f64::EPSILON, "{cleared} and {fresh}");
}

#[test]
fn large_prefilter_is_halved_when_it_is_opened_and_has_room_then() {
    let (mut prefilter, memory) = filled(1_000);
    let items = cluster(100);
    let (words, mut needed) = (prefilter.words(), vec![0; MAX_WORDS as usize]);
    for item in &items {
        needed[item.index(words - 1) as usize] |= item.bits();
    }
    (0..words).zip(&needed).for_each(|(index, needed)| prefilter.clear(index, !needed));
    memory.watch(&items);
    prefilter = SizedPrefilter::open(Rc::clone(&memory));
    assert_eq!(prefilter.words(), words / 8);
    insert_all(&mut prefilter, &cluster(200));
    assert_eq!(prefilter.words(), words / 8, "twice the items fit without another change");
    memory.check();
}

#[test]
fn prefilter_of_the_largest_size_takes_more_items() {
    let memory = Memory::new();
    let mut prefilter = SizedPrefilter::open(Rc::clone(&memory));
    prefilter.reserve(usize::MAX);
    assert_eq!(prefilter.words(), MAX_WORDS);
    let items = cluster(100_000);
    insert_all(&mut prefilter, &items);
    assert!(items.iter().all(|item| memory.may_contain(*item)));
    assert_eq!(prefilter.words(), MAX_WORDS);
}

#[test]
fn mask_that_is_no_size_is_replaced() {
    let memory = Memory::new();
    for mask in [0, 5, 1_000, u64::MAX] {
        memory.mask.set(mask);
        let prefilter = SizedPrefilter::open(Rc::clone(&memory));
        assert!(prefilter.words().is_power_of_two());
        assert_eq!(memory.mask.get(), u64::from(prefilter.words() - 1), "{mask:#x}");
    }
}

/// What happens to a prefilter.
#[derive(Clone, Debug)]
enum Change {
    /// So many new items are inserted, one by one.
    Insert(u32),
    /// Room is made for so many.
    Reserve(usize),
    /// Bits that no item needs are cleared.
    Clear,
    /// Another process opens it.
    Open,
    /// A flow is handed over.
    Share,
}

fn change() -> impl Strategy<Value = Change> {
    prop_oneof![
        (0..900u32).prop_map(Change::Insert),
        (0..6_000usize).prop_map(Change::Reserve),
        Just(Change::Clear),
        Just(Change::Open),
        Just(Change::Share),
    ]
}

/// A prefilter with items that it must have.
struct World {
    prefilter: SizedPrefilter<Rc<Memory>>,
    memory: Rc<Memory>,
    items: Vec<PrefilterItem>,
}

impl World {
    fn next_item(&self) -> PrefilterItem {
        let host = u32::try_from(self.items.len()).expect("few");
        PrefilterItem::of_endpoint(&v4(10, 0, host), 80)
    }

    fn apply(&mut self, change: &Change) {
        match change {
            Change::Insert(count) => (0..*count).for_each(|_| {
                let item = self.next_item();
                self.prefilter.insert(item);
                self.items.push(item);
            }),
            Change::Reserve(items) => self.prefilter.reserve(*items),
            Change::Clear => self.clear(),
            Change::Open => self.prefilter = SizedPrefilter::open(Rc::clone(&self.memory)),
            Change::Share => {
                let item = self.next_item();
                insert(&self.memory, item);
                self.items.push(item);
            }
        }
        // Programs that run from now on read this mask or a later one.
        self.memory.watch(&self.items);
        self.memory.check();
    }

    /// Clears all other bits of the words in use. No program has an older mask by then.
    fn clear(&mut self) {
        let words = self.prefilter.words();
        let mut needed = vec![0; words as usize];
        self.items.iter().for_each(|item| needed[item.index(words - 1) as usize] |= item.bits());
        self.memory.watch(&self.items);
        (0..words).zip(needed).for_each(|(index, needed)| self.prefilter.clear(index, !needed));
        self.prefilter.recount();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Checked after each of some writes, for the masks since the change began: by each, a program
    /// finds all items that were inserted before.
    #[test]
    fn no_program_misses_an_item_while_the_size_changes(changes in prop::collection::vec(change(), 1..12)) {
        let memory = Memory::new();
        let prefilter = SizedPrefilter::open(Rc::clone(&memory));
        let mut world = World { prefilter, memory, items: Vec::new() };
        for change in changes {
            world.apply(&change);
            let counted = SizedPrefilter { memory: Rc::clone(&world.memory), ..world.prefilter };
            prop_assert_eq!(world.prefilter.words(), words_in_use(&world.memory));
            let mut exact = counted;
            exact.recount();
            // A flow that is handed over is counted later.
            prop_assert!(world.prefilter.cubes <= exact.cubes);
            prop_assert!(world.prefilter.load <= exact.load);
        }
    }
}
