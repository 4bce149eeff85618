//! Follows packets through netfilter: rules of a table of its own mark the first packets of
//! connections to some destinations (`meta nftrace set 1`), and the kernel reports their way
//! through all rules of nf_tables (`NFNLGRP_NFTRACE`, kernel 4.6). Rules of the legacy iptables
//! report nothing, but what is left of a packet behind them is seen.

use std::{
    net::{IpAddr, SocketAddr},
    sync::LazyLock,
};

use libc::{NF_DROP, NFNL_SUBSYS_NFTABLES, NFPROTO_IPV4, NFPROTO_IPV6, NFT_MSG_TRACE, c_int};
use netlink_sys::protocols::NETLINK_NETFILTER;

use super::{
    KernelError,
    netlink::{Attributes, kernel_constants, messages_of, notifications::Notifications},
    nftables::{
        Chain, Change, ElementKey, ElementValue, Field, FieldType, Hook, Nftables, Rule, Selector, Set,
        SetKind, Statement,
    },
};
use crate::net::{IpFamily, Protocol};

kernel_constants! {
    // enum nfnetlink_groups
    NFNLGRP_NFTRACE = 9,
    // enum nft_trace_attributes, enum nft_verdict_attributes
    NFTA_TRACE_TABLE = 1, NFTA_TRACE_CHAIN = 2, NFTA_TRACE_VERDICT = 5, NFTA_TRACE_ID = 6,
    NFTA_TRACE_NETWORK_HEADER = 8, NFTA_TRACE_TRANSPORT_HEADER = 9, NFTA_TRACE_IIF = 10,
    NFTA_TRACE_NFPROTO = 15,
    NFTA_VERDICT_CODE = 1,
}

const COMMENT: &str = "shunt trace runs";
/// How many connections a second are followed at most, and how many at once.
const RATE: u32 = 1000;
const BURST: u32 = 500;
/// The room for reports that are not read yet. Each takes about two KiB there, and a packet causes
/// some tens of them.
const BUFFER: usize = 16 << 20;
/// Before translation, but behind conntrack, which knows the first packet of a connection.
const BEFORE: c_int = libc::NF_IP_PRI_MANGLE;
/// Behind everything.
const AFTER: c_int = 1000;

static DESTINATIONS: LazyLock<Set> = LazyLock::new(|| Set {
    name: "destinations".into(),
    key: &[FieldType::Address, FieldType::Protocol, FieldType::Port],
    kind: SetKind::Plain,
    comment: "",
});

static ADDRESSES: LazyLock<Set> = LazyLock::new(|| Set {
    name: "addresses".into(),
    key: &[FieldType::Address],
    kind: SetKind::Plain,
    comment: "",
});

/// Where packets go that are followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Destination {
    /// An address, a protocol and a port.
    Port(SocketAddr, Protocol),
    /// All ports of an address.
    Address(IpAddr),
}

/// Where a packet was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// As it came in on a link, or as a process of the node sends it: before translation.
    Before,
    /// As it goes to a process of the node, or leaves.
    After,
    /// In a rule of another table, which dropped or rejected it.
    Dropped,
}

/// What the kernel reports about a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sighting {
    /// The packet, for as long as it is on its way.
    pub packet: u32,
    /// Where it was seen.
    pub stage: Stage,
    /// Source and destination; `None` where the kernel reports no headers.
    pub addresses: Option<[SocketAddr; 2]>,
    /// The protocol.
    pub protocol: Option<Protocol>,
    /// The interface index of the link on which it came in; 0 for a packet of the node.
    pub link: u32,
    /// Table and chain.
    pub at: String,
}

/// The rules, as long as they are needed.
#[derive(Debug)]
struct Table {
    name: &'static str,
    nftables: Nftables,
}

impl Drop for Table {
    fn drop(&mut self) {
        let delete = IpFamily::ALL.map(|family| (family, Change::DeleteTable));
        // It may be gone.
        let _ = self.nftables.commit(self.name, &delete);
    }
}

/// Follows the first packets of connections.
pub struct PacketTrace {
    table: Table,
    notifications: Notifications,
}

impl PacketTrace {
    /// Begins to follow packets to these destinations, by a table with this name. The table is
    /// removed when this is dropped.
    ///
    /// The table has no owner (`NFT_TABLE_F_OWNER`), for which the kernel would remove it when the
    /// process is killed: nft 1.0.6 aborts when it lists such tables as JSON, in every program.
    pub fn start(
        name: &'static str,
        destinations: impl IntoIterator<Item = Destination>,
    ) -> Result<Self, KernelError> {
        let group = NFNLGRP_NFTRACE.cast_unsigned();
        let notifications = Notifications::open(NETLINK_NETFILTER, &[group], "an nfnetlink socket")?;
        notifications.make_room(BUFFER)?;
        let mut nftables = Nftables::open()?;
        let mut changes = table();
        changes.extend(destinations.into_iter().map(element));
        nftables.commit(name, &changes)?;
        Ok(Self { table: Table { name, nftables }, notifications })
    }

