//! Whether the kernel has a generic netlink family, which is how its subsystems are reached.

use std::io;

use netlink_packet_core::{NLM_F_ACK, NLM_F_REQUEST, NetlinkBuffer};
use netlink_sys::protocols::NETLINK_GENERIC;

use super::{super::netlink, Fact};

/// `GENL_ID_CTRL`, whom families are asked of.
const CONTROLLER: u16 = 16;
/// `CTRL_CMD_GETFAMILY`.
const GET_FAMILY: u8 = 3;
/// `CTRL_ATTR_FAMILY_NAME`.
const FAMILY_NAME: u16 = 2;
/// `NLMSG_ERROR`, which also says that all is well.
const ERROR: u16 = 2;
const HEADER: usize = 16;

/// Asks for a family; the kernel loads the module that brings it, if there is one.
pub(super) fn generic_family(name: &str) -> Fact {
    match ask(name) {
        Ok(()) => Fact::Present(String::new()),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {
            Fact::Missing(format!("this kernel does not have {name}"))
        }
        Err(error) => Fact::Unknown(format!("ask for netlink family {name}: {error}")),
    }
}

fn ask(name: &str) -> io::Result<()> {
    let socket = netlink::open(NETLINK_GENERIC)?;
    socket.send(&request(name)?, 0)?;
    let (answer, _) = socket.recv_from_full()?;
    let message = NetlinkBuffer::new_checked(&answer).map_err(io::Error::other)?;
    match (message.message_type(), message.payload().first_chunk::<4>()) {
        (ERROR, Some(code)) if i32::from_ne_bytes(*code) != 0 => {
            Err(io::Error::from_raw_os_error(-i32::from_ne_bytes(*code)))
        }
        _ => Ok(()),
    }
}

fn request(name: &str) -> io::Result<Vec<u8>> {
    let mut attribute = name.as_bytes().to_vec();
    attribute.push(0);
    let mut payload = vec![GET_FAMILY, 1, 0, 0];
    payload.extend(u16::try_from(4 + attribute.len()).map_err(io::Error::other)?.to_ne_bytes());
    payload.extend(FAMILY_NAME.to_ne_bytes());
    payload.extend(attribute);
    payload.resize(payload.len().next_multiple_of(4), 0);
    let mut bytes = vec![0; HEADER + payload.len()];
    let length = u32::try_from(bytes.len()).map_err(io::Error::other)?;
    let mut header = NetlinkBuffer::new(&mut bytes);
    header.set_length(length);
    header.set_message_type(CONTROLLER);
    header.set_flags(NLM_F_REQUEST | NLM_F_ACK);
    header.payload_mut().copy_from_slice(&payload);
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_family_that_every_kernel_has_is_found_and_one_that_none_has_is_not() {
        assert_eq!(generic_family("nlctrl"), Fact::Present(String::new()));
        assert!(generic_family("shunt-none").is_missing());
    }
}
