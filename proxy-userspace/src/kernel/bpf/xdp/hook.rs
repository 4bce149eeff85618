//! Reads and replaces the program on the XDP hook of a network link over rtnetlink, for programs
//! that are attached without a BPF link.

use std::{
    io,
    os::fd::{AsRawFd as _, BorrowedFd},
};

use netlink_packet_route::{
    RouteNetlinkMessage,
    link::{LinkAttribute, LinkMessage, LinkXdp},
};
use netlink_sys::protocols::NETLINK_ROUTE;

use super::flags;
use crate::{kernel::netlink::NetlinkSocket, net::XdpMode};

/// `XDP_FLAGS_REPLACE`: only in the place of a certain program. Kernel 5.7 (92234c8f15c8).
const REPLACE: u32 = 1 << 4;
/// The descriptor that stands for no program.
const NONE: i32 = -1;

/// The XDP hooks of the links in the network namespace of the thread that opened it.
#[derive(Debug)]
pub(super) struct Hooks {
    socket: NetlinkSocket,
}

/// The program on a hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Running {
    /// The id of the program.
    pub(super) program: u32,
    /// Where it runs.
    pub(super) mode: XdpMode,
}

impl Hooks {
    pub(super) fn open() -> io::Result<Self> {
        NetlinkSocket::open(NETLINK_ROUTE).map(|socket| Self { socket })
    }

    /// Returns the program on a link. Returns `None` if it has none, or is gone.
    pub(super) fn read(&self, index: u32) -> io::Result<Option<Running>> {
        let request = RouteNetlinkMessage::GetLink(message(index, Vec::new()));
        let answers = match self.socket.query(None, 0, request) {
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => return Ok(None),
            answers => answers?,
        };
        Ok(answers.iter().find_map(|answer| match answer {
            RouteNetlinkMessage::NewLink(link) => running(&link.attributes),
            _ => None,
        }))
    }

    /// Replaces the program `expected` on a link, or removes it if `new` is `None`. If the link has
    /// another program by now, the error is EEXIST.
    pub(super) fn replace(
        &self,
        index: u32,
        mode: XdpMode,
        new: Option<BorrowedFd<'_>>,
        expected: BorrowedFd<'_>,
    ) -> io::Result<()> {
        let attributes = vec![
            LinkXdp::Fd(new.map_or(NONE, |program| program.as_raw_fd())),
            LinkXdp::ExpectedFd(expected.as_raw_fd().cast_unsigned()),
            LinkXdp::Flags(flags(mode) | REPLACE),
        ];
        let request = RouteNetlinkMessage::SetLink(message(index, vec![LinkAttribute::Xdp(attributes)]));
        self.socket.query(None, 0, request).map(drop)
    }
}

fn message(index: u32, attributes: Vec<LinkAttribute>) -> LinkMessage {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.attributes = attributes;
    message
}

fn running(attributes: &[LinkAttribute]) -> Option<Running> {
    let xdp = attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::Xdp(xdp) => Some(xdp),
        _ => None,
    });
    xdp?.iter().find_map(|attribute| match attribute {
        LinkXdp::DrvProgId(program) => Some(Running { program: *program, mode: XdpMode::Native }),
        LinkXdp::SkbProgId(program) => Some(Running { program: *program, mode: XdpMode::Generic }),
        _ => None,
    })
}