    /// Waits for the next reports. Returns `None` if some were lost.
    pub async fn next(&mut self) -> Result<Option<Vec<Sighting>>, KernelError> {
        let datagram = self.notifications.next().await?;
        Ok(datagram.map(|datagram| sightings(datagram, self.table.name)))
    }
}

/// Removes our tables.
pub fn remove_tables(is_ours: impl Fn(&str) -> bool) -> Result<(), KernelError> {
    let mut nftables = Nftables::open()?;
    for family in IpFamily::ALL {
        // They are listed first: to delete one that does not exist takes the kernel 16 ms.
        let Ok(tables) = nftables.list_tables(family) else { continue };
        for name in tables.iter().filter(|name| is_ours(name)) {
            // It may be gone.
            let _ = nftables.commit(name, &[(family, Change::DeleteTable)]);
        }
    }
    Ok(())
}

/// Returns the tables of both families with their chains, without destinations.
fn table() -> Vec<(IpFamily, Change)> {
    let chain = |name: &str, number, priority| {
        let hook = Some(Hook { kind: "filter", number, priority });
        Change::AddChain(Chain { name: name.into(), hook })
    };
    let follow = |key, set: &Set| {
        Rule::new([
            Statement::InSet(key, set.name.clone()),
            Statement::StateNew,
            Statement::Limit { rate: RATE, burst: BURST },
            Statement::Trace,
        ])
    };
    let port =
        follow(vec![Selector::Destination, Selector::Protocol, Selector::DestinationPort], &DESTINATIONS);
    let address = follow(vec![Selector::Destination], &ADDRESSES);
    let changes = [
        Change::AddTable(COMMENT),
        Change::AddSet(DESTINATIONS.clone()),
        Change::AddSet(ADDRESSES.clone()),
        chain("prerouting", libc::NF_INET_PRE_ROUTING, BEFORE),
        chain("output", libc::NF_INET_LOCAL_OUT, BEFORE),
        chain("input", libc::NF_INET_LOCAL_IN, AFTER),
        chain("postrouting", libc::NF_INET_POST_ROUTING, AFTER),
        Change::AddRule("prerouting".into(), port.clone()),
        Change::AddRule("output".into(), port),
        Change::AddRule("prerouting".into(), address.clone()),
        Change::AddRule("output".into(), address),
    ];
    IpFamily::ALL.iter().flat_map(|family| changes.iter().map(|change| (*family, change.clone()))).collect()
}

fn element(destination: Destination) -> (IpFamily, Change) {
    let (set, address, key) = match destination {
        Destination::Port(to, protocol) => {
            let key = [Field::Address(to.ip()), Field::Protocol(protocol), Field::Port(to.port())];
            (&DESTINATIONS, to.ip(), ElementKey::new(&key))
        }
        Destination::Address(address) => (&ADDRESSES, address, ElementKey::new(&[Field::Address(address)])),
    };
    (IpFamily::of(address), Change::AddElement(set, key, ElementValue::Member(None)))
}

/// Reads what a datagram reports about packets that the table marked.
fn sightings(datagram: &[u8], own: &str) -> Vec<Sighting> {
    let messages = messages_of(datagram).filter(|message| {
        let [subsystem, kind] = message.message_type().to_be_bytes().map(c_int::from);
        (subsystem, kind) == (NFNL_SUBSYS_NFTABLES, NFT_MSG_TRACE)
    });
    messages.filter_map(|message| sighting(Attributes::after_header(message.payload()), own)).collect()
}

fn sighting(report: Attributes<'_>, own: &str) -> Option<Sighting> {
    let (table, chain) = (report.string(NFTA_TRACE_TABLE)?, report.string(NFTA_TRACE_CHAIN)?);
    let verdict = report.nested(NFTA_TRACE_VERDICT).and_then(|verdict| verdict.be_int(NFTA_VERDICT_CODE));
    let network = report.get(NFTA_TRACE_NETWORK_HEADER);
    let stage = match chain {
        // Only the first report of a chain has the headers.
        "prerouting" | "output" if table == own && network.is_some() => Stage::Before,
        "input" | "postrouting" if table == own && network.is_some() => Stage::After,
        _ if verdict == Some(NF_DROP) => Stage::Dropped,
        _ => return None,
    };
    let family = report.be_int(NFTA_TRACE_NFPROTO)?;
    let headers = network.and_then(|network| {
        read_headers(family, network, report.get(NFTA_TRACE_TRANSPORT_HEADER).unwrap_or_default())
    });
    let (addresses, protocol) = headers.unzip();
    Some(Sighting {
        packet: report.be32(NFTA_TRACE_ID)?,
        stage,
        addresses,
        protocol,
        link: report.be32(NFTA_TRACE_IIF).unwrap_or_default(),
        at: format!("{table} {chain}"),
    })
}

