//! Runs the servers and the load in an agent, all on one CPU and one after the other: an operation
//! ends before the next begins.
//!
//! The CPU of the sender processes the packets of a veth pair. This CPU therefore does all the work
//! of an operation, and operations a second are the inverse of the CPU time of one operation.

use std::{
    fs,
    io::{self, Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result};
use nix::{
    sched::{CpuSet, sched_getaffinity, sched_setaffinity},
    sys::socket::{setsockopt, sockopt},
    unistd::{Pid, setsid},
};
use rustix::process::setpriority_process;

use super::protocol::{BenchResponse, Comparison, Workload};
use crate::deadline::Stopwatch;

/// The timeout of the first operation on a target.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
const HIGHEST_PRIORITY: i32 = -20;
/// The bytes that a client of [`Workload::Bulk`] sends in one operation.
static BULK: [u8; 4 << 20] = [0; 4 << 20];
/// The buffer of a server for datagrams. With the default, a burst of new flows overflows it, and
/// flows without an answer are not assured.
const RECEIVE_BUFFER: usize = 16 << 20;
/// The bytes that its server reads at once.
const BULK_READ: usize = 1 << 18;

/// Pins the calling thread, and all threads that it starts later, to the last CPU that it may run
/// on, with the highest priority.
pub(super) fn pin_to_last_cpu() -> Result<()> {
    let allowed = sched_getaffinity(Pid::from_raw(0)).context("ask for this thread's CPUs")?;
    let last = (0..CpuSet::count()).rev().find(|cpu| allowed.is_set(*cpu).unwrap_or(false));
    let mut one = CpuSet::new();
    one.set(last.context("no CPU to run on")?).context("choose a CPU")?;
    sched_setaffinity(Pid::from_raw(0), &one).context("move to one CPU")?;
    raise_priority();
    Ok(())
}

/// Gives the calling thread, and all threads that it starts later, the highest priority. Otherwise
/// other processes would disturb the measurement and widen the spread.
pub(super) fn raise_priority() {
    // If the scheduler groups by session, priority counts only in a session of its own. The process
    // may have one already.
    let _session = setsid();
    let _group = fs::write("/proc/self/autogroup", HIGHEST_PRIORITY.to_string());
    let _nice = setpriority_process(None, HIGHEST_PRIORITY);
}

/// Serves the ports, each on its own thread.
pub(super) fn serve(ports: &[(Workload, u16)]) -> Result<()> {
    pin_to_last_cpu()?;
    for (workload, port) in ports {
        let address = SocketAddr::from((Ipv4Addr::UNSPECIFIED, *port));
        match workload {
            Workload::ConnectRequestClose => listen(address, |stream| answer_once(&stream))?,
            Workload::RequestResponse => listen(address, |stream| answer_all(&stream))?,
            Workload::Bulk => listen(address, |stream| take_all(&stream))?,
            Workload::UdpRequestResponse => {
                let socket = UdpSocket::bind(address).with_context(|| format!("bind UDP {address}"))?;
                setsockopt(&socket, sockopt::RcvBufForce, &RECEIVE_BUFFER).context("set its buffer")?;
                thread::spawn(move || {
                    loop {
                        // An error concerns one datagram only.
                        let _sent = answer_datagram(&socket);
                    }
                });
            }
        }
    }
    Ok(())
}

fn listen(address: SocketAddr, serve: fn(TcpStream) -> io::Result<()>) -> Result<()> {
    let listener = TcpListener::bind(address).with_context(|| format!("listen on TCP {address}"))?;
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            // The client reports a broken connection.
            let _ended = serve(stream);
        }
    });
    Ok(())
}

fn answer_once(mut stream: &TcpStream) -> io::Result<()> {
    let mut byte = [0];
    stream.read_exact(&mut byte)?;
    stream.write_all(&byte)
}

fn answer_all(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    loop {
        answer_once(stream)?;
    }
}

fn take_all(mut stream: &TcpStream) -> io::Result<()> {
    let mut bytes = vec![0; BULK_READ];
    loop {
        for _ in 0..BULK.len() / BULK_READ {
            stream.read_exact(&mut bytes)?;
        }
        stream.write_all(&[0])?;
    }
}

fn answer_datagram(socket: &UdpSocket) -> io::Result<usize> {
    let mut byte = [0];
    let (_, client) = socket.recv_from(&mut byte)?;
    socket.send_to(&byte, client)
}

