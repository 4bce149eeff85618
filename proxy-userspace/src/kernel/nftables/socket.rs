//! The socket: transactions are sent in one piece, which the kernel takes as a whole or not at all.

use std::{
    io::{self, ErrorKind},
    net::IpAddr,
};

use netlink_packet_core::{NLM_F_ACK, NLM_F_REQUEST, NLMSG_ERROR, NetlinkBuffer};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_NETFILTER};
use nix::sys::socket::{setsockopt, sockopt};

use super::{
    Family,
    attributes::Attributes,
    change::{self, Change, Shown},
    statement::Name,
};
use crate::kernel::{KernelError, netlink};

/// `NFNL_SUBSYS_NFTABLES`.
pub(super) const SUBSYSTEM: u16 = 10;
/// `NFNL_MSG_BATCH_BEGIN` and `NFNL_MSG_BATCH_END`.
const BATCH_BEGIN: u16 = 16;
const BATCH_END: u16 = 17;
/// A message's head, and what nfnetlink has after it.
pub(super) const HEAD: usize = 16;
/// Elements of a message are one attribute, which 16 bits have to count.
const MOST_OF_A_MESSAGE: usize = 48 * 1024;
/// The largest transaction that the socket takes: it is sent in one piece.
const SEND_BUFFER: usize = 64 << 20;
/// A socket to `nf_tables` in the network namespace of the thread that opened it.
pub struct Nftables {
    pub(super) socket: Socket,
    port: u32,
    pub(super) sequence: u32,
    pub(super) buffer: Attributes,
}

impl std::fmt::Debug for Nftables {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Nftables").field("port", &self.port).finish_non_exhaustive()
    }
}

impl Nftables {
    /// Opens it. What others hear of its changes carries [`Self::port`].
    pub fn open() -> Result<Self, KernelError> {
        let failed = |operation| KernelError::call(operation, "an nfnetlink socket");
        let socket = netlink::open(NETLINK_NETFILTER).map_err(failed("open"))?;
        socket.set_cap_ack(true).map_err(failed("set up"))?;
        setsockopt(&socket, sockopt::SndBufForce, &SEND_BUFFER)
            .map_err(|error| failed("enlarge the buffer of")(error.into()))?;
        let mut address = SocketAddr::new(0, 0);
        socket.get_address(&mut address).map_err(failed("ask for the address of"))?;
        Ok(Self { socket, port: address.port_number(), sequence: 0, buffer: Attributes::default() })
    }

    /// Who the kernel says made this socket's changes.
    pub const fn port(&self) -> u32 {
        self.port
    }

    /// Makes changes to the table of this name as one transaction: all of them or none.
    pub fn commit(&mut self, table: &str, changes: &[(Family, Change)]) -> Result<(), KernelError> {
        if changes.is_empty() {
            return Ok(());
        }
        let first = self.sequence.wrapping_add(1);
        let starts = self.write_batch(table, changes);
        let failed = |object: String| KernelError::call("change nftables:", object);
        let all = || format!("{} changes to the tables {table}", changes.len());
        let sent = self.socket.send(self.buffer.as_bytes(), 0);
        self.buffer.clear();
        sent.map_err(failed(all()))?;
        match self.outcome(self.sequence.wrapping_sub(1)) {
            Ok(()) => Ok(()),
            Err((sequence, source)) => {
                let index = starts.get(sequence.wrapping_sub(first).wrapping_sub(1) as usize);
                let object = index
                    .and_then(|index| changes.get(*index))
                    .map_or_else(all, |(family, change)| Shown(change, *family, table).to_string());
                Err(failed(object)(source))
            }
        }
    }