/// Returns source, destination and protocol.
fn read_headers(family: c_int, network: &[u8], transport: &[u8]) -> Option<([SocketAddr; 2], Protocol)> {
    let (source, destination, protocol): (IpAddr, IpAddr, u8) = match family {
        NFPROTO_IPV4 => {
            let address = |at: usize| network.get(at..)?.first_chunk::<4>().copied();
            (address(12)?.into(), address(16)?.into(), *network.get(9)?)
        }
        NFPROTO_IPV6 => {
            let address = |at: usize| network.get(at..)?.first_chunk::<16>().copied();
            (address(8)?.into(), address(24)?.into(), *network.get(6)?)
        }
        _ => return None,
    };
    let port = |at: usize| transport.get(at..)?.first_chunk().copied().map(u16::from_be_bytes);
    let addresses = [SocketAddr::new(source, port(0)?), SocketAddr::new(destination, port(2)?)];
    Some((addresses, Protocol::from_number(protocol)?))
}

#[cfg(test)]
mod tests {
    use nix::sched::{CloneFlags, unshare};

    use super::{
        super::{command::Launcher, nft::Nft},
        *,
    };

    /// Needs root, as every test of the kernel.
    #[test]
    fn every_nft_lists_the_tables_while_one_follows_packets() {
        let test = || {
            unshare(CloneFlags::CLONE_NEWNET).expect("a network namespace, as root");
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let _context = runtime.as_ref().expect("a runtime").enter();
            let listed = || Nft::new(Launcher::default()).list_tables_json().expect("listed");
            let port = Destination::Port("10.96.0.80:80".parse().expect("an address"), Protocol::Tcp);
            let addresses = ["10.96.0.80", "fd00::80"].map(|address| address.parse().expect("an address"));
            let destinations = addresses.map(Destination::Address).into_iter().chain([port]);
            let trace = PacketTrace::start("shunt-trace-1", destinations).expect("it follows");
            assert_eq!(listed().matches("shunt-trace-1").count(), 2, "{}", listed());
            // For an owner, nft 1.0.6 writes what is elsewhere in its memory, or aborts.
            assert!(!listed().contains("flags"), "{}", listed());
            drop(trace);
            assert!(!listed().contains("shunt-trace"), "{}", listed());
        };
        std::thread::spawn(test).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    }

    #[test]
    fn tables_that_a_killed_process_left_are_removed() {
        let test = || {
            unshare(CloneFlags::CLONE_NEWNET).expect("a network namespace, as root");
            let nft = Nft::new(Launcher::default());
            nft.apply("table ip shunt-trace-1 { }; table ip6 shunt-trace-1 { }; table ip theirs { }")
                .expect("made");
            remove_tables(|name| name == "shunt-trace-1").expect("removed");
            let listed = nft.list_tables_json().expect("listed");
            assert!(listed.contains("theirs") && !listed.contains("shunt-trace"), "{listed}");
        };
        std::thread::spawn(test).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    }

    #[test]
    fn headers_of_both_families_are_read() {
        let mut v4 = [0; 20];
        v4[9] = 17;
        v4[12..].copy_from_slice(&[192, 0, 2, 1, 10, 96, 0, 53]);
        let ports = [0x10, 0, 0, 53];
        let expected = ["192.0.2.1:4096", "10.96.0.53:53"].map(|text| text.parse().expect("an address"));
        assert_eq!(read_headers(NFPROTO_IPV4, &v4, &ports), Some((expected, Protocol::Udp)));
        let mut v6 = [0; 40];
        v6[6] = 6;
        v6[23] = 1;
        v6[39] = 2;
        let expected = ["[::1]:4096", "[::2]:53"].map(|text| text.parse().expect("an address"));
        assert_eq!(read_headers(NFPROTO_IPV6, &v6, &ports), Some((expected, Protocol::Tcp)));
        assert_eq!(read_headers(NFPROTO_IPV6, &v6[..30], &ports), None, "cut short");
        assert_eq!(read_headers(NFPROTO_IPV4, &v4, &[]), None, "no ports");
    }
}