/// Puts load on the targets in turn.
pub(super) fn compare(compare: &Comparison) -> Result<BenchResponse> {
    pin_to_last_cpu()?;
    let Comparison { workload, targets, rounds, turn } = compare;
    for (target, addresses) in targets.iter().enumerate() {
        for address in addresses {
            if let Err(error) = run_once(*workload, *address) {
                return Ok(BenchResponse::NotServed { target, why: format!("{address}: {error}") });
            }
        }
    }
    let mut rates = vec![vec![0.0; targets.len()]; *rounds];
    for (round, rates) in rates.iter_mut().enumerate() {
        for step in 0..targets.len() {
            let target = (round + step) % targets.len();
            let rate = run_turn(*workload, &targets[target], round, *turn);
            rates[target] = rate.with_context(|| format!("{} to {:?}", workload.name(), targets[target]))?;
        }
    }
    Ok(BenchResponse::Rates(rates))
}

/// Runs one operation with a timeout.
fn run_once(workload: Workload, address: SocketAddr) -> io::Result<()> {
    match workload {
        Workload::UdpRequestResponse => exchange_udp(&udp_socket()?, address),
        Workload::ConnectRequestClose | Workload::RequestResponse | Workload::Bulk => {
            let stream = TcpStream::connect_timeout(&address, ANSWER_TIMEOUT)?;
            stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
            exchange_tcp(&stream, question(workload))
        }
    }
}

/// Returns operations a second.
fn run_turn(workload: Workload, addresses: &[SocketAddr], round: usize, turn: Duration) -> io::Result<f64> {
    // A long-lived connection goes to another endpoint in each round.
    let address = addresses[round % addresses.len()];
    match workload {
        Workload::ConnectRequestClose => {
            // The address is random, as with a Service: using the same server twice in a row would
            // be slightly faster.
            count(turn, || {
                fastrand::choice(addresses).map_or(Ok(()), |address| connect_request_close(*address))
            })
        }
        Workload::RequestResponse | Workload::Bulk => {
            let stream = TcpStream::connect(address)?;
            stream.set_nodelay(true)?;
            count(turn, || exchange_tcp(&stream, question(workload)))
        }
        Workload::UdpRequestResponse => {
            let socket = own_udp_socket(address)?;
            count(turn, || exchange_udp(&socket, address))
        }
    }
}

fn count(turn: Duration, mut operation: impl FnMut() -> io::Result<()>) -> io::Result<f64> {
    // The first operation of a turn finds the caches as the other target left them, so it is not
    // counted.
    operation()?;
    let began = Stopwatch::start();
    let mut operations = 0_u32;
    loop {
        operation()?;
        operations += 1;
        let took = began.elapsed();
        if took >= turn {
            return Ok(f64::from(operations) / took.as_secs_f64());
        }
    }
}

fn connect_request_close(address: SocketAddr) -> io::Result<()> {
    let stream = TcpStream::connect(address)?;
    exchange_tcp(&stream, question(Workload::ConnectRequestClose))?;
    // The server closes first, so that no port of the client is in `TIME_WAIT`.
    match (&stream).read(&mut [0])? {
        0 => Ok(()),
        _ => Err(io::Error::other("more than one byte came back")),
    }
}

/// Returns what the client of a TCP workload sends before it gets one byte.
fn question(workload: Workload) -> &'static [u8] {
    if workload == Workload::Bulk { &BULK } else { b"q" }
}

fn exchange_tcp(mut stream: &TcpStream, question: &[u8]) -> io::Result<()> {
    stream.write_all(question)?;
    stream.read_exact(&mut [0])
}

fn udp_socket() -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    socket.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    Ok(socket)
}

/// Returns a socket whose port had no conversation with the endpoint through a Service shortly
/// before. Answers of that conversation and of a direct one could not be told apart.
fn own_udp_socket(address: SocketAddr) -> io::Result<UdpSocket> {
    const SOCKETS: usize = 10;
    let mut last = io::Error::other("no socket was tried");
    for _ in 0..SOCKETS {
        let socket = udp_socket()?;
        match exchange_udp(&socket, address) {
            Ok(()) => return Ok(socket),
            Err(error) if error.kind() == io::ErrorKind::Other => last = error,
            Err(error) => return Err(error),
        }
    }
    Err(last)
}

fn exchange_udp(socket: &UdpSocket, address: SocketAddr) -> io::Result<()> {
    socket.send_to(b"q", address)?;
    let (_, from) = socket.recv_from(&mut [0])?;
    if from == address { Ok(()) } else { Err(io::Error::other(format!("{from} answered"))) }
}
