//! Lists the IPsec policies of this network namespace (`NETLINK_XFRM`).

use std::{fmt, io, net::IpAddr};

use libc::c_int;
use netlink_packet_core::NLM_F_DUMP;

use super::{
    KernelError,
    netlink::{NetlinkSocket, kernel_constants, uninterrupted},
};

/// The protocol of the socket (`NETLINK_XFRM`).
pub(super) const PROTOCOL: isize = 6;
/// The groups that report changes of policies, and policies that expire (`XFRMNLGRP_*`).
pub(super) const POLICY_GROUPS: [u32; 2] = [4, 2];

// include/uapi/linux/xfrm.h.
kernel_constants! {
    XFRM_MSG_NEWPOLICY = 0x13,
    XFRM_MSG_GETPOLICY = 0x15,
    XFRM_POLICY_OUT = 1,
    XFRM_POLICY_FWD = 2,
    XFRM_POLICY_MAX = 3,
}

/// The positions in `struct xfrm_userpolicy_info`, which begins with `struct xfrm_selector`.
mod at {
    pub(super) const DESTINATION: usize = 0;
    pub(super) const SOURCE: usize = 16;
    pub(super) const FAMILY: usize = 40;
    pub(super) const DESTINATION_LENGTH: usize = 42;
    pub(super) const SOURCE_LENGTH: usize = 43;
    pub(super) const DIRECTION: usize = 160;
}

/// A policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// The direction, as `ip xfrm policy` names it: `in`, `out` or `fwd`.
    pub direction: &'static str,
    /// The sources that it selects, as a prefix.
    pub source: (IpAddr, u8),
    /// The destinations that it selects, as a prefix.
    pub destination: (IpAddr, u8),
}

/// Prints the policy as `ip xfrm policy` does.
impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ((source, from), (destination, to)) = (self.source, self.destination);
        write!(f, "src {source}/{from} dst {destination}/{to} dir {}", self.direction)
    }
}

/// Lists the policies, except those of single sockets. A kernel without IPsec has none.
pub fn policies() -> Result<Vec<Policy>, KernelError> {
    uninterrupted(list).map_err(KernelError::call("list", "IPsec policies"))
}

fn list() -> io::Result<Vec<Policy>> {
    let socket = match NetlinkSocket::open(PROTOCOL) {
        Err(error) if error.raw_os_error() == Some(libc::EPROTONOSUPPORT) => return Ok(Vec::new()),
        socket => socket?,
    };
    let mut answers = socket.request(number(XFRM_MSG_GETPOLICY), NLM_F_DUMP, [], |_| {})?;
    let mut policies = Vec::new();
    while let Some(answer) = answers.next()? {
        if answer.message_type() == number(XFRM_MSG_NEWPOLICY) {
            policies.extend(read(answer.payload())?);
        }
    }
    Ok(policies)
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the uapi type has 16 bits")]
const fn number(message: c_int) -> u16 {
    message as u16
}

/// Reads a policy; `None` if it belongs to one socket.
pub(super) fn read(payload: &[u8]) -> io::Result<Option<Policy>> {
    let byte = |at: usize| payload.get(at).copied().ok_or(io::ErrorKind::UnexpectedEof);
    let direction = c_int::from(byte(at::DIRECTION)?);
    if direction >= XFRM_POLICY_MAX {
        return Ok(None);
    }
    let is_v6 = c_int::from(byte(at::FAMILY)?) == libc::AF_INET6;
    let address = |at: usize| -> io::Result<IpAddr> {
        let bytes = payload.get(at..).and_then(<[u8]>::first_chunk::<16>);
        let bytes = *bytes.ok_or(io::ErrorKind::UnexpectedEof)?;
        let [a, b, c, d, ..] = bytes;
        Ok(if is_v6 { bytes.into() } else { [a, b, c, d].into() })
    };
    Ok(Some(Policy {
        direction: match direction {
            XFRM_POLICY_OUT => "out",
            XFRM_POLICY_FWD => "fwd",
            _ => "in",
        },
        source: (address(at::SOURCE)?, byte(at::SOURCE_LENGTH)?),
        destination: (address(at::DESTINATION)?, byte(at::DESTINATION_LENGTH)?),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A policy for packets from 10.0.0.0/8 to 192.0.2.1.
    fn policy(direction: u8) -> Vec<u8> {
        let mut bytes = vec![0; 168];
        bytes[..4].copy_from_slice(&[192, 0, 2, 1]);
        bytes[16..17].copy_from_slice(&[10]);
        (bytes[40], bytes[42], bytes[43], bytes[160]) = (2, 32, 8, direction);
        bytes
    }

    #[test]
    fn policies_of_sockets_are_left_out() {
        let read = |direction| read(&policy(direction)).expect("whole").map(|policy| policy.to_string());
        assert_eq!(read(1).as_deref(), Some("src 10.0.0.0/8 dst 192.0.2.1/32 dir out"));
        assert_eq!(read(0).as_deref(), Some("src 10.0.0.0/8 dst 192.0.2.1/32 dir in"));
        assert_eq!((read(3), read(4)), (None, None));
    }

    #[test]
    fn a_damaged_policy_is_an_error() {
        assert!(read(&policy(0)[..160]).is_err());
    }
}
