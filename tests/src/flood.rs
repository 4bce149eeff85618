//! Packets of clients that do not exist: floods with forged sources, and whole connections that
//! cost no sockets.

use std::{
    net::{Ipv4Addr, SocketAddrV4},
    os::fd::{AsRawFd as _, OwnedFd},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use etherparse::{IpHeaders, PacketBuilder, PacketBuilderStep, TcpHeader};
use nix::{
    errno::Errno,
    ifaddrs::getifaddrs,
    sys::socket::{AddressFamily, LinkAddr, MsgFlags, SockFlag, SockProtocol, SockType, bind, send, socket},
    time::{ClockId, clock_gettime},
};

use crate::{agent::protocol::Protocol, deadline::Stopwatch};

/// The forged addresses: a range for measurements (RFC 2544).
pub const SOURCES: &str = "198.18.0.0/15";
const FIRST_SOURCE: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 0);
/// The number of forged addresses.
const SOURCE_COUNT: u32 = 1 << 17;
/// The first forged port.
const FIRST_PORT: u32 = 1024;
/// A receiver whose queue is full is no reason to stop. This many packets in a row are.
const MAX_UNSENT: u32 = 10_000;
/// The hardware address of senders, which nobody answers to.
const SENDER: [u8; 6] = [2, 0, 0, 0, 0, 1];
/// How long a sender waits if its next connection is not due.
const WAIT: Duration = Duration::from_millis(5);

/// A packet socket of a link.
#[derive(Debug)]
pub struct Sender {
    socket: OwnedFd,
    /// The hardware address of the next hop.
    gateway: [u8; 6],
    frame: Vec<u8>,
    unsent: u32,
}

/// A flood: as many packets, each from another source.
#[derive(Clone, Copy, Debug)]
pub struct Flood {
    /// TCP sends SYNs, UDP datagrams of one byte.
    pub protocol: Protocol,
    /// The destination.
    pub to: SocketAddrV4,
    /// The number of packets.
    pub packets: u32,
}

/// Connections that open and close, each from another source: six packets.
#[derive(Clone, Copy, Debug)]
pub struct Connections {
    /// The VIP.
    pub to: SocketAddrV4,
    /// The endpoint.
    pub endpoint: SocketAddrV4,
    /// The number of connections.
    pub count: u32,
    /// How many of them begin in a second.
    pub per_second: u32,
}

/// What sending took.
#[derive(Clone, Copy, Debug)]
pub struct Sent {
    /// The time from the first packet to the last.
    pub took: Duration,
    /// The CPU time of the sender. It includes the work of the receiving node for each packet,
    /// because the packets of a veth pair are processed on the CPU of the sender.
    pub cpu: Duration,
}

impl Sender {
    /// Opens a socket on a link of this network namespace.
    pub fn open(link: &str, gateway: [u8; 6]) -> Result<Self> {
        let socket = socket(AddressFamily::Packet, SockType::Raw, SockFlag::empty(), None::<SockProtocol>)
            .context("open a packet socket")?;
        bind(socket.as_raw_fd(), &link_address(link)?).with_context(|| format!("bind to {link}"))?;
        Ok(Self { socket, gateway, frame: Vec::with_capacity(64), unsent: 0 })
    }

    fn segment(&mut self, from: SocketAddrV4, to: SocketAddrV4, tcp: TcpHeader) -> Result<()> {
        let header = TcpHeader { source_port: from.port(), destination_port: to.port(), ..tcp };
        self.packet(from, to).tcp_header(header).write(&mut self.frame, &[])?;
        self.send()
    }

    fn datagram(&mut self, from: SocketAddrV4, to: SocketAddrV4) -> Result<()> {
        self.packet(from, to).udp(from.port(), to.port()).write(&mut self.frame, b"q")?;
        self.send()
    }

    fn packet(&mut self, from: SocketAddrV4, to: SocketAddrV4) -> PacketBuilderStep<IpHeaders> {
        self.frame.clear();
        PacketBuilder::ethernet2(SENDER, self.gateway).ipv4(from.ip().octets(), to.ip().octets(), 64)
    }

