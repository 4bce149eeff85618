//! The socket to nf_tables: sends transactions, which the kernel applies completely or not at all.

use std::io::{self, ErrorKind};

use libc::{NFNL_MSG_BATCH_BEGIN, NFNL_MSG_BATCH_END, NFNL_SUBSYS_NFTABLES, c_int};
use netlink_packet_core::NLM_F_ACK;
use netlink_sys::{SocketAddr, protocols::NETLINK_NETFILTER};
use nix::sys::socket::{setsockopt, sockopt};

use super::{
    IpFamily, NftFamily,
    change::{self, Change},
    uapi::NFTA_SET_ELEM_LIST_ELEMENTS,
};
use crate::kernel::{
    KernelError,
    netlink::{LARGEST_DATAGRAM, MessageBuffer, NetlinkSocket, error_of, messages_of, nfgenmsg, nfnl_type},
};

/// The elements of one message are one attribute, which has a length of 16 bits.
const MAX_ELEMENTS_LENGTH: usize = 48 * 1024;
/// The size of the largest transaction. It is sent as one datagram.
const SEND_BUFFER: usize = 64 << 20;

/// A socket to nf_tables in the network namespace of the thread that opened it.
#[derive(Debug)]
pub struct Nftables {
    pub(super) socket: NetlinkSocket,
    /// The netlink port. The kernel's notifications about this socket's changes carry it.
    pub port: u32,
}

/// The messages of a transaction.
struct Transaction {
    messages: MessageBuffer,
    /// The sequence number of the first message.
    begin: u32,
    /// The sequence number of each message, and the index of its first change.
    first_changes: Vec<(u32, usize)>,
}

pub(super) const fn nftables_type(message: c_int) -> u16 {
    nfnl_type(NFNL_SUBSYS_NFTABLES, message)
}

impl Nftables {
    /// Opens the socket.
    pub fn open() -> Result<Self, KernelError> {
        let failed = |operation| KernelError::call(operation, "an nfnetlink socket");
        let socket = NetlinkSocket::open(NETLINK_NETFILTER).map_err(failed("open"))?;
        socket.socket.set_cap_ack(true).map_err(failed("set up"))?;
        setsockopt(&socket.socket, sockopt::SndBufForce, &SEND_BUFFER)
            .map_err(|error| failed("enlarge the buffer of")(error.into()))?;
        let mut address = SocketAddr::new(0, 0);
        socket.socket.get_address(&mut address).map_err(failed("ask for the address of"))?;
        Ok(Self { socket, port: address.port_number() })
    }

    /// Applies changes to the tables of this name in one transaction. If one change fails, no
    /// change is made.
    pub fn commit(&mut self, table: &str, changes: &[(IpFamily, Change)]) -> Result<(), KernelError> {
        if changes.is_empty() {
            return Ok(());
        }
        let failed = |object: String| KernelError::call("apply", object);
        let all = || format!("{} nftables changes to the tables {table}", changes.len());
        let Transaction { messages, begin, first_changes } = self.transaction(table, changes);
        self.socket.socket.send(messages.as_bytes(), 0).map_err(failed(all()))?;
        drop(messages);
        let last = first_changes.last().map_or(begin, |(last, _)| *last);
        let Err((sequence, source)) = self.result(begin, last) else {
            return Ok(());
        };
        let message = first_changes.iter().find(|(number, _)| *number == sequence);
        let object = message.and_then(|(_, index)| changes.get(*index));
        let object = object.map_or_else(all, |(family, change)| {
            format!("the nftables change `{}`", change.display(*family, table))
        });
        Err(failed(object)(source))
    }

    fn transaction(&self, table: &str, changes: &[(IpFamily, Change)]) -> Transaction {
        let mut messages = MessageBuffer::default();
        let mut first_changes = Vec::new();
        let delimit = |messages: &mut MessageBuffer, message| {
            let header = nfgenmsg(libc::AF_UNSPEC, NFNL_SUBSYS_NFTABLES);
            let sequence = self.socket.next_sequence();
            messages.message(nfnl_type(0, message), 0, sequence, header, |_| {});
            sequence
        };
        let begin = delimit(&mut messages, NFNL_MSG_BATCH_BEGIN);
        let (mut index, mut last) = (0, 0);
        while let Some((family, change)) = changes.get(index) {
            let sequence = self.socket.next_sequence();
            first_changes.push((sequence, index));
            let (message, flags) = change.message_type();
            let header = nfgenmsg(NftFamily::of(*family).number, 0);
            last = messages.message(nftables_type(message), flags, sequence, header, |to| {
                change.write(*family, table, sequence, to);
                index += write_elements(&changes[index..], to).max(1);
            });
        }
        messages.add_flags(last, NLM_F_ACK);
        delimit(&mut messages, NFNL_MSG_BATCH_END);
        Transaction { messages, begin, first_changes }
    }

    /// Reads the result of a transaction. `begin` is the sequence number of its first message, and
    /// `last` that of the message that requested an acknowledgement. All answers are in the receive
    /// buffer when sending returns. Returns the first error with the sequence number of its
    /// message.
    ///
    /// The kernel answers each change that fails. If the answers do not fit into the receive
    /// buffer, it discards the rest, and one call returns ENOBUFS. The answers before are still in
    /// the buffer: the next transaction must not find them.
    fn result(&self, begin: u32, last: u32) -> Result<(), (u32, io::Error)> {
        let mut result = Err((last, io::Error::new(ErrorKind::TimedOut, "the kernel does not answer")));
        let mut first_error = None;
        let mut datagram = Vec::with_capacity(LARGEST_DATAGRAM);
        loop {
            datagram.clear();
            match self.socket.socket.recv(&mut datagram, libc::MSG_DONTWAIT) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => {
                    result = Err((last, error));
                    continue;
                }
                Err(source) => return Err((last, source)),
            }
            for answer in messages_of(&datagram) {
                let sequence = answer.sequence_number();
                if sequence.wrapping_sub(begin) > last.wrapping_sub(begin) {
                    continue;
                }
                match error_of(&answer) {
                    Some(error) => drop(first_error.get_or_insert((sequence, error))),
                    None if sequence == last => result = Ok(()),
                    None => {}
                }
            }
        }
        first_error.map_or(result, Err)
    }
}

/// If the first change is about an element, writes it and the following changes of the same kind to
/// elements of the same set, as many as fit. Returns how many.
fn write_elements(changes: &[(IpFamily, Change)], to: &mut MessageBuffer) -> usize {
    let target = |(family, change): &(IpFamily, Change)| {
        change.element().map(|(set, _, value)| (*family, value.is_some(), &set.name))
    };
    let Some(first) = changes.first().and_then(target) else { return 0 };
    let mut written = 0;
    let start = to.len();
    to.nested(NFTA_SET_ELEM_LIST_ELEMENTS, |to| {
        let same = changes.iter().take_while(|change| target(change).as_ref() == Some(&first));
        for (_, key, value) in same.filter_map(|(_, change)| change.element()) {
            if to.len() - start > MAX_ELEMENTS_LENGTH {
                break;
            }
            change::write_element(key, value, to);
            written += 1;
        }
    });
    written
}
