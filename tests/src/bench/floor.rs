//! Programs that do the least that a way through the node asks for: they translate one connection
//! by constants. What they cost is a floor for programs that know Services.

use std::{
    collections::BTreeSet,
    net::{Ipv4Addr, SocketAddrV4},
};

use anyhow::{Context as _, Result};
use aya::{
    Ebpf, EbpfLoader, include_bytes_aligned,
    programs::{
        LinkOrder, SchedClassifier, TcAttachType, Xdp,
        tc::{SchedClassifierLinkId, TcAttachOptions},
    },
    util::KernelVersion,
};
use nix::net::if_::if_nametoindex;

use crate::{
    flood,
    world::{Host, World},
};

static OBJECT: &[u8] = include_bytes_aligned!(concat!(env!("OUT_DIR"), "/shunt-floor"));
/// The link of the nodes.
const LINK: &str = "eth0";

/// The programs, which get their rules as constants.
const INGRESS_PROGRAM: &str = "floor_ingress";
const EGRESS_PROGRAM: &str = "floor_egress";
pub(super) const XDP_PROGRAM: &str = "floor_xdp";

/// What the programs do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Kind {
    /// Packets leave on the other link at once, without the stack.
    pub(super) redirects: bool,
    pub(super) memory: Memory,
    /// XDP sends packets back before the stack. It is not attached: the generator calls it.
    pub(super) is_xdp: bool,
}

/// What the programs remember of flows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Memory {
    /// Nothing.
    None,
    /// Each packet is looked up in a table, which gets an entry for each direction of a flow.
    Table,
    /// The same, and a flow is in a second table until its client has acknowledged the endpoint's
    /// answer. A FIN or reset is noted in both entries.
    State,
}

/// A connection that the programs translate, with both addresses.
#[derive(Clone, Copy, Debug)]
pub(super) struct Connection {
    pub(super) client: Ipv4Addr,
    /// The node, with the port that the client connects to.
    pub(super) vip: SocketAddrV4,
    pub(super) endpoint: SocketAddrV4,
    /// The pod of the node that is the endpoint, or the node behind which it is.
    pub(super) next: Host,
    /// Only what the client sends is translated.
    pub(super) is_one_way: bool,
}

/// The programs: on links of node1, or loaded only. They are removed when this is dropped.
#[derive(Debug)]
pub(super) struct Floor {
    _programs: Ebpf,
}

impl Floor {
    /// Attaches programs that translate a connection, or loads the one for XDP. Kernel 6.6.
    pub(super) fn translating(world: &World, kind: Kind, connection: &Connection) -> Result<Self> {
        let rules = connection.rules(world, kind)?;
        let mut ebpf = load(&rules, kind.memory)?;
        if kind.is_xdp {
            let program: &mut Xdp = ebpf.program_mut(XDP_PROGRAM).context("in the object")?.try_into()?;
            program.load()?;
        } else {
            attach(world, &mut ebpf, rules.iter().map(|rule| (rule.on.clone(), rule.is_egress)))?;
        }
        Ok(Self { _programs: ebpf })
    }

    /// Attaches programs that let all packets pass, where packets for a pod of the node and for
    /// another node come in and leave. Kernel 6.6.
    pub(super) fn letting_pass(world: &World) -> Result<Self> {
        let mut ebpf = load(&[], Memory::None)?;
        let links = [LINK.to_owned(), Host::A2.node_link()];
        let hooks = links.into_iter().flat_map(|link| [(link.clone(), false), (link, true)]);
        attach(world, &mut ebpf, hooks)?;
        Ok(Self { _programs: ebpf })
    }
}

/// Returns true if this kernel can attach the programs: 6.6.
pub(super) fn is_possible() -> bool {
    KernelVersion::current().is_ok_and(|version| version >= KernelVersion::new(6, 6, 0))
}

/// Loads the object with these rules.
fn load(rules: &[Rule], memory: Memory) -> Result<Ebpf> {
    let mut words = [[0; 12]; RULES];
    for rule in rules {
        // A program has at most one rule for packets of the client, and one for those of the
        // endpoint.
        words[2 * usize::from(rule.is_egress) + usize::from(rule.by_source)] = rule.words();
    }
    let mut loader = EbpfLoader::new();
    loader.override_global("RULES", &words, true);
    // The programs have both tables, even if they use none.
    let unused: &[&'static str] = match memory {
        Memory::None => &["TRANSLATIONS", "UNASSURED_TRANSLATIONS"],
        Memory::Table => &["UNASSURED_TRANSLATIONS"],
        Memory::State => &[],
    };
    for table in unused {
        loader.map_max_entries(table, 1);
    }
    Ok(loader.load(OBJECT)?)
}