    fn send(&mut self) -> Result<()> {
        match send(self.socket.as_raw_fd(), &self.frame, MsgFlags::empty()) {
            Ok(_) => self.unsent = 0,
            Err(Errno::ENOBUFS) if self.unsent < MAX_UNSENT => self.unsent += 1,
            Err(error) => return Err(error).context("send a packet"),
        }
        Ok(())
    }
}

impl Flood {
    /// Sends all packets.
    pub fn send(&self, client: &mut Sender) -> Result<Sent> {
        timed(|| {
            for number in 0..self.packets {
                let from = source(number)?;
                match self.protocol {
                    Protocol::Tcp => client.segment(from, self.to, syn(fastrand::u32(..)))?,
                    Protocol::Udp => client.datagram(from, self.to)?,
                    Protocol::Sctp => bail!("no flood of SCTP"),
                }
            }
            Ok(())
        })
    }
}

impl Connections {
    /// Makes all connections: the packets of both sides, each when it is due.
    pub fn make(&self, client: &mut Sender, endpoint: &mut Sender) -> Result<Sent> {
        let began = Stopwatch::start();
        timed(|| {
            for number in 0..self.count {
                let due = Duration::from_secs(u64::from(number)) / self.per_second;
                while began.elapsed() < due {
                    thread::sleep(WAIT);
                }
                self.make_one(source(number)?, client, endpoint)?;
            }
            Ok(())
        })
    }

    fn make_one(&self, from: SocketAddrV4, client: &mut Sender, endpoint: &mut Sender) -> Result<()> {
        let [ours, theirs]: [u32; 2] = [fastrand::u32(..), fastrand::u32(..)];
        let after = |number: u32, segments| number.wrapping_add(segments);
        let fin = |sequence, acknowledged| TcpHeader { fin: true, ..ack(sequence, acknowledged) };
        let syn_ack = TcpHeader { syn: true, ..ack(theirs, after(ours, 1)) };
        client.segment(from, self.to, syn(ours))?;
        endpoint.segment(self.endpoint, from, syn_ack)?;
        client.segment(from, self.to, ack(after(ours, 1), after(theirs, 1)))?;
        client.segment(from, self.to, fin(after(ours, 1), after(theirs, 1)))?;
        endpoint.segment(self.endpoint, from, fin(after(theirs, 1), after(ours, 2)))?;
        client.segment(from, self.to, ack(after(ours, 2), after(theirs, 2)))
    }
}

fn syn(sequence: u32) -> TcpHeader {
    TcpHeader { syn: true, ..TcpHeader::new(0, 0, sequence, 64_240) }
}

fn ack(sequence: u32, acknowledged: u32) -> TcpHeader {
    TcpHeader { ack: true, acknowledgment_number: acknowledged, ..TcpHeader::new(0, 0, sequence, 64_240) }
}

/// Returns one forged source after the other.
fn source(number: u32) -> Result<SocketAddrV4> {
    let address = Ipv4Addr::from_bits(FIRST_SOURCE.to_bits() + number % SOURCE_COUNT);
    let port = u16::try_from(FIRST_PORT + number / SOURCE_COUNT).context("too many packets")?;
    Ok(SocketAddrV4::new(address, port))
}

fn timed(send: impl FnOnce() -> Result<()>) -> Result<Sent> {
    let (took, began) = (Stopwatch::start(), cpu_time()?);
    send()?;
    Ok(Sent { took: took.elapsed(), cpu: cpu_time()?.saturating_sub(began) })
}

fn cpu_time() -> Result<Duration> {
    Ok(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).context("read the CPU time of the thread")?.into())
}

/// Returns the address of a link of this network namespace, with its index.
fn link_address(link: &str) -> Result<LinkAddr> {
    let mut addresses = getifaddrs().context("list the links")?.filter(|of| of.interface_name == link);
    let address = addresses.find_map(|of| of.address.and_then(|address| address.as_link_addr().copied()));
    address.with_context(|| format!("no link {link}"))
}

/// Returns the hardware address of a link of this network namespace.
pub fn hardware_address(link: &str) -> Result<[u8; 6]> {
    link_address(link)?.addr().with_context(|| format!("{link} has no hardware address"))
}
