//! Waits for changes to what the kernel does with forwarded packets: netfilter rules, links,
//! filters of links, routes, routing rules, neighbours, IPsec policies, and programs that are
//! attached by a BPF link.
//!
//! The kernel does not report how it chooses among the next hops of a route.
//! [`ForwardingChanges::take`] looks at these sysctls. The kernel does not report changes of legacy
//! iptables either. While one of its tables exists, it always returns true. The kernel also does
//! not report programs that are attached through TCX without a BPF link.

use std::{collections::HashMap, io, mem, os::fd::AsFd as _, time::Duration};

use libc::{AF_BRIDGE, NFNLGRP_NFTABLES, RTM_DELNEIGH, RTM_GETNEIGH, RTM_NEWNEIGH, c_int};
use netlink_packet_core::{NLM_F_DUMP, NetlinkBuffer};
use netlink_sys::{
    Socket,
    protocols::{NETLINK_NETFILTER, NETLINK_ROUTE},
};
use nix::poll::PollTimeout;

use super::{
    KernelError,
    bpf::{KnownLinks, Wakeup},
    foreign_changes::{is_foreign, is_unsupported},
    iptables::Iptables,
    netlink::{
        Attributes, LARGEST_DATAGRAM, NetlinkSocket, kernel_constants, messages_of, notifications::join,
        uninterrupted,
    },
    routing_rules::MultipathHash,
    xfrm,
};
use crate::net::TableName;

/// Links, neighbours, traffic control, routes, routing rules and settings of IPv4 and IPv6, and
/// next hops (`RTNLGRP_*`).
const ROUTE_GROUPS: [u32; 10] = [1, 3, 4, 7, 8, 11, 19, 24, 25, 32];
/// So many datagrams of a socket are read at a time.
const MAX_DATAGRAMS: usize = 4096;
/// The length of `struct ndmsg`.
const NEIGHBOUR_HEADER: usize = 12;
/// At most so many neighbours are remembered that were removed.
const MAX_FORMER_NEIGHBOURS: usize = 1 << 14;

// include/uapi/linux/neighbour.h.
kernel_constants! {
    NDA_DST = 1,
    NDA_LLADDR = 2,
}

/// Changes since it was opened, in the network namespace of the thread that opened it.
pub struct ForwardingChanges {
    own_tables: &'static [TableName],
    own_programs: &'static str,
    netfilter: Option<Socket>,
    route: Option<Socket>,
    /// IPsec policies.
    policies: Option<Socket>,
    datagram: Vec<u8>,
    neighbours: Neighbours,
    bpf_links: KnownLinks,
    multipath_hash: MultipathHash,
}

impl ForwardingChanges {
    /// Opens the sockets. A kernel without one of the subsystems reports no changes of it. Changes
    /// of `own_tables` are left out, and BPF links of programs whose names begin with
    /// `own_programs`. Needs `CAP_SYS_ADMIN`, to see the BPF links of others.
    pub fn open(own_tables: &'static [TableName], own_programs: &'static str) -> Result<Self, KernelError> {
        let nftables = [NFNLGRP_NFTABLES.cast_unsigned()];
        let mut changes = Self {
            own_tables,
            own_programs,
            netfilter: open(NETLINK_NETFILTER, &nftables, "an nfnetlink socket")?,
            route: open(NETLINK_ROUTE, &ROUTE_GROUPS, "an rtnetlink socket")?,
            policies: open(xfrm::PROTOCOL, &xfrm::POLICY_GROUPS, "a socket for IPsec policies")?,
            datagram: Vec::with_capacity(LARGEST_DATAGRAM),
            neighbours: Neighbours::default(),
            bpf_links: KnownLinks::read()?,
            multipath_hash: MultipathHash::read()?,
        };
        changes.neighbours.read()?;
        Ok(changes)
    }

    /// Returns true if something changed since the last call, or may have changed.
    pub fn take(&mut self) -> Result<bool, KernelError> {
        let has_new_link = self.bpf_links.has_others(self.own_programs)?;
        let before = mem::replace(&mut self.multipath_hash, MultipathHash::read()?);
        let has_other_hash = self.multipath_hash != before;
        Ok(self.read()? | has_new_link | has_other_hash | Iptables::has_legacy_tables())
    }

