//! Netlink: the sockets, messages and attributes that all netlink subsystems share.
//!
//! The crate netlink-packet-netfilter (0.4) is not used for netfilter's messages:
//!
//! - nf_tables: it has the messages for tables, chains, rules, sets and set elements, and for
//!   batches. Of the expressions it has `bitwise`, `cmp`, `immediate`, `lookup`, `meta` and
//!   `payload`. It lacks `ct`, `dynset`, `fib`, `masq`, `nat`, `numgen` and `reject`, which shunt's
//!   rules use. For those, the caller has to supply attribute numbers, because the crate's
//!   constants are private.
//! - conntrack: it lacks `CTA_ID`, `CTA_ZONE`, `CTA_FILTER`, `CTA_NAT_SRC` and `CTA_NAT_DST`.
//! - nfacct: it lacks the whole subsystem.
//! - Each of its attributes owns a `Vec` or a `String`. A dump of conntrack would cost a dozen
//!   allocations an entry, and an nftables set three or four an element.

pub(super) mod attributes;
pub(super) mod generic;
pub(super) mod notifications;

use std::{cell::Cell, io};

use libc::c_int;
use netlink_packet_core::{
    NLM_F_ACK, NLM_F_DUMP_INTR, NLM_F_REQUEST, NLMSG_DONE, NLMSG_ERROR, NetlinkBuffer, NetlinkDeserializable,
    NetlinkHeader, NetlinkMessage, NetlinkPayload, NetlinkSerializable, Parseable,
};
use netlink_sys::{Socket, SocketAddr};
use nix::sys::{
    socket::{setsockopt, sockopt},
    time::{TimeVal, TimeValLike as _},
};

pub(super) use self::attributes::{Attributes, MessageBuffer};

/// The kernel must answer within this time.
const ANSWER_TIMEOUT_SECONDS: i64 = 2;
/// If another program interrupts a dump, the dump starts again, up to this often.
pub(super) const MAX_DUMP_ATTEMPTS: usize = 20;
/// No datagram of the kernel is larger.
pub(super) const LARGEST_DATAGRAM: usize = 64 * 1024;

/// Defines constants that libc lacks. The names are those of the kernel's headers
/// (`include/uapi/linux`), and the type is libc's for such constants.
macro_rules! kernel_constants {
    ($($name:ident = $value:expr,)*) => { $(pub(in crate::kernel) const $name: libc::c_int = $value;)* };
}
pub(super) use kernel_constants;

/// Returns what the first attribute with this pattern contains.
macro_rules! attribute {
    ($attributes:expr, $pattern:pat => $content:expr) => {
        $attributes.iter().find_map(|attribute| match attribute {
            $pattern => Some($content),
            _ => None,
        })
    };
}
pub(super) use attribute;

/// A netlink socket in the network namespace of the thread that opened it.
#[derive(Debug)]
pub(super) struct NetlinkSocket {
    pub(super) socket: Socket,
    /// The sequence number of the last message that was written. Answers carry their request's
    /// number.
    sequence: Cell<u32>,
}

impl NetlinkSocket {
    pub(super) fn open(protocol: isize) -> io::Result<Self> {
        let mut socket = Socket::new(protocol)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        setsockopt(&socket, sockopt::ReceiveTimeout, &TimeVal::seconds(ANSWER_TIMEOUT_SECONDS))?;
        Ok(Self { socket, sequence: Cell::new(0) })
    }

    /// Makes the kernel obey the filters in requests for lists (`NETLINK_GET_STRICT_CHK`).
    pub(super) fn check_strictly(&self) -> io::Result<()> {
        self.socket.set_netlink_get_strict_chk(true)
    }

    /// Returns the sequence number for the next message.
    pub(super) fn next_sequence(&self) -> u32 {
        self.sequence.set(self.sequence.get().wrapping_add(1));
        self.sequence.get()
    }

    /// Returns the number of messages so far.
    pub(super) const fn message_count(&self) -> u32 {
        self.sequence.get()
    }

