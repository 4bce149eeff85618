//! Named packet counters (`nfnetlink_acct`).

use std::io;

use libc::{NFNL_SUBSYS_ACCT, c_int};
use netlink_packet_core::NLM_F_CREATE;
use netlink_sys::protocols::NETLINK_NETFILTER;

use super::{
    KernelError,
    netlink::{NetlinkSocket, kernel_constants, nfgenmsg, nfnl_type},
};

kernel_constants! {
    // linux/netfilter/nfnetlink_acct.h
    NFNL_MSG_ACCT_NEW = 0, NFNL_MSG_ACCT_GET = 1,
    NFACCT_NAME = 1, NFACCT_PKTS = 2,
}
/// The length of the longest name, including the terminating zero.
const NFACCT_NAME_MAX: usize = 32;

/// Creates a counter unless it exists.
pub fn ensure(name: &str) -> Result<(), KernelError> {
    match request(NFNL_MSG_ACCT_NEW, NLM_F_CREATE, name) {
        Ok(_) => Ok(()),
        // The counter exists, and the request does not have NLM_F_REPLACE.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EBUSY | libc::EEXIST)) => Ok(()),
        Err(error) => Err(KernelError::call("create the nfacct counter", name)(error)),
    }
}

/// Returns the number of packets that a counter has counted.
pub fn packets(name: &str) -> Result<u64, KernelError> {
    request(NFNL_MSG_ACCT_GET, 0, name)
        .and_then(|packets| packets.ok_or_else(|| io::ErrorKind::InvalidData.into()))
        .map_err(KernelError::call("read the nfacct counter", name))
}

/// Sends a request about a counter. Returns the number of packets, if the answer has it.
fn request(message: c_int, flags: u16, name: &str) -> io::Result<Option<u64>> {
    if name.len() >= NFACCT_NAME_MAX {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let socket = NetlinkSocket::open(NETLINK_NETFILTER)?;
    let message_type = nfnl_type(NFNL_SUBSYS_ACCT, message);
    let header = nfgenmsg(libc::AF_UNSPEC, 0);
    let mut answers = socket.request(message_type, flags, header, |to| to.string(NFACCT_NAME, name))?;
    Ok(answers.read(|answer| answer.be64(NFACCT_PKTS))?.first().copied())
}

#[cfg(test)]
mod tests {
    use std::thread;

    use nix::sched::{CloneFlags, unshare};

    use super::*;

    #[test]
    fn counter_is_created_once_and_starts_at_zero() {
        let tried = thread::spawn(|| {
            unshare(CloneFlags::CLONE_NEWNET).expect("root may make network namespaces");
            ensure("shunt_test").expect("this kernel has nfacct");
            ensure("shunt_test").expect("it exists");
            (packets("shunt_test"), packets("shunt_test_none"))
        });
        let (made, missing) = tried.join().expect("no panic");
        assert_eq!(made.expect("it exists"), 0);
        assert!(missing.expect_err("it does not exist").to_string().contains("shunt_test_none"));
    }
}
