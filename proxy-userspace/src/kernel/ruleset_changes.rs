//! Tells when someone else takes rules away, or changes a table: the kernel's notices about nftables (nfnetlink), iptables on
//! nftables included.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use netlink_packet_core::NetlinkBuffer;
use netlink_sys::{
    AsyncSocket as _, AsyncSocketExt as _, SocketAddr, TokioSocket, protocols::NETLINK_NETFILTER,
};
use socket2::{SockFilter, SockRef};
use tokio::sync::Notify;

use super::KernelError;

/// `NFNLGRP_NFTABLES` of `linux/netfilter/nfnetlink.h`.
const GROUP: u32 = 7;
/// `NFNL_SUBSYS_NFTABLES`, the upper byte of a message's type.
const SUBSYSTEM: u16 = 10;
/// `NFT_MSG_DELTABLE`, `NFT_MSG_DELCHAIN` and `NFT_MSG_DELRULE`, the lower byte.
const REMOVALS: [u16; 3] = [2, 5, 8];
/// A message's head.
const HEAD: usize = 16;
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

/// Whether somebody else changed a table since it was read last. Until it is followed, and once that fails, it may be so.
#[derive(Debug)]
pub struct TableChangeFlag(AtomicBool);

impl Default for TableChangeFlag {
    fn default() -> Self {
        Self(AtomicBool::new(true))
    }
}

impl TableChangeFlag {
    /// It was changed, or may have been.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    /// It is about to be read: only what is changed from now on counts.
    pub fn take(&self) -> bool {
        self.0.swap(false, Ordering::AcqRel)
    }

    fn set(&self) {
        self.0.store(true, Ordering::Release);
    }
}

/// What others do to the tables of one name, in the network namespace of the caller.
pub struct TableChanges {
    socket: TokioSocket,
    table: &'static str,
    touched: Arc<TableChangeFlag>,
}

impl TableChanges {
    /// Listens from now on. What the socket with the netlink port `own` does is not heard: of that the kernel would say more than
    /// a socket can hold.
    pub fn open(table: &'static str, own: u32, touched: Arc<TableChangeFlag>) -> Result<Self, KernelError> {
        let failed = |operation| KernelError::call(operation, "an nfnetlink socket");
        let socket = open().map_err(failed("open"))?;
        leave_out(&socket, own).map_err(failed("filter"))?;
        Ok(Self { socket, table, touched })
    }

    /// Tells whenever something of the table is added or removed. Returns when netlink fails; the table then counts as touched.
    pub async fn report(self, disturbed: Arc<Notify>) -> Result<(), KernelError> {
        let mut buffer = Vec::with_capacity(BUFFER);
        loop {
            buffer.clear();
            let is_of_table = match self.socket.recv(&mut buffer).await {
                Ok(()) => messages(&buffer)
                    .any(|(kind, payload)| kind >> 8 == SUBSYSTEM && holds_name(payload, self.table)),
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => true,
                Err(error) => {
                    self.touched.set();
                    return Err(KernelError::call("receive from", "an nfnetlink socket")(error));
                }
            };
            if is_of_table {
                self.touched.set();
                disturbed.notify_one();
            }
        }
    }
}

/// Has the kernel drop messages of this netlink port (`nlmsg_pid`, the fourth word): a classic BPF program of four instructions.
fn leave_out(socket: &TokioSocket, own: u32) -> io::Result<()> {
    const LOAD_WORD: u16 = 0x20;
    const JUMP_IF_EQUAL: u16 = 0x15;
    const RETURN: u16 = 0x06;
    const PORT: u32 = 12;
    let filter = [
        SockFilter::new(LOAD_WORD, 0, 0, PORT),
        // Words are loaded as if they were in network order.
        SockFilter::new(JUMP_IF_EQUAL, 0, 1, own.to_be()),
        SockFilter::new(RETURN, 0, 0, 0),
        SockFilter::new(RETURN, 0, 0, u32::MAX),
    ];
    SockRef::from(socket.socket_ref()).attach_filter(&filter)
}

fn open() -> io::Result<TokioSocket> {
    let mut socket = TokioSocket::new(NETLINK_NETFILTER)?;
    socket.socket_mut().bind(&SocketAddr::new(0, 0))?;
    socket.socket_mut().add_membership(GROUP)?;
    Ok(socket)
}

/// Whether a datagram tells of the removal of something that carries one of these names. Names are texts with a zero after
/// them wherever they stand, so that nothing else of a message has to be understood.
fn has_removal(datagram: &[u8], names: &[&str]) -> bool {
    messages(datagram).any(|(kind, payload)| {
        let is_removal = kind >> 8 == SUBSYSTEM && REMOVALS.contains(&(kind & 0xff));
        is_removal && names.iter().any(|name| holds_name(payload, name))
    })
}

/// Type and payload of each message of a datagram.
fn messages(mut datagram: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let message = NetlinkBuffer::new_checked(datagram).ok()?;
        let (kind, length) = (message.message_type(), message.length() as usize);
        let payload = datagram.get(HEAD..length).unwrap_or_default();
        // Messages are aligned to four bytes, but for the end of the last.
        datagram = datagram.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, payload))
    })
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