    /// Sends a request and returns its answers. `header` is what the subsystem has in front of the
    /// attributes ([`nfgenmsg`], [`generic::header`]; rtnetlink's headers are longer), and `write`
    /// writes the attributes.
    pub(super) fn request(
        &self,
        message_type: u16,
        flags: u16,
        header: impl AsRef<[u8]>,
        write: impl FnOnce(&mut MessageBuffer),
    ) -> io::Result<Answers<'_>> {
        let mut request = MessageBuffer::default();
        request.message(message_type, NLM_F_ACK | flags, self.next_sequence(), header, write);
        self.send_request(request.as_bytes())
    }

    /// Sends a request of a netlink-packet crate and returns the decoded answers.
    ///
    /// `message_type` overrides the message's own type. Answers that cannot be decoded are left
    /// out: newer kernels report attributes of foreign objects that the crates do not know.
    pub(super) fn query<M>(&self, message_type: Option<u16>, flags: u16, message: M) -> io::Result<Vec<M>>
    where
        M: NetlinkSerializable + NetlinkDeserializable,
    {
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | NLM_F_ACK | flags;
        let mut request = NetlinkMessage::new(header, NetlinkPayload::InnerMessage(message));
        request.finalize();
        request.header.message_type = message_type.unwrap_or(request.header.message_type);
        let mut bytes = vec![0; request.buffer_len()];
        uninterrupted(|| {
            request.header.sequence_number = self.next_sequence();
            request.serialize(&mut bytes);
            decoded(self.send_request(&bytes)?)
        })
    }

    fn send_request(&self, request: &[u8]) -> io::Result<Answers<'_>> {
        self.socket.send(request, 0)?;
        Ok(Answers {
            socket: &self.socket,
            sequence: self.sequence.get(),
            datagram: Vec::with_capacity(LARGEST_DATAGRAM),
            position: 0,
            was_interrupted: false,
        })
    }

    /// Sends several messages at once, the last of which must request an acknowledgement. Returns
    /// the sequence numbers and errors of those that failed.
    ///
    /// All errors and acknowledgements together must fit into the socket's receive buffer.
    pub(super) fn send_batch(&self, messages: &MessageBuffer) -> io::Result<Vec<(u32, io::Error)>> {
        self.socket.send(messages.as_bytes(), 0)?;
        let mut errors = Vec::new();
        let mut datagram = Vec::with_capacity(LARGEST_DATAGRAM);
        // The kernel handles the messages in order and answers in the same order.
        let mut is_last_answered = false;
        while !is_last_answered {
            datagram.clear();
            self.socket.recv(&mut datagram, 0)?;
            for answer in messages_of(&datagram) {
                is_last_answered |= answer.sequence_number() == self.sequence.get();
                errors.extend(error_of(&answer).map(|error| (answer.sequence_number(), error)));
            }
        }
        Ok(errors)
    }
}

/// Returns the answers that can be decoded.
fn decoded<M: NetlinkDeserializable>(mut answers: Answers<'_>) -> io::Result<Vec<M>> {
    let mut decoded = Vec::new();
    while let Some(answer) = answers.next()? {
        let header = NetlinkHeader::parse(&answer).map_err(io::Error::other)?;
        decoded.extend(M::deserialize(&header, answer.payload()).ok());
    }
    Ok(decoded)
}

/// Repeats a dump until no other program interrupts it, within limits.
pub(super) fn uninterrupted<T>(mut dump: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let mut outcome = dump();
    for _ in 1..MAX_DUMP_ATTEMPTS {
        match &outcome {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => outcome = dump(),
            _ => break,
        }
    }
    outcome
}

/// The answers to one request. A dump that another program interrupted ends with an error of the
/// kind [`io::ErrorKind::Interrupted`], because its list may lack objects: see [`uninterrupted`].
pub(super) struct Answers<'a> {
    socket: &'a Socket,
    sequence: u32,
    datagram: Vec<u8>,
    /// The position of the next message in `datagram`.
    position: usize,
    /// The kernel's tables changed during the dump, so that the dump may be inconsistent.
    was_interrupted: bool,
}

impl Answers<'_> {
    /// Reads all answers. Returns what `read` makes of the attributes of each.
    pub(super) fn read<T>(&mut self, read: impl Fn(Attributes<'_>) -> Option<T>) -> io::Result<Vec<T>> {
        let mut list = Vec::new();
        while let Some(answer) = self.next()? {
            list.extend(read(Attributes::after_header(answer.payload())));
        }
        Ok(list)
    }

    /// Returns the next answer, or `None` after the last one. Skips answers to other requests.
    pub(super) fn next(&mut self) -> io::Result<Option<NetlinkBuffer<&[u8]>>> {
        loop {
            if self.position >= self.datagram.len() {
                self.datagram.clear();
                self.position = 0;
                self.socket.recv(&mut self.datagram, 0)?;
            }
            let start = self.position;
            let Some(message) = messages_of(&self.datagram[start..]).next() else {
                self.position = self.datagram.len();
                continue;
            };
            self.position += padded_length(&message);
            if message.sequence_number() != self.sequence {
                continue;
            }
            self.was_interrupted |= message.flags() & NLM_F_DUMP_INTR != 0;
            if matches!(message.message_type(), NLMSG_DONE | NLMSG_ERROR) {
                return match error_of(&message) {
                    Some(error) => Err(error),
                    None if self.was_interrupted => Err(io::Error::new(
                        io::ErrorKind::Interrupted,
                        "other programs keep changing what the kernel lists",
                    )),
                    None => Ok(None),
                };
            }
            return Ok(Some(NetlinkBuffer::new(&self.datagram[start..])));
        }
    }
}

