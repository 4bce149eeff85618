//! Tests against the kernel and nft, in network namespaces of their own. Needs root.

use std::{thread, time::Duration};

use nix::sched::{CloneFlags, unshare};

use super::{
    Chain, Change, ElementData, ElementKey, ElementValue, Field, FieldType, Hook, IpFamily, Name, NftFamily,
    Nftables, Rule, Selector, Set, SetKind, Statement, Verdict,
};
use crate::{
    kernel::{
        KernelError,
        command::{Command, Launcher},
    },
    net::Protocol,
};

const TABLE: &str = "kube-proxy";
const KEY: &[FieldType] = &[FieldType::Address, FieldType::Protocol, FieldType::Port];
const SLOT: &[FieldType] = &[FieldType::Address, FieldType::Protocol, FieldType::Port, FieldType::Number];
const ENDPOINT: &[FieldType] = &[FieldType::Address, FieldType::Port];
const HOOK: Hook = Hook { kind: "nat", number: 4, priority: 100 };
const DESTINATION: [Selector; 3] = [Selector::Destination, Selector::Protocol, Selector::DestinationPort];

fn set(name: &str, key: &'static [FieldType], kind: SetKind) -> &'static Set {
    Box::leak(Box::new(Set { name: name.into(), key, kind, comment: "a set" }))
}

/// Runs a test on a thread in a new network namespace.
fn in_new_namespace<T: Send>(test: impl FnOnce() -> T + Send) -> T {
    let run = || {
        unshare(CloneFlags::CLONE_NEWNET).expect("a network namespace, as root");
        test()
    };
    thread::scope(|scope| scope.spawn(run).join()).unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn nft(args: &[&str], input: &str) -> String {
    let command = Command::new("nft", &Launcher::default()).args(args).stdin(input);
    command.run().unwrap_or_else(|error| panic!("{error}")).stdout
}

fn slot(address: &str, number: u32) -> ElementKey {
    let address = address.parse().expect("an address");
    ElementKey::new(&[
        Field::Address(address),
        Field::Protocol(Protocol::Tcp),
        Field::Port(80),
        Field::Number(number),
    ])
}

/// Returns rules that have each statement.
fn rules(family: IpFamily) -> Vec<Rule> {
    let (odd, one, endpoint) = match family {
        IpFamily::V4 => ("10.128.0.0/9", "192.0.2.7/32", "10.244.1.11:8080"),
        IpFamily::V6 => ("fd80::/9", "2001:db8::7/128", "[fd44:1::11]:8080"),
    };
    let range = |text: &str| text.parse().expect("a range");
    let interface = |name: &str, inside| Statement::InputInterface { name: name.into(), inside };
    let slots = DESTINATION.into_iter().chain([Selector::Random(4)]).collect();
    let source = |text, inside| Statement::Source { range: range(text), inside };
    [
        vec![
            Statement::InSet(vec![Selector::Destination], "cluster-ips".into()),
            source(range_text(family), false),
            Statement::SetMark(0x4000),
        ],
        vec![source(odd, true), Statement::Destination(range(one)), Statement::Verdict(Verdict::Drop)],
        vec![interface("veth*", false), interface("cbr0", true), Statement::Verdict(Verdict::Return)],
        vec![Statement::SourceIsLocal, Statement::Verdict(Verdict::Goto("there".into()))],
        vec![Statement::StateNew, Statement::Verdict(Verdict::Jump("there".into()))],
        vec![Statement::HasMark(0x4000), Statement::ToggleMark(0x4000), Statement::Masquerade],
        vec![
            Statement::HasMark(0x4000),
            Statement::Protocol(Protocol::Udp),
            Statement::MasqueradeTo { first: 32_768, last: 65_535 },
        ],
        vec![Statement::StatusDnat, Statement::OneIn(3), Statement::Reject],
        vec![Statement::Limit { rate: 1000, burst: 500 }, Statement::Trace],
        vec![Statement::VerdictMap(DESTINATION.into(), "service-ips".into())],
        vec![Statement::DnatByMap(slots, "service-endpoints".into())],
        vec![Statement::UpdateSet("clients".into(), vec![Selector::Source])],
        vec![Statement::Protocol(Protocol::Tcp), Statement::Dnat(endpoint.parse().expect("an endpoint"))],
        vec![Statement::Destination(range(range_text(family))), Statement::Verdict(Verdict::Drop)],
    ]
    .map(|statements| Rule::new(statements).comment("a rule"))
    .into()
}

fn range_text(family: IpFamily) -> &'static str {
    match family {
        IpFamily::V4 => "10.244.0.0/16",
        IpFamily::V6 => "fd44::/16",
    }
}

fn structure() -> Vec<Change> {
    let chain = |name: &str, hook| Change::AddChain(Chain { name: name.into(), hook });
    let sets = [
        set("cluster-ips", &[FieldType::Address], SetKind::Plain),
        set("clients", &[FieldType::Address], SetKind::Dynamic(Duration::from_hours(3), 65535)),
        set("service-ips", KEY, SetKind::VerdictMap),
        set("service-endpoints", SLOT, SetKind::DataMap(ENDPOINT)),
    ];
    let mut changes = vec![Change::AddTable("rules")];
    changes.extend(sets.map(|set| Change::AddSet(set.clone())));
    changes.extend([chain("hooked", Some(HOOK)), chain("there", None), chain("here", None)]);
    changes
}

fn whole_table(family: IpFamily) -> Vec<(IpFamily, Change)> {
    let chain = Name::from("here");
    let rules = rules(family).into_iter().map(|rule| Change::AddRule(chain.clone(), rule));
    structure().into_iter().chain(rules).map(|change| (family, change)).collect()
}

#[test]
fn nft_lists_rules_as_displayed_and_reads_its_listing_back() {
    in_new_namespace(|| {
        let mut nftables = Nftables::open().expect("nf_tables");
        for family in IpFamily::ALL {
            nftables.commit(TABLE, &whole_table(family)).unwrap_or_else(|error| panic!("{error}"));
            let listing = nft(&["list", "table", NftFamily::of(family).keyword, TABLE], "");
            for rule in rules(family) {
                let shown = rule.display(family);
                assert!(listing.lines().any(|line| line.trim() == shown), "missing: {shown}\n{listing}");
            }
            assert!(
                listing.contains("type nat hook postrouting priority srcnat; policy accept;"),
                "{listing}"
            );
            nft(&["delete", "table", NftFamily::of(family).keyword, TABLE], "");
            nft(&["-f", "-"], &listing);
            assert_eq!(nft(&["list", "table", NftFamily::of(family).keyword, TABLE], ""), listing);
        }
    });
}

/// Returns the elements of a set or map, sorted by key.
fn sorted_elements(nftables: &mut Nftables, family: IpFamily, set: &Set) -> Vec<(ElementKey, ElementValue)> {
    let mut elements = nftables.list_elements(family, TABLE, &set.name).unwrap();
    elements.sort_by_key(|(key, _)| *key);
    elements
}

#[test]
fn failed_transaction_changes_no_element() {
    in_new_namespace(|| {
        let mut nftables = Nftables::open().expect("nf_tables");
        let map = set("service-endpoints", SLOT, SetKind::DataMap(ENDPOINT));
        let verdicts = set("service-ips", KEY, SetKind::VerdictMap);
        for (family, address, first, second) in [
            (IpFamily::V4, "10.96.0.1", "10.244.1.1:8080", "10.244.1.2:8080"),
            (IpFamily::V6, "fd96::1", "[fd44::1]:8080", "[fd44::2]:8080"),
        ] {
            let to = |text: &str| {
                ElementValue::Data(ElementData::from_endpoint(text.parse().expect("an endpoint")))
            };
            let goto = ElementValue::verdict(Verdict::Goto("there".into()), Some("a/b:c".into()));
            let key = ElementKey::new(&[
                Field::Address(address.parse().unwrap()),
                Field::Protocol(Protocol::Udp),
                Field::Port(53),
            ]);
            let mut changes = structure();
            changes.extend([
                Change::AddElement(map, slot(address, 0), to(first)),
                Change::AddElement(map, slot(address, 1), to(second)),
                Change::AddElement(verdicts, key, goto.clone()),
            ]);
            let changes: Vec<_> = changes.into_iter().map(|change| (family, change)).collect();
            nftables.commit(TABLE, &changes).unwrap_or_else(|error| panic!("{error}"));
            let listing = nft(&["list", "map", NftFamily::of(family).keyword, TABLE, &map.name], "");
            assert!(listing.contains(&format!("{address} . tcp . 80 . 1 : ")), "{listing}");
            assert_eq!(nftables.list_elements(family, TABLE, &verdicts.name).unwrap(), [(key, goto)]);

            let replace = [
                (family, Change::DeleteElement(map, slot(address, 1))),
                (family, Change::AddElement(map, slot(address, 1), to(first))),
            ];
            nftables.commit(TABLE, &replace).unwrap_or_else(|error| panic!("{error}"));
            let expected = [(slot(address, 0), to(first)), (slot(address, 1), to(first))];
            assert_eq!(sorted_elements(&mut nftables, family, map), expected);

            let refused = [
                (family, Change::DeleteElement(map, slot(address, 0))),
                (family, Change::DeleteElement(map, slot(address, 7))),
            ];
            let error = nftables.commit(TABLE, &refused).expect_err("slot 7 does not exist").to_string();
            assert!(error.contains("delete element") && error.contains(". tcp . 80 . "), "{error}");
            assert_eq!(sorted_elements(&mut nftables, family, map), expected, "no element changed");
        }
    });
}

/// The receive buffer takes the answers of some hundred changes.
#[test]
fn thousands_of_refused_changes_leave_no_answer_for_the_next_transaction() {
    in_new_namespace(|| {
        let mut nftables = Nftables::open().expect("root");
        let chain = |number: u16| Name::from(format!("chain-{number}"));
        let table = (IpFamily::V4, Change::AddTable("a table"));
        nftables.commit(TABLE, std::slice::from_ref(&table)).expect("a table");
        let refused: Vec<_> = (0..3_000).map(|n| (IpFamily::V4, Change::DeleteChain(chain(n)))).collect();
        match nftables.commit(TABLE, &refused) {
            Err(KernelError::Call { object, source, .. }) => {
                assert_eq!(source.raw_os_error(), Some(libc::ENOENT));
                assert!(object.contains("chain-0"), "{object}");
            }
            other => panic!("{other:?}"),
        }
        let added = Chain { name: chain(0), hook: None };
        nftables.commit(TABLE, &[(IpFamily::V4, Change::AddChain(added))]).expect("a chain");
    });
}

#[test]
fn table_is_listed_with_its_chains_and_sets() {
    in_new_namespace(|| {
        let mut nftables = Nftables::open().expect("nf_tables");
        for family in IpFamily::ALL {
            assert!(!nftables.list_table(family, TABLE).unwrap().exists);
            nft(
                &["-f", "-"],
                &format!("table {} other {{ chain here {{ }}; }}", NftFamily::of(family).keyword),
            );
            // An anonymous set belongs to its rule.
            let unnamed = format!(
                "table {} {TABLE} {{ chain mapped {{ meta l4proto vmap {{ tcp : drop }}; }}; }}",
                NftFamily::of(family).keyword
            );
            nft(&["-f", "-"], &unnamed);
            nftables.commit(TABLE, &whole_table(family)).unwrap_or_else(|error| panic!("{error}"));
            let mut listed = nftables.list_table(family, TABLE).unwrap();
            listed.chains.sort_by(|one, other| one.name.cmp(&other.name));
            let chain = |(name, hook): (&str, _)| Chain { name: name.into(), hook };
            let expected = [("here", None), ("hooked", Some(HOOK)), ("mapped", None), ("there", None)];
            assert_eq!(listed.chains, expected.map(chain));
            assert_eq!(listed.sets.len(), 4, "{:?}", listed.sets);
            for change in structure() {
                if let Change::AddSet(set) = change {
                    assert_eq!(listed.sets.get(&set.name), Some(&set.spec(family)), "{}", set.name);
                }
            }
        }
    });
}

#[test]
fn thousands_of_elements_fit_into_one_transaction() {
    in_new_namespace(|| {
        let mut nftables = Nftables::open().expect("nf_tables");
        let map = set("service-endpoints", SLOT, SetKind::DataMap(ENDPOINT));
        let endpoint = ElementValue::Data(ElementData::from_endpoint("10.244.1.1:8080".parse().unwrap()));
        let slots =
            (0..20_000).map(|number| Change::AddElement(map, slot("10.96.0.1", number), endpoint.clone()));
        let changes: Vec<_> =
            structure().into_iter().chain(slots).map(|change| (IpFamily::V4, change)).collect();
        nftables.commit(TABLE, &changes).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(nftables.list_elements(IpFamily::V4, TABLE, &map.name).unwrap().len(), 20_000);
        assert_eq!(nftables.list_table(IpFamily::V4, "other").unwrap().sets.len(), 0);
    });
}
