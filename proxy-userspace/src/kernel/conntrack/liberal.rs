//! Makes conntrack accept segments of single TCP connections outside the window, because it does
//! not see all of them.

use netlink_packet_core::NLM_F_ACK;

use super::{
    AddressPair, failed,
    message::{IP_CT_TCP_FLAG_BE_LIBERAL, conntrack_type, header, write_tcp_flags, write_tuple},
    open,
    uapi::*,
};
use crate::{
    kernel::{
        KernelError,
        netlink::{MessageBuffer, NetlinkSocket},
    },
    net::{IpFamily, Protocol},
};

/// A socket for changes of connections.
#[derive(Debug)]
pub struct LiberalConnections(NetlinkSocket);

impl LiberalConnections {
    /// Opens the socket, in the calling thread's network namespace.
    pub fn open() -> Result<Self, KernelError> {
        open().map(Self)
    }

    /// Makes conntrack accept segments of a connection with any sequence number
    /// (`IP_CT_TCP_FLAG_BE_LIBERAL`). `original` is the original direction as conntrack sees it.
    /// Returns false if conntrack does not have the connection in zone 0.
    pub fn accept(&mut self, original: AddressPair) -> Result<bool, KernelError> {
        let mut message = MessageBuffer::default();
        let family = header(IpFamily::of(original.source.ip()));
        let change = conntrack_type(IPCTNL_MSG_CT_NEW);
        message.message(change, NLM_F_ACK, self.0.next_sequence(), family, |to| {
            write_tuple(CTA_TUPLE_ORIG, Protocol::Tcp, original, to);
            to.nested(CTA_PROTOINFO, |to| {
                to.nested(CTA_PROTOINFO_TCP, |to| write_tcp_flags(IP_CT_TCP_FLAG_BE_LIBERAL, to));
            });
        });
        let errors = self.0.send_batch(&message).map_err(failed("change"))?;
        match errors.into_iter().next() {
            None => Ok(true),
            Some((_, error)) if error.raw_os_error() == Some(libc::ENOENT) => Ok(false),
            Some((_, error)) => Err(failed("change")(error)),
        }
    }
}
