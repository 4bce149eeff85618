//! Packet counters with a name (`nfnetlink_acct`): made, and read.

use std::io;

use netlink_packet_core::{NLM_F_ACK, NLM_F_CREATE, NLM_F_REQUEST, NetlinkBuffer};
use netlink_sys::{Socket, protocols::NETLINK_NETFILTER};

use super::{KernelError, netlink};

/// `NFNL_SUBSYS_ACCT` of `linux/netfilter/nfnetlink.h`, the upper byte of a message's type.
const SUBSYSTEM: u16 = 7 << 8;
/// `NFNL_MSG_ACCT_NEW` and `NFNL_MSG_ACCT_GET` of `linux/netfilter/nfnetlink_acct.h`.
const NEW: u16 = SUBSYSTEM;
const GET: u16 = SUBSYSTEM | 1;
/// `NFACCT_NAME` and `NFACCT_PKTS`.
const NAME: u16 = 1;
const PACKETS: u16 = 2;
/// Bytes of a netlink message's header, and of netfilter's after it (`struct nfgenmsg`).
const HEADER: usize = 16;
const NETFILTER_HEADER: usize = 4;
/// `NFACCT_NAME_MAX`, the zero at the end included.
const LONGEST_NAME: usize = 32;

/// Makes a counter; one of this name that is there already stays as it is.
pub fn ensure(name: &str) -> Result<(), KernelError> {
    match ask(NEW, NLM_F_CREATE | NLM_F_ACK, name) {
        Ok(_) => Ok(()),
        // Without NLM_F_REPLACE the kernel says so of one that exists.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EBUSY | libc::EEXIST)) => Ok(()),
        Err(error) => Err(KernelError::call("make nfacct counter", name)(error)),
    }
}

/// How many packets a counter has counted.
pub fn packets(name: &str) -> Result<u64, KernelError> {
    let failed = KernelError::call("read nfacct counter", name);
    ask(GET, 0, name)
        .and_then(|answer| answer.ok_or_else(|| io::ErrorKind::InvalidData.into()))
        .map_err(failed)
}

/// Asks about a counter, and returns the packets that the answer tells of.
fn ask(kind: u16, flags: u16, name: &str) -> io::Result<Option<u64>> {
    if name.len() >= LONGEST_NAME {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let socket: Socket = netlink::open(NETLINK_NETFILTER)?;
    socket.send(&message(kind, NLM_F_REQUEST | flags, name), 0)?;
    let (answer, _) = socket.recv_from_full()?;
    let answer = NetlinkBuffer::new_checked(&answer[..]).map_err(io::Error::other)?;
    // What it tells of a counter is of the kind that makes one.
    if answer.message_type() == NEW {
        return Ok(counted(answer.payload()));
    }
    // An error, or its absence: the first four bytes are its negated number.
    let code = answer.payload().first_chunk().map_or(-libc::EPROTO, |code| i32::from_ne_bytes(*code));
    if code == 0 { Ok(None) } else { Err(io::Error::from_raw_os_error(-code)) }
}

fn message(kind: u16, flags: u16, name: &str) -> Vec<u8> {
    let attribute = 4 + name.len() + 1;
    let length = HEADER + NETFILTER_HEADER + attribute.next_multiple_of(4);
    let mut bytes = Vec::with_capacity(length);
    bytes.extend(u32::try_from(length).unwrap_or_default().to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(flags.to_ne_bytes());
    // Sequence, port, and an `nfgenmsg` of no family in particular, version 0.
    bytes.extend([0; 8 + NETFILTER_HEADER]);
    bytes.extend(u16::try_from(attribute).unwrap_or_default().to_ne_bytes());
    bytes.extend(NAME.to_ne_bytes());
    bytes.extend(name.as_bytes());
    bytes.resize(length, 0);
    bytes
}

/// The attribute [`PACKETS`] of an answer: 64 bits, high byte first.
fn counted(payload: &[u8]) -> Option<u64> {
    let mut attributes = payload.get(NETFILTER_HEADER..)?;
    while let Some(([length, kind], _)) = attributes.split_first_chunk::<4>().map(|(head, rest)| {
        ([u16::from_ne_bytes([head[0], head[1]]), u16::from_ne_bytes([head[2], head[3]])], rest)
    }) {
        if kind & 0x3fff == PACKETS {
            return attributes.get(4..12)?.try_into().ok().map(u64::from_be_bytes);
        }
        attributes = attributes.get(usize::from(length).max(4).next_multiple_of(4)..)?;
    }
    None
}

#[cfg(test)]
mod tests {
    use std::thread;

    use nix::sched::{CloneFlags, unshare};

    use super::*;

    #[test]
    fn a_counter_is_made_once_and_counts_from_nothing() {
        let tried = thread::spawn(|| {
            unshare(CloneFlags::CLONE_NEWNET).expect("root may make network namespaces");
            ensure("shunt_test").expect("this kernel has nfacct");
            ensure("shunt_test").expect("it is there");
            (packets("shunt_test"), packets("shunt_test_none"))
        });
        let (made, missing) = tried.join().expect("no panic");
        assert_eq!(made.expect("it was made"), 0);
        assert!(missing.expect_err("nobody made it").to_string().contains("shunt_test_none"));
    }
}