    /// Waits for a notification, at most for `limit`. Returns true if the thread was woken up.
    pub fn wait(&self, limit: Duration, end: &Wakeup) -> Result<bool, KernelError> {
        let sockets = [&self.netfilter, &self.route, &self.policies];
        let sources: Vec<_> = sockets.into_iter().flatten().map(|socket| socket.as_fd()).collect();
        let limit = PollTimeout::try_from(limit).unwrap_or(PollTimeout::MAX);
        end.wait_for(&sources, limit).map_err(KernelError::call("wait for", "notifications"))
    }

    /// Reads what arrived. Returns true if something changed.
    fn read(&mut self) -> Result<bool, KernelError> {
        let Self { own_tables, netfilter, route, policies, datagram, neighbours, .. } = self;
        let rules = read(netfilter.as_ref(), datagram, |datagram| is_foreign(datagram, own_tables))?;
        let routes = read(route.as_ref(), datagram, |datagram| {
            messages_of(datagram).fold(false, |changed, message| changed | neighbours.is_change(&message))
        })?;
        let policies = read(policies.as_ref(), datagram, |_| true)?;
        if routes == Received::NotAll || neighbours.are_too_many() {
            neighbours.read()?;
            return Ok(true);
        }
        Ok([rules, routes, policies].iter().any(|received| *received != Received::NoChange))
    }
}

fn open(protocol: isize, groups: &[u32], object: &'static str) -> Result<Option<Socket>, KernelError> {
    let open = || {
        let mut socket = Socket::new(protocol)?;
        join(&mut socket, groups)?;
        socket.set_non_blocking(true)?;
        Ok(socket)
    };
    match open() {
        Err(error) if is_unsupported(&error) => Ok(None),
        opened => opened.map(Some).map_err(KernelError::call("open", object)),
    }
}

/// What the datagrams of a socket were.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Received {
    NoChange,
    Change,
    /// The kernel dropped some, because the socket's buffer was full, or there are more.
    NotAll,
}

