//! Makes packets of many clients in the kernel, for measurements: they come in on a link without a
//! sender, so that their cost is that of the node alone.
//!
//! An XDP program of a few instructions writes each frame and passes it to the stack or to another
//! XDP program, or sends it back.

use std::{
    io,
    net::{Ipv4Addr, SocketAddrV4},
    os::fd::{AsFd as _, AsRawFd, BorrowedFd, OwnedFd},
};

use serde::{Deserialize, Serialize};

use super::{
    instructions::{instruction, load_constant, op},
    syscall, xdp,
};
use crate::net::XdpMode;

/// The bytes of a frame.
const LENGTH: usize = 64;
/// The clients of one address have this many ports, from the first one on.
const PORTS_OF_ADDRESS: u32 = 1 << 14;
const FIRST_PORT: u16 = 1024;
/// Offsets in a frame: of the checksum and the low half of the source in the IPv4 header, and of
/// the source port.
const CHECKSUM: usize = 24;
const SOURCE_LOW: usize = 28;
const SOURCE_PORT: usize = 34;

/// UDP datagrams to one destination, each from the next client.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Datagrams {
    /// The hardware addresses of the link and of the sender.
    pub ethernet: [[u8; 6]; 2],
    /// The first client. The low half of its address and its port are those of no client.
    pub first_client: Ipv4Addr,
    /// The number of the client that is first. The program counts from there.
    pub first: u32,
    /// The number of clients. After the last one comes the first.
    pub clients: u32,
    /// The destination.
    pub to: SocketAddrV4,
}

/// A loaded program.
#[derive(Debug)]
pub struct Generator {
    program: OwnedFd,
    frame: [u8; LENGTH],
    /// The number of the next client.
    _next: OwnedFd,
    /// The program that gets the frames.
    _called: Option<OwnedFd>,
}

/// What gets the frames.
#[derive(Clone, Copy, Debug)]
pub enum Receiver<'a> {
    /// The stack.
    Stack,
    /// Another XDP program.
    Program(BorrowedFd<'a>),
    /// The link on which they come in. No program looks at them, so no XDP program costs less.
    Link,
}

/// What happens to each frame that comes in on a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It is dropped, before it costs more.
    Drop,
    /// It goes into the stack. A veth takes frames that the driver of its peer sends only if it has
    /// a program.
    Pass,
}

/// An XDP program that does the same with all frames, in the driver of a link. It is detached when
/// it is dropped.
#[derive(Debug)]
pub struct SameForAll {
    _link: OwnedFd,
}

impl SameForAll {
    /// Attaches the program to a link of this network namespace. Kernel 5.9.
    pub fn attach(link: u32, fate: Fate) -> io::Result<Self> {
        let action = match fate {
            Fate::Drop => XDP_DROP,
            Fate::Pass => XDP_PASS,
        };
        let code = [instruction(op::MOVE_CONSTANT, [0, 0], 0, action), instruction(op::EXIT, [0, 0], 0, 0)];
        let program = syscall::load_xdp(&code)?;
        let link = syscall::create_xdp_link(program.as_fd(), link, xdp::flags(XdpMode::Native))?;
        Ok(Self { _link: link })
    }
}

impl Generator {
    /// Loads the program. Kernel 5.18, which [`Generator::send`] needs.
    pub fn load(datagrams: &Datagrams, to: Receiver<'_>) -> io::Result<Self> {
        let frame = datagrams.frame();
        let next = syscall::create_array()?;
        let called = match to {
            Receiver::Program(program) => Some(syscall::create_program_array(program)?),
            Receiver::Stack | Receiver::Link => None,
        };
        let called_fd = called.as_ref().map(AsRawFd::as_raw_fd);
        let action = if matches!(to, Receiver::Link) { XDP_TX } else { XDP_PASS };
        let instructions = program(&frame, datagrams, next.as_raw_fd(), (called_fd, action));
        let program = syscall::load_xdp(&instructions)?;
        Ok(Self { program, frame, _next: next, _called: called })
    }

    /// Lets this number of datagrams come in on a link of this network namespace.
    pub fn send(&self, link: u32, count: u32) -> io::Result<()> {
        // struct xdp_md: data, data_end, data_meta, ingress_ifindex, rx_queue_index,
        // egress_ifindex.
        let end = u32::try_from(LENGTH).map_err(io::Error::other)?;
        let context = [0, end, 0, link, 0, 0].map(u32::to_ne_bytes).concat();
        syscall::test_run_live(self.program.as_fd(), &self.frame, &context, count)
    }
}

impl Datagrams {
    /// Returns the frame without client and checksum.
    fn frame(&self) -> [u8; LENGTH] {
        let [destination, source] = self.ethernet;
        let [high, low, _, _] = self.first_client.octets();
        let [to_port, udp_length] = [self.to.port(), 64 - 14 - 20].map(u16::to_be_bytes);
        let parts: [&[u8]; 8] = [
            &destination,
            &source,
            &[0x08, 0x00, 0x45, 0, 0, 50, 0, 0, 0x40, 0, 64, 17, 0, 0],
            &[high, low, 0, 0],
            &self.to.ip().octets(),
            &[0, 0],
            &to_port,
            &udp_length,
        ];
        let mut frame = [0; LENGTH];
        frame.iter_mut().zip(parts.concat()).for_each(|(to, from)| *to = from);
        frame
    }
}

