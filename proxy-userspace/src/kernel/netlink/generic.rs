//! Generic netlink: the header of its messages, and the numbers of its families.

use std::io;

use libc::{CTRL_ATTR_FAMILY_ID, CTRL_ATTR_FAMILY_NAME, CTRL_CMD_GETFAMILY, GENL_ID_CTRL, c_int};
use netlink_sys::protocols::NETLINK_GENERIC;

use super::{NetlinkSocket, nfnl_type};

/// The length of `struct genlmsghdr`.
const HEADER_LENGTH: usize = 4;

/// Opens a socket to generic netlink in the calling thread's network namespace.
pub(in crate::kernel) fn open() -> io::Result<NetlinkSocket> {
    NetlinkSocket::open(NETLINK_GENERIC)
}

/// Returns the header of a message (`struct genlmsghdr`).
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the uapi type is a byte")]
pub(in crate::kernel) const fn header(command: c_int, version: u8) -> [u8; HEADER_LENGTH] {
    [command as u8, version, 0, 0]
}

/// Returns the number of a family, which is the type of its messages. The kernel loads the module
/// of the family if the module declares the name. Fails with `ENOENT` if the kernel has no such
/// family.
pub(in crate::kernel) fn family(socket: &NetlinkSocket, name: &str) -> io::Result<u16> {
    let write = |to: &mut super::MessageBuffer| to.string(CTRL_ATTR_FAMILY_NAME, name);
    let header = header(CTRL_CMD_GETFAMILY, 1);
    let mut answers = socket.request(nfnl_type(0, GENL_ID_CTRL), 0, header, write)?;
    let numbers = answers.read(|answer| answer.ne16(CTRL_ATTR_FAMILY_ID))?;
    numbers
        .first()
        .copied()
        .ok_or_else(|| io::Error::other(format!("the kernel gave no number for netlink family {name}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_existing_families_have_a_number() {
        let socket = open().expect("generic netlink");
        let number = family(&socket, "nlctrl").expect("every kernel has the controller");
        assert_eq!(c_int::from(number), GENL_ID_CTRL);
        let missing = family(&socket, "shunt-none").expect_err("no such family");
        assert_eq!(missing.raw_os_error(), Some(libc::ENOENT));
    }
}