    /// Fills the buffer and tells the index of the first change of each message.
    fn write_batch(&mut self, table: &str, changes: &[(Family, Change)]) -> Vec<usize> {
        let mut starts = Vec::new();
        self.message(BATCH_BEGIN, 0, 0, SUBSYSTEM.to_be(), |_| {});
        let mut index = 0;
        while let Some((family, change)) = changes.get(index) {
            starts.push(index);
            let (kind, flags) = change::kind(change);
            let number = u32::try_from(index).unwrap_or(u32::MAX);
            let rest = &changes[index..];
            let mut taken = 1;
            let is_last = |taken: usize| index + taken == changes.len();
            let start = self.begin(SUBSYSTEM << 8 | kind, flags, family.number(), 0);
            change::write(change, *family, table, number, &mut self.buffer);
            if matches!(change, Change::AddElement(..) | Change::DeleteElement(..)) {
                taken = write_elements(rest, &mut self.buffer);
            }
            if is_last(taken) {
                self.end(start, flags | NLM_F_ACK);
            } else {
                self.end(start, flags);
            }
            index += taken;
        }
        self.message(BATCH_END, 0, 0, SUBSYSTEM.to_be(), |_| {});
        starts
    }

    pub(super) fn message(
        &mut self,
        kind: u16,
        flags: u16,
        family: u8,
        resource: u16,
        fill: impl FnOnce(&mut Attributes),
    ) {
        let start = self.begin(kind, flags, family, resource);
        fill(&mut self.buffer);
        self.end(start, flags);
    }

    fn begin(&mut self, kind: u16, flags: u16, family: u8, resource: u16) -> usize {
        self.sequence = self.sequence.wrapping_add(1);
        self.buffer.begin_message(kind, NLM_F_REQUEST | flags, self.sequence, family, resource)
    }

    fn end(&mut self, start: usize, flags: u16) {
        self.buffer.end_message(start, NLM_F_REQUEST | flags);
    }

    /// What the kernel said of a transaction whose last message has this number. It has said it all when sending returns.
    fn outcome(&self, last: u32) -> Result<(), (u32, io::Error)> {
        let mut result = Err((last, io::Error::new(ErrorKind::TimedOut, "the kernel does not answer")));
        let mut error = None;
        let mut answer = Vec::with_capacity(8 * 1024);
        loop {
            answer.clear();
            match self.socket.recv(&mut answer, libc::MSG_DONTWAIT) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(source) => return Err((last, source)),
            }
            for (sequence, code) in codes(&answer) {
                match code {
                    0 if sequence == last => result = Ok(()),
                    0 => {}
                    code => {
                        error.get_or_insert((sequence, io::Error::from_raw_os_error(code)));
                    }
                }
            }
        }
        error.map_or(result, Err)
    }
}

/// Appends as many elements of the same set as fit into one message, and tells how many.
fn write_elements(changes: &[(Family, Change)], to: &mut Attributes) -> usize {
    let head = change::kind(&changes[0].1);
    let mut taken = 0;
    let start = to.len();
    to.nested(3, |to| {
        for (family, change) in changes {
            let (set, key, value) = match change {
                Change::AddElement(set, key, value) => (*set, key, Some(value)),
                Change::DeleteElement(set, key) => (*set, key, None),
                _ => break,
            };
            let is_same =
                *family == changes[0].0 && change::kind(change) == head && set.name == set_of(&changes[0].1);
            if !is_same || to.len() - start > MOST_OF_A_MESSAGE {
                break;
            }
            change::write_element(key, value, to);
            taken += 1;
        }
    });
    taken
}

fn set_of(change: &Change) -> Name {
    match change {
        Change::AddElement(set, ..) | Change::DeleteElement(set, _) => set.name.clone(),
        _ => Name::from(""),
    }
}

/// The number of the message and the code of each answer in a datagram.
fn codes(mut bytes: &[u8]) -> impl Iterator<Item = (u32, i32)> {
    std::iter::from_fn(move || {
        let message = NetlinkBuffer::new_checked(bytes).ok()?;
        let length = message.length() as usize;
        let code = match message.message_type() {
            NLMSG_ERROR => code(bytes.get(HEAD..length).unwrap_or_default()),
            _ => 0,
        };
        let sequence = message.sequence_number();
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((sequence, code))
    })
}

/// The positive error number of an answer; 0 for none.
pub(super) fn code(body: &[u8]) -> i32 {
    body.first_chunk().map_or(libc::EPROTO, |bytes| i32::from_ne_bytes(*bytes).saturating_neg())
}

impl Family {
    /// That of an address.
    pub const fn of(address: IpAddr) -> Self {
        if address.is_ipv4() { Self::Ip } else { Self::Ip6 }
    }
}
