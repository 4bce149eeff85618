//! Tells when someone else takes rules away: the kernel's notices about nftables (nfnetlink), iptables on nftables included.

use std::{io, sync::Arc};

use netlink_packet_core::NetlinkBuffer;
use netlink_sys::{
    AsyncSocket as _, AsyncSocketExt as _, SocketAddr, TokioSocket, protocols::NETLINK_NETFILTER,
};
use tokio::sync::Notify;

use super::KernelError;

/// `NFNLGRP_NFTABLES` of `linux/netfilter/nfnetlink.h`.
const GROUP: u32 = 7;
/// `NFNL_SUBSYS_NFTABLES`, the upper byte of a message's type.
const SUBSYSTEM: u16 = 10;
/// `NFT_MSG_DELTABLE`, `NFT_MSG_DELCHAIN` and `NFT_MSG_DELRULE`, the lower byte.
const REMOVALS: [u16; 3] = [2, 5, 8];
/// More than the kernel puts into one datagram.
const BUFFER: usize = 64 * 1024;

/// Tells whenever something is removed that carries one of these names, in the network namespace of the caller. Returns when
/// netlink fails.
pub async fn report_removals(names: &[&str], disturbed: Arc<Notify>) -> Result<(), KernelError> {
    let failed = |operation| KernelError::call(operation, "an nfnetlink socket");
    let socket = open().map_err(failed("open"))?;
    let mut buffer = Vec::with_capacity(BUFFER);
    loop {
        buffer.clear();
        let is_removal = match socket.recv(&mut buffer).await {
            Ok(()) => has_removal(&buffer, names),
            // More notices than the socket could hold: there may have been one.
            Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => true,
            Err(error) => return Err(failed("receive from")(error)),
        };
        if is_removal {
            disturbed.notify_one();
        }
    }
}

fn open() -> io::Result<TokioSocket> {
    let mut socket = TokioSocket::new(NETLINK_NETFILTER)?;
    socket.socket_mut().bind(&SocketAddr::new(0, 0))?;
    socket.socket_mut().add_membership(GROUP)?;
    Ok(socket)
}

/// Whether a datagram tells of the removal of something that carries one of these names. Names are texts with a zero after
/// them wherever they stand, so that nothing else of a message has to be understood.
fn has_removal(mut datagram: &[u8], names: &[&str]) -> bool {
    while let Ok(message) = NetlinkBuffer::new_checked(datagram) {
        let kind = message.message_type();
        let is_removal = kind >> 8 == SUBSYSTEM && REMOVALS.contains(&(kind & 0xff));
        if is_removal && names.iter().any(|name| holds_name(message.payload(), name)) {
            return true;
        }
        // Messages are aligned to four bytes, but for the end of the last.
        let length = (message.length() as usize).next_multiple_of(4);
        datagram = datagram.get(length..).unwrap_or_default();
    }
    false
}

fn holds_name(payload: &[u8], name: &str) -> bool {
    let length = name.len();
    payload.windows(length + 1).any(|window| window[..length] == *name.as_bytes() && window[length] == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: u8, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(16 + payload.len()).expect("short");
        let mut bytes = length.to_ne_bytes().to_vec();
        bytes.extend([kind, 10]);
        bytes.extend([0; 10]);
        bytes.extend(payload);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    #[test]
    fn only_the_removal_of_what_has_a_name_asked_for_counts() {
        let names = ["shunt", "SHUNT-FORWARD"];
        let other = message(2, b"\x09\0\x01\0other\0");
        let ours = message(2, b"\x0a\0\x01\0shunt\0");
        assert!(!has_removal(&other, &names));
        assert!(has_removal(&[&*other, &*ours].concat(), &names));
        assert!(!has_removal(&message(0, b"\x0a\0\x01\0shunt\0"), &names), "a table was added");
        assert!(!has_removal(&message(2, b"\x0b\0\x01\0shunts\0"), &names));
        assert!(!has_removal(&ours[..20], &names), "cut short");
        assert!(!has_removal(&[], &names));
    }
}