const XDP_DROP: i32 = 1;
const XDP_PASS: i32 = 2;
const XDP_TX: i32 = 3;

/// Returns the program. It writes the whole frame each time, because the kernel uses its memory
/// again. `next` and `called` are descriptors of maps. The program returns `action`, unless it
/// calls another one.
fn program(
    frame: &[u8; LENGTH],
    datagrams: &Datagrams,
    next: i32,
    (called, action): (Option<i32>, i32),
) -> Vec<u64> {
    let offset = |offset: usize| i16::try_from(offset).unwrap_or(0);
    let plain = |operation, registers, constant| instruction(operation, registers, 0, constant);
    // Registers: 6 is the frame, 7 its end, 8 the number of the client, 9 the context.
    let mut code = vec![
        plain(op::MOVE, [9, 1], 0),
        instruction(op::LOAD_U32, [6, 1], 0, 0),
        instruction(op::LOAD_U32, [7, 1], 4, 0),
        plain(op::MOVE, [2, 6], 0),
        plain(op::ADD_CONSTANT, [2, 0], 64),
        plain(op::MOVE_CONSTANT, [0, 0], XDP_DROP),
        instruction(op::JUMP_UNLESS_LESS, [7, 2], 1, 0),
        plain(op::EXIT, [0, 0], 0),
        instruction(op::STORE_U32_CONSTANT, [10, 0], -4, 0),
        plain(op::MOVE, [2, 10], 0),
        plain(op::ADD_CONSTANT, [2, 0], -4),
    ];
    code.extend(load_constant(1, op::MAP, u64::from(next.cast_unsigned())));
    code.extend([
        plain(op::CALL, [0, 0], op::LOOKUP),
        instruction(op::JUMP_UNLESS_EQUAL_CONSTANT, [0, 0], 1, 0),
        plain(op::EXIT, [0, 0], 0),
        instruction(op::LOAD_U32, [8, 0], 0, 0),
        plain(op::MOVE, [1, 8], 0),
        plain(op::ADD_CONSTANT, [1, 0], 1),
        instruction(op::JUMP_IF_LESS_CONSTANT, [1, 0], 1, datagrams.clients.cast_signed()),
        plain(op::MOVE_CONSTANT, [1, 0], 0),
        instruction(op::STORE_U32, [0, 1], 0, 0),
        plain(op::ADD_CONSTANT, [8, 0], datagrams.first.cast_signed()),
    ]);
    for (at, word) in frame.chunks_exact(8).enumerate() {
        let word = <[u8; 8]>::try_from(word).map_or(0, u64::from_ne_bytes);
        code.extend(load_constant(1, 0, word));
        code.push(instruction(op::STORE_U64, [6, 1], offset(at * 8), 0));
    }
    code.extend(client_and_checksum(frame));
    if let Some(called) = called {
        code.push(plain(op::MOVE, [1, 9], 0));
        code.extend(load_constant(2, op::MAP, u64::from(called.cast_unsigned())));
        code.extend([plain(op::MOVE_CONSTANT, [3, 0], 0), plain(op::CALL, [0, 0], op::TAIL_CALL)]);
    }
    code.push(plain(op::MOVE_CONSTANT, [0, 0], action));
    code.push(plain(op::EXIT, [0, 0], 0));
    code
}

/// Writes the source, and the checksum of the IPv4 header with it.
fn client_and_checksum(frame: &[u8; LENGTH]) -> Vec<u64> {
    let plain = |operation, registers, constant| instruction(operation, registers, 0, constant);
    let store = |at: usize, from| instruction(op::STORE_U16, [6, from], i16::try_from(at).unwrap_or(0), 0);
    let header = frame.get(14..34).unwrap_or_default();
    let sum: u32 = header.chunks_exact(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1])).sum();
    let fold = [
        plain(op::MOVE, [3, 2], 0),
        plain(op::SHIFT_RIGHT_CONSTANT, [3, 0], 16),
        plain(op::AND_CONSTANT, [2, 0], 0xffff),
        plain(op::ADD, [2, 3], 0),
    ];
    let ports = i32::try_from(PORTS_OF_ADDRESS - 1).unwrap_or(0);
    let mut code = vec![
        plain(op::MOVE, [1, 8], 0),
        plain(op::AND_CONSTANT, [1, 0], ports),
        plain(op::ADD_CONSTANT, [1, 0], FIRST_PORT.into()),
        plain(op::TO_BIG_ENDIAN, [1, 0], 16),
        store(SOURCE_PORT, 1),
        plain(op::SHIFT_RIGHT_CONSTANT, [8, 0], PORTS_OF_ADDRESS.trailing_zeros().cast_signed()),
        plain(op::AND_CONSTANT, [8, 0], 0xffff),
        plain(op::MOVE, [2, 8], 0),
        plain(op::ADD_CONSTANT, [2, 0], sum.cast_signed()),
    ];
    code.extend(fold);
    code.extend(fold);
    code.extend([
        plain(op::XOR_CONSTANT, [2, 0], 0xffff),
        plain(op::TO_BIG_ENDIAN, [2, 0], 16),
        store(CHECKSUM, 2),
        plain(op::TO_BIG_ENDIAN, [8, 0], 16),
        store(SOURCE_LOW, 8),
    ]);
    code
}
