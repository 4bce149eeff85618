//! Programs that do the least that a way through the node asks for: they translate one connection
//! by constants. What they cost is a floor for programs that know Services.

use std::{
    collections::BTreeMap,
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
const PROGRAM: &str = "floor_translate";
pub(super) const XDP_PROGRAM: &str = "floor_xdp";

/// What the programs do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Kind {
    /// Packets leave on the other link at once, without the stack.
    pub(super) redirects: bool,
    /// Each packet is looked up in a table, which gets an entry for each direction of a flow.
    pub(super) remembers: bool,
    /// XDP sends packets back before the stack. It is not attached: the generator calls it.
    pub(super) is_xdp: bool,
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
    _programs: Vec<Ebpf>,
}

impl Floor {
    /// Attaches programs that translate a connection, or loads the one for XDP. Kernel 6.6.
    pub(super) fn translating(world: &World, kind: Kind, connection: &Connection) -> Result<Self> {
        let mut places: BTreeMap<(String, bool), Rules> = BTreeMap::new();
        for (number, rule) in connection.rules(world, kind)?.iter().enumerate() {
            let rules = places.entry((rule.on.clone(), rule.is_egress)).or_default();
            // A hook of a link has at most one rule for packets of the client, and one for those of
            // the endpoint. They take turns in the list.
            rules[number % RULES] = rule.words();
        }
        if kind.is_xdp {
            let programs = places.values().map(load_xdp).collect::<Result<_>>()?;
            return Ok(Self { _programs: programs });
        }
        let attach =
            |((link, is_egress), rules): (&(String, bool), &Rules)| attach(world, (link, *is_egress), rules);
        Ok(Self { _programs: places.iter().map(attach).collect::<Result<_>>()? })
    }

    /// Attaches programs that let all packets pass, where packets for a pod of the node and for
    /// another node come in and leave. Kernel 6.6.
    pub(super) fn letting_pass(world: &World) -> Result<Self> {
        let pod_link = Host::A2.node_link();
        let hooks = [LINK, &pod_link].into_iter().flat_map(|link| [(link, false), (link, true)]);
        Ok(Self {
            _programs: hooks.map(|hook| attach(world, hook, &Rules::default())).collect::<Result<_>>()?,
        })
    }
}

/// Returns true if this kernel can attach the programs: 6.6.
pub(super) fn is_possible() -> bool {
    KernelVersion::current().is_ok_and(|version| version >= KernelVersion::new(6, 6, 0))
}

/// Loads the programs with their rules.
fn load(rules: &Rules) -> Result<Ebpf> {
    let mut loader = EbpfLoader::new();
    loader.override_global("RULES", rules, true);
    if !rules.iter().any(|rule| rule[REMEMBERS] != 0) {
        // The program has a table, but does not use it.
        loader.map_max_entries("TRANSLATIONS", 1);
    }
    Ok(loader.load(OBJECT)?)
}

fn load_xdp(rules: &Rules) -> Result<Ebpf> {
    let mut ebpf = load(rules)?;
    let program: &mut Xdp = ebpf.program_mut(XDP_PROGRAM).context("in the object")?.try_into()?;
    program.load()?;
    Ok(ebpf)
}

fn attach(world: &World, (link, is_egress): (&str, bool), rules: &Rules) -> Result<Ebpf> {
    let mut ebpf = load(rules)?;
    let program: &mut SchedClassifier = ebpf.program_mut(PROGRAM).context("in the object")?.try_into()?;
    program.load()?;
    let hook = if is_egress { TcAttachType::Egress } else { TcAttachType::Ingress };
    let attached: Result<SchedClassifierLinkId> = world.in_namespace(Host::Node1, || {
        Ok(program.attach_with_options(link, hook, TcAttachOptions::TcxOrder(LinkOrder::default()))?)
    });
    attached.with_context(|| format!("attach {PROGRAM} to {link}"))?;
    Ok(ebpf)
}

/// The rules of a program, as it reads them.
type Rules = [[u32; 12]; RULES];
const RULES: usize = 2;
/// The place in a rule that says whether the program uses the table.
const REMEMBERS: usize = 11;

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
    remembers: bool,
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
            [&[self.by_source.into()], &at, &source, &destination, &hardware, &[link, self.remembers.into()]];
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
            remembers: kind.remembers,
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
