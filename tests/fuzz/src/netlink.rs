//! Datagrams of netlink: answers and notifications of the kernel.

use proxy_userspace::kernel::fuzzing::read_datagram;

pub(crate) fn run(input: &[u8]) {
    read_datagram(input);
}