/// Attaches a program at each hook: a link, and whether packets leave there.
fn attach(world: &World, ebpf: &mut Ebpf, hooks: impl Iterator<Item = (String, bool)>) -> Result<()> {
    for (link, is_egress) in hooks.collect::<BTreeSet<_>>() {
        let (name, hook) = if is_egress {
            (EGRESS_PROGRAM, TcAttachType::Egress)
        } else {
            (INGRESS_PROGRAM, TcAttachType::Ingress)
        };
        let program: &mut SchedClassifier = ebpf.program_mut(name).context("in the object")?.try_into()?;
        if program.fd().is_err() {
            program.load()?;
        }
        let attached: Result<SchedClassifierLinkId> = world.in_namespace(Host::Node1, || {
            let options = TcAttachOptions::TcxOrder(LinkOrder::default());
            Ok(program.attach_with_options(&link, hook, options)?)
        });
        attached.with_context(|| format!("attach {name} to {link}"))?;
    }
    Ok(())
}

/// The number of rules: two for packets that come in, and two for packets that leave.
const RULES: usize = 4;

/// What a program does with packets that come from an end or go to it.
#[derive(Debug)]
struct Rule {
    on: String,
    is_egress: bool,
    by_source: bool,
    end: SocketAddrV4,
    source: Option<SocketAddrV4>,
    /// Port 0 stands for that of the packet.
    destination: Option<SocketAddrV4>,
    /// Ethernet addresses and the index of the link, if packets leave at once.
    out: Option<([u8; 12], u32)>,
    memory: Memory,
}

impl Rule {
    /// Returns the words that the program reads, in the order of the packet.
    fn words(&self) -> [u32; 12] {
        let end = |end: Option<SocketAddrV4>| {
            let end = end.unwrap_or(SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 0));
            [u32::from_ne_bytes(end.ip().octets()), end.port().to_be().into()]
        };
        let [at, source, destination] = [Some(self.end), self.source, self.destination].map(end);
        let (hardware, link) = self.out.unwrap_or_default();
        let word = |at: usize| {
            let bytes = hardware.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
            bytes.map_or(0, u32::from_ne_bytes)
        };
        let hardware = [0, 4, 8].map(word);
        let parts: [&[u32]; 6] =
            [&[self.by_source.into()], &at, &source, &destination, &hardware, &[link, self.memory as u32]];
        let mut words = [0; 12];
        words.iter_mut().zip(parts.concat()).for_each(|(to, from)| *to = from);
        words
    }
}

impl Connection {
    /// Returns the rules: for packets of the client and of the endpoint in turn.
    fn rules(&self, world: &World, kind: Kind) -> Result<Vec<Rule>> {
        let next = self.next;
        let pod_link = if next.node() == Some(Host::Node1) { next.node_link() } else { LINK.to_owned() };
        let mut rules = self.rules_of_stack(&pod_link, kind);
        if kind.redirects {
            rules.truncate(2);
            for (rule, leaving, (link, to)) in [
                (0, SocketAddrV4::new(*self.vip.ip(), 0), (pod_link.as_str(), next)),
                (1, self.vip, (LINK, Host::Client)),
            ] {
                (rules[rule].source, rules[rule].out) = (Some(leaving), Some(out_to(world, link, to)?));
            }
        }
        if self.is_one_way {
            rules.retain(|rule| !rule.by_source);
        }
        Ok(rules)
    }

    /// Returns the rules for packets that go through the stack. The destination is translated where
    /// a packet comes in, and the source where it leaves: the kernel drops what comes in with an
    /// address of the node.
    fn rules_of_stack(&self, pod_link: &str, kind: Kind) -> Vec<Rule> {
        let Self { client, vip, endpoint, .. } = *self;
        let rule = |on: &str, is_egress, by_source, end| Rule {
            on: on.to_owned(),
            is_egress,
            by_source,
            end,
            source: None,
            destination: None,
            out: None,
            memory: kind.memory,
        };
        let any_port = |address| Some(SocketAddrV4::new(address, 0));
        vec![
            Rule { destination: Some(endpoint), ..rule(LINK, false, false, vip) },
            Rule { destination: any_port(client), ..rule(pod_link, false, true, endpoint) },
            Rule { source: any_port(*vip.ip()), ..rule(pod_link, true, false, endpoint) },
            Rule { source: Some(vip), ..rule(LINK, true, true, endpoint) },
        ]
    }
}

/// Returns the Ethernet addresses of packets that leave node1 on a link to a host, and the index of
/// the link.
fn out_to(world: &World, link: &str, to: Host) -> Result<([u8; 12], u32)> {
    let (from, index) = world.in_namespace(Host::Node1, || {
        Ok((flood::hardware_address(link)?, if_nametoindex(link).context("a link of node1")?))
    })?;
    let to = world.hardware_address(to)?;
    let addresses = [to, from].concat().try_into();
    Ok((addresses.ok().context("two addresses of six bytes")?, index))
}