/// Reads the datagrams of a socket.
fn read(
    socket: Option<&Socket>,
    datagram: &mut Vec<u8>,
    mut is_change: impl FnMut(&[u8]) -> bool,
) -> Result<Received, KernelError> {
    let mut received = Received::NoChange;
    for _ in 0..MAX_DATAGRAMS {
        datagram.clear();
        match socket.map(|socket| socket.recv(datagram, 0)) {
            None => return Ok(received),
            Some(Ok(_)) if is_change(datagram) && received == Received::NoChange => {
                received = Received::Change;
            }
            Some(Ok(_)) => {}
            Some(Err(error)) if error.kind() == io::ErrorKind::WouldBlock => return Ok(received),
            Some(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
            Some(Err(error)) if error.raw_os_error() == Some(libc::ENOBUFS) => received = Received::NotAll,
            Some(Err(error)) => return Err(KernelError::call("receive", "notifications")(error)),
        }
    }
    Ok(Received::NotAll)
}

/// The hardware addresses of neighbours. The kernel also reports each time that it checks whether a
/// neighbour is reachable, which changes nothing.
#[derive(Default)]
struct Neighbours {
    /// By link and address. Those that were removed stay.
    known: HashMap<Neighbour, Vec<u8>>,
    /// How many existed when all were read.
    existing: usize,
}

/// A neighbour: the link and the address.
type Neighbour = (u32, Vec<u8>);

impl Neighbours {
    /// Reads all.
    fn read(&mut self) -> Result<(), KernelError> {
        let failed = || KernelError::call("list", "neighbours");
        let socket = NetlinkSocket::open(NETLINK_ROUTE).map_err(failed())?;
        let read = || {
            let mut known = HashMap::new();
            let mut answers = socket.request(RTM_GETNEIGH, NLM_F_DUMP, [0; NEIGHBOUR_HEADER], |_| {})?;
            while let Some(answer) = answers.next()? {
                known.extend(neighbour(answer.payload()).and_then(|(key, hardware)| Some((key, hardware?))));
            }
            Ok(known)
        };
        self.known = uninterrupted(read).map_err(failed())?;
        self.existing = self.known.len();
        Ok(())
    }

    fn are_too_many(&self) -> bool {
        self.known.len() > self.existing + MAX_FORMER_NEIGHBOURS
    }

    /// Returns true unless the message is about a neighbour that stays where it is. No packet went
    /// to a new one yet. One that was removed may return with another hardware address.
    fn is_change(&mut self, message: &NetlinkBuffer<&[u8]>) -> bool {
        match message.message_type() {
            RTM_NEWNEIGH => neighbour(message.payload()).is_some_and(|(key, hardware)| match hardware {
                Some(hardware) => {
                    let has_moved = self.known.get(&key).is_some_and(|before| *before != hardware);
                    self.known.insert(key, hardware);
                    has_moved
                }
                // It does not answer any more. The stack may take another next hop.
                None => self.known.remove(&key).is_some(),
            }),
            RTM_DELNEIGH => false,
            _ => true,
        }
    }
}

/// Returns a neighbour, and its hardware address if that is known. Entries of bridges and VXLAN
/// links are left out: these links look them up for each packet.
fn neighbour(payload: &[u8]) -> Option<(Neighbour, Option<Vec<u8>>)> {
    let [family, _, _, _, link @ .., _, _, _, _] = *payload.first_chunk::<NEIGHBOUR_HEADER>()?;
    let attributes = Attributes(payload.get(NEIGHBOUR_HEADER..)?);
    let key = (u32::from_ne_bytes(link), attributes.get(NDA_DST)?.to_vec());
    let hardware = attributes.get(NDA_LLADDR).map(<[u8]>::to_vec);
    (c_int::from(family) != AF_BRIDGE).then_some((key, hardware))
}

#[cfg(test)]
mod tests {
    use nix::sched::{CloneFlags, unshare};

    use super::*;
    use crate::kernel::{
        command::{Command, Launcher},
        netlink::MessageBuffer,
    };

    /// Returns true if the command changed something. It leaves BPF links out, because other tests
    /// make some.
    fn is_change(changes: &mut ForwardingChanges, command: &str) -> bool {
        let mut words = command.split_whitespace();
        let program = words.next().expect("a program");
        Command::new(program, &Launcher::default()).args(words).run().expect(command);
        let result = changes.read().expect("it can be read");
        // Something may follow, such as the carrier of a link.
        let mut follows = || {
            std::thread::sleep(Duration::from_millis(100));
            changes.read().expect("it can be read")
        };
        while follows() {}
        result
    }

    fn in_new_namespace(test: impl FnOnce(&mut ForwardingChanges) + Send + 'static) {
        let run = move || {
            unshare(CloneFlags::CLONE_NEWNET).expect("a network namespace, as root");
            test(&mut ForwardingChanges::open(&[(libc::NFPROTO_INET, "ours")], "shunt_").expect("sockets"));
        };
        std::thread::spawn(run).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    }

    #[test]
    fn what_decides_about_forwarded_packets_is_a_change() {
        in_new_namespace(|changes| {
            is_change(changes, "ip link add near type veth peer name far");
            is_change(changes, "ip neigh add 192.0.2.2 lladdr 02:00:00:00:00:02 dev near");
            for command in [
                "ip link set near up",
                "ip link set far up",
                "ip address add 192.0.2.1/24 dev near",
                "ip route add 198.51.100.0/24 via 192.0.2.2",
                "ip -6 route add unreachable 2001:db8::/64",
                "ip route delete 198.51.100.0/24",
                "ip nexthop add id 7 via 192.0.2.3 dev near",
                "ip rule add fwmark 7 table 7",
                "ip -6 rule add fwmark 7 table 7",
                "ip neigh replace 192.0.2.2 lladdr 02:00:00:00:00:03 dev near",
                "ip neigh change 192.0.2.2 dev near nud failed",
                "ip link set near mtu 1400",
                "ip xfrm policy add src 10.0.0.0/8 dst 192.0.2.0/24 dir fwd action block",
                "tc qdisc add dev near clsact",
                "tc filter add dev near egress protocol all u32 match u32 0 0 classid 1:1",
                "nft add table inet theirs",
                "nft add chain inet theirs c { type filter hook forward priority 0; policy drop; }",
                "nft delete table inet theirs",
                "ip link delete near",
            ] {
                assert!(is_change(changes, command), "{command}");
            }
        });
    }

    #[test]
    fn own_tables_and_neighbours_that_stay_where_they_are_are_no_changes() {
        in_new_namespace(|changes| {
            for command in [
                "ip link add near type veth peer name far",
                // Without addresses of IPv6, nothing happens later.
                "ip link set near addrgenmode none",
                "ip link set far addrgenmode none",
                "ip link set near up",
                "ip link set far up",
                "ip address add 192.0.2.1/24 dev near",
                "ip neigh add 192.0.2.2 lladdr 02:00:00:00:00:02 dev near nud stale",
            ] {
                is_change(changes, command);
            }
            for command in [
                "nft add table inet ours",
                "nft add chain inet ours c { type filter hook forward priority 0; }",
                "ip neigh replace 192.0.2.2 lladdr 02:00:00:00:00:02 dev near nud reachable",
                "ip neigh add 192.0.2.7 lladdr 02:00:00:00:00:07 dev near nud stale",
                "bridge fdb add 02:00:00:00:00:09 dev near",
            ] {
                assert!(!is_change(changes, command), "{command}");
            }
        });
    }

    #[test]
    fn neighbour_that_was_there_before_is_known() {
        in_new_namespace(|changes| {
            for command in [
                "ip link add near type veth peer name far",
                "ip link set near addrgenmode none",
                "ip link set far addrgenmode none",
                "ip link set near up",
                // While its peer is down, the kernel reports the link up to a second later.
                "ip link set far up",
                "ip neigh add 192.0.2.2 lladdr 02:00:00:00:00:02 dev near nud stale",
            ] {
                is_change(changes, command);
            }
            let mut later = ForwardingChanges::open(&[], "shunt_").expect("sockets");
            let same = "ip neigh replace 192.0.2.2 lladdr 02:00:00:00:00:02 dev near nud reachable";
            assert!(!is_change(&mut later, same));
            let other = "ip neigh replace 192.0.2.2 lladdr 02:00:00:00:00:03 dev near nud reachable";
            assert!(is_change(&mut later, other));
        });
    }

    #[test]
    fn notifications_that_the_kernel_dropped_are_a_change() {
        in_new_namespace(|changes| {
            is_change(changes, "ip link add near type veth peer name far");
            is_change(changes, "ip neigh add 192.0.2.2 lladdr 02:00:00:00:00:02 dev near nud stale");
            // More than fits into the buffer of the socket. None of these is a change.
            let line = |number: u32| {
                let [_, a, b, c] = number.to_be_bytes();
                format!("neigh add 192.{a}.{b}.{c} lladdr 02:00:00:00:00:07 dev near nud permanent\n")
            };
            let lines: String = (0x10_0000..0x10_1000).map(line).collect();
            let command = Command::new("ip", &Launcher::default()).args(["-batch", "-"]).stdin(&lines);
            command.run().expect("neighbours");
            assert!(changes.read().expect("it can be read"));
            assert!(changes.neighbours.known.len() > 4096, "all are read again");
            assert!(!changes.read().expect("it can be read"));
            assert!(is_change(changes, "ip neigh replace 192.16.0.7 lladdr 02:00:00:00:00:08 dev near"));
        });
    }

    #[test]
    fn who_waits_can_be_woken_up() {
        in_new_namespace(|changes| {
            let end = Wakeup::new().expect("an eventfd");
            end.wake();
            assert!(changes.wait(Duration::MAX, &end).expect("no error"));
        });
    }

    #[test]
    fn damaged_message_about_a_neighbour_is_no_change() {
        let mut buffer = MessageBuffer::default();
        buffer.message(RTM_NEWNEIGH, 0, 0, [0; 4], |_| {});
        let mut neighbours = Neighbours::default();
        for message in messages_of(buffer.as_bytes()) {
            assert!(!neighbours.is_change(&message));
        }
        assert!(neighbours.known.is_empty());
    }
}