/// Splits a datagram into its messages, up to the first damaged one.
pub(super) fn messages_of(mut datagram: &[u8]) -> impl Iterator<Item = NetlinkBuffer<&[u8]>> {
    std::iter::from_fn(move || {
        let message = NetlinkBuffer::new_checked(datagram).ok()?;
        datagram = datagram.get(padded_length(&message)..).unwrap_or_default();
        Some(message)
    })
}

/// Messages are aligned to four bytes. Only the last of a datagram may lack the padding.
fn padded_length(message: &NetlinkBuffer<&[u8]>) -> usize {
    (message.length() as usize).next_multiple_of(4)
}

/// Returns the error in a message of type `NLMSG_ERROR` or `NLMSG_DONE`. Both begin with a negated
/// error number, which is 0 on success. Returns `None` for all other messages.
pub(super) fn error_of(message: &NetlinkBuffer<&[u8]>) -> Option<io::Error> {
    if !matches!(message.message_type(), NLMSG_DONE | NLMSG_ERROR) {
        return None;
    }
    let code = message.payload().first_chunk().map_or(-libc::EBADMSG, |code| i32::from_ne_bytes(*code));
    // The smallest number has no negation. The kernel sends no such error.
    (code != 0).then(|| io::Error::from_raw_os_error(code.checked_neg().unwrap_or(libc::EBADMSG)))
}

/// Returns the type of a netfilter message: the subsystem (`NFNL_SUBSYS_*`) in the upper byte, the
/// subsystem's message in the lower byte.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "both numbers fit into a byte")]
pub(super) const fn nfnl_type(subsystem: c_int, message: c_int) -> u16 {
    (subsystem << 8 | message) as u16
}

/// Returns netfilter's header (`struct nfgenmsg`): family, version 0, and the resource identifier.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the uapi types are as narrow")]
pub(super) const fn nfgenmsg(family: c_int, resource: c_int) -> [u8; 4] {
    let [high, low] = (resource as u16).to_be_bytes();
    [family as u8, 0, high, low]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the answers in a datagram of two messages, the first of which has these flags.
    fn answers_with_flags(socket: &Socket, flags: u16) -> Answers<'_> {
        let mut datagram = MessageBuffer::default();
        datagram.message(libc::RTM_NEWLINK, flags, 1, [0; 4], |_| {});
        datagram.message(NLMSG_DONE, 0, 1, 0_i32.to_ne_bytes(), |_| {});
        let datagram = datagram.as_bytes().to_vec();
        Answers { socket, sequence: 1, datagram, position: 0, was_interrupted: false }
    }

    #[test]
    fn a_dump_that_was_interrupted_ends_with_an_error() {
        let socket = Socket::new(netlink_sys::protocols::NETLINK_ROUTE).expect("a socket");
        for (flags, is_whole) in [(0, true), (NLM_F_DUMP_INTR, false)] {
            let mut answers = answers_with_flags(&socket, flags);
            assert!(answers.next().is_ok_and(|answer| answer.is_some()));
            let kind = answers.next().map(|answer| answer.is_none()).map_err(|error| error.kind());
            assert_eq!(kind, if is_whole { Ok(true) } else { Err(io::ErrorKind::Interrupted) });
        }
    }

    #[test]
    fn an_interrupted_dump_is_repeated_within_limits() {
        let dumps_until = |success: usize| {
            let mut dumps = 0;
            let outcome = uninterrupted(|| {
                dumps += 1;
                if dumps == success { Ok(()) } else { Err(io::ErrorKind::Interrupted.into()) }
            });
            (outcome.is_ok(), dumps)
        };
        assert_eq!(dumps_until(3), (true, 3));
        assert_eq!(dumps_until(usize::MAX), (false, MAX_DUMP_ATTEMPTS));
        let mut dumps = 0;
        let denied = uninterrupted(|| {
            dumps += 1;
            Err::<(), _>(io::Error::from_raw_os_error(libc::EPERM))
        });
        assert!(denied.is_err() && dumps == 1);
    }

    #[test]
    fn error_and_done_messages_carry_an_error_number() {
        for message_type in [NLMSG_ERROR, NLMSG_DONE] {
            let cases = [(-libc::EPERM, Some(libc::EPERM)), (0, None), (i32::MIN, Some(libc::EBADMSG))];
            for (code, expected) in cases {
                let mut buffer = MessageBuffer::default();
                buffer.message(message_type, 0, 0, code.to_ne_bytes(), |_| {});
                let message = messages_of(buffer.as_bytes()).next().expect("one message");
                assert_eq!(error_of(&message).and_then(|error| error.raw_os_error()), expected);
            }
        }
    }
}
