//! Traces the first packet of a connection through rules as the kernel does, on every random path.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
};

use ipnet::IpNet;
use shunt_tests::planned::{Tables, target};

/// A packet, with all changes made to it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Packet {
    /// Its source.
    pub(crate) source: IpAddr,
    /// Its destination. After translation, the endpoint.
    pub(crate) to: SocketAddr,
    /// iptables' word for its protocol.
    pub(crate) protocol: &'static str,
    /// The link that it came in on. `None` if the node sent it.
    pub(crate) link: Option<String>,
    pub(crate) mark: u32,
    pub(crate) is_translated: bool,
    pub(crate) is_masqueraded: bool,
}

/// The fate of a packet.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Fate {
    /// It is delivered to its destination.
    Passes(Packet),
    Refused,
    Dropped,
}

/// The result of a rule or chain for a packet.
enum Step {
    On(Packet),
    Ends(Verdict, Packet),
    /// It returns to the calling chain.
    Returns(Packet),
}

#[derive(Clone, Copy)]
enum Verdict {
    Accept,
    Drop,
    Refuse,
}

enum Matching {
    Yes,
    No,
    /// It matches at random.
    Either,
}

/// A node with its rules and addresses.
pub(crate) struct Node<'a> {
    pub(crate) tables: &'a Tables,
    pub(crate) addresses: &'a [IpAddr],
}

impl Node<'_> {
    /// Returns every possible fate of a packet.
    pub(crate) fn fates(&self, packet: Packet) -> BTreeSet<Fate> {
        let before = if packet.link.is_some() { "PREROUTING" } else { "OUTPUT" };
        let mut fates = BTreeSet::new();
        for step in self.chain("nat", before, packet) {
            let packet = match step {
                Step::On(packet) | Step::Returns(packet) | Step::Ends(_, packet) => packet,
            };
            let filter = match (&packet.link, self.is_local(packet.to.ip())) {
                (None, _) => "OUTPUT",
                (Some(_), true) => "INPUT",
                (Some(_), false) => "FORWARD",
            };
            for step in self.chain("filter", filter, packet) {
                fates.extend(match step {
                    Step::Ends(Verdict::Drop, _) => vec![Fate::Dropped],
                    Step::Ends(Verdict::Refuse, _) => vec![Fate::Refused],
                    Step::On(packet) | Step::Returns(packet) | Step::Ends(Verdict::Accept, packet) => {
                        self.leave(packet)
                    }
                });
            }
        }
        fates
    }

    fn leave(&self, packet: Packet) -> Vec<Fate> {
        let steps = self.chain("nat", "POSTROUTING", packet).into_iter();
        let passes = steps.map(|step| match step {
            Step::On(packet) | Step::Returns(packet) | Step::Ends(_, packet) => Fate::Passes(packet),
        });
        passes.collect()
    }

    fn is_local(&self, address: IpAddr) -> bool {
        address.is_loopback() || self.addresses.contains(&address)
    }

    fn chain(&self, table: &str, chain: &str, packet: Packet) -> Vec<Step> {
        let mut ended = Vec::new();
        let mut going = vec![packet];
        for rule in self.tables.chain_rules(table, chain) {
            let mut next = Vec::new();
            for packet in going {
                let matching = self.matches(rule, &packet);
                if !matches!(matching, Matching::Yes) {
                    next.push(packet.clone());
                }
                if matches!(matching, Matching::No) {
                    continue;
                }
                for step in self.act(table, rule, packet) {
                    match step {
                        Step::On(packet) => next.push(packet),
                        ends => ended.push(ends),
                    }
                }
            }
            going = next;
        }
        ended.extend(going.into_iter().map(Step::On));
        ended
    }

    fn act(&self, table: &str, rule: &str, mut packet: Packet) -> Vec<Step> {
        let Some(target) = target(rule) else { return vec![Step::On(packet)] };
        vec![match target {
            "ACCEPT" => Step::Ends(Verdict::Accept, packet),
            "DROP" => Step::Ends(Verdict::Drop, packet),
            "REJECT" => Step::Ends(Verdict::Refuse, packet),
            "RETURN" => Step::Returns(packet),
            "MARK" => {
                let (bits, clears) = value(rule, "--set-xmark").split_once('/').expect("bits and mask");
                packet.mark = packet.mark & !number(clears) ^ number(bits);
                Step::On(packet)
            }
            "DNAT" => {
                packet.to = value(rule, "--to-destination").parse().expect("an endpoint");
                packet.is_translated = true;
                Step::Ends(Verdict::Accept, packet)
            }
            "MASQUERADE" => {
                packet.is_masqueraded = true;
                Step::Ends(Verdict::Accept, packet)
            }
            chain => {
                let steps = self.chain(table, chain, packet).into_iter();
                let back = |step| if let Step::Returns(packet) = step { Step::On(packet) } else { step };
                return steps.map(back).collect();
            }
        }]
    }

    /// Panics at an unknown match.
    fn matches(&self, rule: &str, packet: &Packet) -> Matching {
        let mut words = words(rule).into_iter();
        let (mut wanted, mut by_chance) = (true, false);
        while let Some(word) = words.next() {
            let mut argument = || words.next().expect("an argument");
            let matches = match &*word {
                "!" => {
                    wanted = false;
                    continue;
                }
                "-s" => net(&argument()).contains(&packet.source),
                "-d" => net(&argument()).contains(&packet.to.ip()),
                "-p" => argument() == packet.protocol,
                "-i" => is_link(&argument(), packet.link.as_deref()),
                "--dport" => argument() == packet.to.port().to_string(),
                "--dst-type" => argument() == "LOCAL" && self.is_local(packet.to.ip()),
                "--src-type" => argument() == "LOCAL" && self.is_local(packet.source),
                "--ctstate" => argument()
                    .split(',')
                    .any(|state| state == "NEW" || state == "DNAT" && packet.is_translated),
                "--mark" => {
                    let argument = argument();
                    let (bits, mask) = argument.split_once('/').expect("bits and mask");
                    packet.mark & number(mask) == number(bits)
                }
                // The client has no earlier connection.
                "--rcheck" => false,
                "--probability" => {
                    by_chance = argument() != "1.00000000000";
                    true
                }
                "-m" | "--comment" | "--name" | "--mask" | "--seconds" | "--mode" | "--nfacct-name" => {
                    drop(argument());
                    true
                }
                "--set" | "--reap" | "--rsource" => true,
                "-j" => break,
                other => panic!("{rule}: what is {other}?"),
            };
            if matches != wanted {
                return Matching::No;
            }
            wanted = true;
        }
        if by_chance { Matching::Either } else { Matching::Yes }
    }
}

fn words(rule: &str) -> Vec<String> {
    let mut words = Vec::new();
    for (index, part) in rule.split('"').enumerate() {
        if index % 2 == 1 {
            words.push(part.to_owned());
        } else {
            words.extend(part.split_whitespace().map(str::to_owned));
        }
    }
    words
}

fn value<'a>(rule: &'a str, option: &str) -> &'a str {
    let (_, after) = rule.split_once(option).unwrap_or_else(|| panic!("{rule}: no {option}"));
    after.split_whitespace().next().unwrap_or_default()
}

fn number(text: &str) -> u32 {
    u32::from_str_radix(text.trim_start_matches("0x"), 16).expect("a hexadecimal number")
}

fn net(text: &str) -> IpNet {
    text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn is_link(pattern: &str, link: Option<&str>) -> bool {
    let link = link.unwrap_or_default();
    pattern.strip_suffix('+').map_or(link == pattern, |prefix| link.starts_with(prefix))
}
