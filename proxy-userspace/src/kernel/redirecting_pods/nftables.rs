//! Decides whether the nftables rules of a network namespace redirect its own outgoing packets, and
//! notices changes of these rules. Rules of iptables-nft are nftables rules too.

use std::io::ErrorKind;

use libc::{
    NF_INET_LOCAL_OUT, NF_INET_PRE_ROUTING, NFNL_SUBSYS_NFTABLES, NFNLGRP_NFTABLES, NFT_MSG_DELCHAIN,
    NFT_MSG_DELRULE, NFT_MSG_DELTABLE, NFT_MSG_GETCHAIN, NFT_MSG_GETRULE, NFT_MSG_NEWCHAIN, NFT_MSG_NEWRULE,
    NFT_MSG_NEWTABLE, c_int,
};
use netlink_packet_core::NLM_F_DUMP;
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_NETFILTER};

use super::uapi::*;
use crate::kernel::{
    KernelError,
    netlink::{Attributes, NetlinkSocket, messages_of, nfgenmsg, nfnl_type, uninterrupted},
};

/// The messages about tables, chains and rules. Changes of sets do not matter.
const CHANGES: [c_int; 6] = [
    NFT_MSG_NEWTABLE,
    NFT_MSG_DELTABLE,
    NFT_MSG_NEWCHAIN,
    NFT_MSG_DELCHAIN,
    NFT_MSG_NEWRULE,
    NFT_MSG_DELRULE,
];

/// The kernel's notifications about the rules of one network namespace.
#[derive(Debug)]
pub(super) struct Notifications {
    pub(super) socket: Socket,
}

impl Notifications {
    /// Subscribes to all changes from now on, in the calling thread's network namespace.
    pub(super) fn subscribe() -> Result<Self, KernelError> {
        let open = || {
            let mut socket = Socket::new(NETLINK_NETFILTER)?;
            socket.bind(&SocketAddr::new(0, 0))?;
            socket.add_membership(NFNLGRP_NFTABLES.cast_unsigned())?;
            socket.set_non_blocking(true)?;
            Ok(Self { socket })
        };
        open().map_err(KernelError::call("open", "an nfnetlink socket"))
    }

    /// Reads all notifications. Returns true if chains or rules changed, or if the kernel dropped
    /// notifications. `datagram` has the capacity for the largest datagram.
    pub(super) fn have_changes(&self, datagram: &mut Vec<u8>) -> Result<bool, KernelError> {
        let mut changed = false;
        loop {
            datagram.clear();
            match self.socket.recv(datagram, 0) {
                Ok(_) => changed |= is_change(datagram),
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => changed = true,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(changed),
                Err(error) => return Err(KernelError::call("receive from", "an nfnetlink socket")(error)),
            }
        }
    }
}

fn is_change(datagram: &[u8]) -> bool {
    messages_of(datagram).any(|message| {
        let [subsystem, kind] = message.message_type().to_be_bytes().map(c_int::from);
        subsystem == NFNL_SUBSYS_NFTABLES && CHANGES.contains(&kind)
    })
}

/// Returns true if nftables rules in the calling thread's network namespace redirect the packets
/// that leave it: a chain for NAT or for rerouting at the hook output has a rule, or a rule uses
/// TPROXY.
pub(super) fn redirects() -> Result<bool, KernelError> {
    let socket =
        NetlinkSocket::open(NETLINK_NETFILTER).map_err(KernelError::call("open", "an nfnetlink socket"))?;
    let chains = list(&socket, NFT_MSG_GETCHAIN, "chains", Hooked::read)?;
    if chains.contains(&Hooked::Output) {
        return Ok(true);
    }
    // TPROXY works at prerouting only.
    if !chains.contains(&Hooked::Prerouting) {
        return Ok(false);
    }
    let tproxy = |rule: Attributes<'_>| has_tproxy(rule).then_some(());
    Ok(!list(&socket, NFT_MSG_GETRULE, "rules", tproxy)?.is_empty())
}

/// A base chain that may redirect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hooked {
    /// It has rules for NAT or for rerouting at output. The chain OUTPUT of iptables' table mangle
    /// is of the type `route`, too.
    Output,
    /// It is at prerouting, and its rules or those of other chains may use TPROXY.
    Prerouting,
}

impl Hooked {
    fn read(chain: Attributes<'_>) -> Option<Self> {
        let hook = chain.nested(NFTA_CHAIN_HOOK)?.be_int(NFTA_HOOK_HOOKNUM)?;
        let redirects = matches!(chain.string(NFTA_CHAIN_TYPE)?, "nat" | "route");
        // The number of references to a chain. No rule can jump to a base chain, so these are its
        // rules.
        let rules = chain.be32(NFTA_CHAIN_USE)?;
        match hook {
            NF_INET_LOCAL_OUT if redirects && rules > 0 => Some(Self::Output),
            NF_INET_PRE_ROUTING => Some(Self::Prerouting),
            _ => None,
        }
    }
}

/// Returns true if a rule has the expression `tproxy` of nftables or the target TPROXY of
/// iptables-nft.
fn has_tproxy(rule: Attributes<'_>) -> bool {
    let expressions = rule.nested(NFTA_RULE_EXPRESSIONS).unwrap_or(Attributes(&[]));
    expressions.iter().any(|(kind, expression)| {
        let expression = Attributes(expression);
        let target = || expression.nested(NFTA_EXPR_DATA)?.string(NFTA_TARGET_NAME);
        kind == NFTA_LIST_ELEM
            && match expression.string(NFTA_EXPR_NAME) {
                Some("tproxy") => true,
                Some("target") => target() == Some("TPROXY"),
                _ => false,
            }
    })
}

/// Reads an answer as a chain and as a rule, for fuzz targets.
#[cfg(feature = "fuzzing")]
pub(in crate::kernel) fn read_any(answer: Attributes<'_>) {
    Hooked::read(answer);
    has_tproxy(answer);
}

/// Lists the objects of all tables and families. Returns what `read` makes of each.
fn list<T>(
    socket: &NetlinkSocket,
    message: c_int,
    objects: &str,
    read: impl Fn(Attributes<'_>) -> Option<T>,
) -> Result<Vec<T>, KernelError> {
    let message = nfnl_type(NFNL_SUBSYS_NFTABLES, message);
    let dump = || socket.request(message, NLM_F_DUMP, nfgenmsg(libc::AF_UNSPEC, 0), |_| {})?.read(&read);
    match uninterrupted(dump) {
        // EINVAL: the kernel has no nf_tables, or the module is not loaded.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOENT)) => Ok(Vec::new()),
        list => {
            list.map_err(KernelError::call("list", format!("the nftables {objects} of a network namespace")))
        }
    }
}
