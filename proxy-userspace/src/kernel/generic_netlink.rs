//! Generic netlink: the number by which a family of the kernel is spoken to.

use std::io;

use netlink_packet_core::{NLM_F_REQUEST, NLMSG_ERROR};
use netlink_sys::{Socket, protocols::NETLINK_GENERIC};

use super::{
    netlink,
    nftables::attributes::{self, Attributes},
};

/// `GENL_ID_CTRL`, whom families are asked of.
const CONTROLLER: u16 = 16;
/// `CTRL_CMD_GETFAMILY`.
const GET_FAMILY: u8 = 3;
/// `CTRL_ATTR_FAMILY_ID`.
const FAMILY_ID: u16 = 1;
/// `CTRL_ATTR_FAMILY_NAME`.
const FAMILY_NAME: u16 = 2;
/// What stands before the attributes of a message: command, version and two bytes without meaning.
pub(super) const HEAD: usize = 4;

/// A socket to generic netlink in the calling thread's network namespace.
pub(super) fn open() -> io::Result<Socket> {
    netlink::open(NETLINK_GENERIC)
}

/// The number of a family; `ENOENT` where the kernel has none of this name. It loads the module that brings it, if there is
/// one that says so.
pub(super) fn family(socket: &Socket, name: &str) -> io::Result<u16> {
    let mut request = Attributes::default();
    let start = request.begin_generic(CONTROLLER, NLM_F_REQUEST, 0, GET_FAMILY, 1);
    request.text(FAMILY_NAME, name);
    request.end_message(start, NLM_F_REQUEST);
    socket.send(request.as_bytes(), 0)?;
    let (answer, _) = socket.recv_from_full()?;
    for message in netlink::borrowed_messages(&answer) {
        if message.message_type() == NLMSG_ERROR {
            return Err(netlink::error_of(message.payload()).unwrap_or_else(|| io::Error::other("no answer")));
        }
        let attributes = message.payload().get(HEAD..).unwrap_or_default();
        if let Some(number) = attributes::find(attributes, FAMILY_ID).and_then(|value| value.first_chunk()) {
            return Ok(u16::from_ne_bytes(*number));
        }
    }
    Err(io::Error::other(format!("no number for the netlink family {name}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_family_that_every_kernel_has_is_found_and_one_that_none_has_is_not() {
        let socket = open().expect("generic netlink");
        assert_eq!(family(&socket, "nlctrl").expect("the controller itself"), CONTROLLER);
        let missing = family(&socket, "shunt-none").expect_err("no such family");
        assert_eq!(missing.raw_os_error(), Some(libc::ENOENT));
    }
}
