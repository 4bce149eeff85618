//! Reads the rules that select routing tables (`ip rule`), over rtnetlink.

use std::io;

use libc::RTM_GETRULE;
use netlink_packet_core::NLM_F_DUMP;
use netlink_sys::protocols::NETLINK_ROUTE;

use super::{
    KernelError,
    netlink::{NetlinkSocket, uninterrupted},
};

/// The length of `struct fib_rule_hdr`, and the position of the length of the source's prefix.
const HEADER_LENGTH: usize = 12;
const SOURCE_LENGTH: usize = 2;

/// Returns true if a rule of any family selects by source address (`ip rule add from`).
pub fn select_by_source() -> Result<bool, KernelError> {
    let list = || -> io::Result<bool> {
        let socket = NetlinkSocket::open(NETLINK_ROUTE)?;
        let mut rules = socket.request(RTM_GETRULE, NLM_F_DUMP, [0; HEADER_LENGTH], |_| {})?;
        let mut is_found = false;
        while let Some(rule) = rules.next()? {
            is_found |= rule.payload().get(SOURCE_LENGTH).is_none_or(|length| *length != 0);
        }
        Ok(is_found)
    };
    match uninterrupted(list) {
        // A kernel without CONFIG_IP_MULTIPLE_TABLES has no rules.
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(false),
        found => found.map_err(KernelError::call("list", "routing rules")),
    }
}
