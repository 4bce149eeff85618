//! One question and its answers over a netlink socket, waited for no longer than a bounded time.

use std::io;

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_REQUEST, NetlinkBuffer, NetlinkDeserializable, NetlinkHeader, NetlinkMessage,
    NetlinkPayload, NetlinkSerializable,
};
use netlink_sys::{Socket, SocketAddr};

/// How long the kernel may take for an answer.
const ANSWER_TIMEOUT_SECONDS: i32 = 2;
/// More than the kernel puts into one datagram.
pub(super) const LARGEST_DATAGRAM: usize = 64 * 1024;

/// Opens a socket to the kernel, in the calling thread's network namespace.
pub(super) fn open(protocol: isize) -> io::Result<Socket> {
    let mut socket = Socket::new(protocol)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    super::set_receive_timeout(&socket, ANSWER_TIMEOUT_SECONDS)?;
    Ok(socket)
}

/// Asks with these flags besides `NLM_F_REQUEST`, and returns the answers: of a dump all, else those before the kernel's word
/// that it is done. `message_type` overrides the message's own. What cannot be decoded is left out: kernels add to what they
/// tell of objects that are none of ours.
pub(super) fn ask<M>(socket: &Socket, message_type: Option<u16>, flags: u16, message: M) -> io::Result<Vec<M>>
where
    M: NetlinkSerializable + NetlinkDeserializable + std::fmt::Debug,
{
    socket.send(&packet(message_type, flags, message), 0)?;
    let mut answers = Vec::new();
    loop {
        let (bytes, _) = socket.recv_from_full()?;
        for message in messages::<M>(&bytes).filter_map(Result::ok) {
            match message.payload {
                NetlinkPayload::InnerMessage(answer) => answers.push(answer),
                NetlinkPayload::Done(_) => return Ok(answers),
                NetlinkPayload::Error(error) if error.code.is_none() => return Ok(answers),
                NetlinkPayload::Error(error) => return Err(error.to_io()),
                _ => {}
            }
        }
    }
}

/// Asks for something to be done.
pub(super) fn tell<M>(socket: &Socket, message_type: Option<u16>, flags: u16, message: M) -> io::Result<()>
where
    M: NetlinkSerializable + NetlinkDeserializable + std::fmt::Debug,
{
    ask(socket, message_type, flags | NLM_F_ACK, message).map(drop)
}

fn packet<M: NetlinkSerializable>(message_type: Option<u16>, flags: u16, message: M) -> Vec<u8> {
    let mut header = NetlinkHeader::default();
    header.flags = NLM_F_REQUEST | flags;
    let mut packet = NetlinkMessage::new(header, NetlinkPayload::InnerMessage(message));
    packet.finalize();
    if let Some(message_type) = message_type {
        packet.header.message_type = message_type;
    }
    let mut bytes = vec![0; packet.buffer_len()];
    packet.serialize(&mut bytes);
    bytes
}

/// The messages of one datagram.
fn messages<M: NetlinkDeserializable>(bytes: &[u8]) -> impl Iterator<Item = io::Result<NetlinkMessage<M>>> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let message = NetlinkMessage::<M>::deserialize(rest);
        // The length comes first, also of what cannot be decoded. Messages are padded to four bytes.
        let length =
            rest.first_chunk().map_or(rest.len(), |length| u32::from_ne_bytes(*length) as usize).max(1);
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(message.map_err(io::Error::other))
    })
}

/// The messages of one datagram, read in place, up to the first that is damaged.
pub(super) fn borrowed_messages(datagram: &[u8]) -> impl Iterator<Item = NetlinkBuffer<&[u8]>> {
    let mut rest = datagram;
    std::iter::from_fn(move || {
        let message = NetlinkBuffer::new_checked(rest).ok()?;
        // Messages are aligned to four bytes, but for the end of the last.
        let length = (message.length() as usize).next_multiple_of(4);
        rest = rest.get(length..).unwrap_or_default();
        Some(message)
    })
}

/// What a message of type `NLMSG_ERROR` or `NLMSG_DONE` says; none where all is well.
pub(super) fn error_of(payload: &[u8]) -> Option<io::Error> {
    let code = payload.first_chunk().map_or(-libc::EBADMSG, |code| i32::from_ne_bytes(*code));
    (code != 0).then(|| io::Error::from_raw_os_error(-code))
}
