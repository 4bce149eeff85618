//! Servers and load in an agent, all on one CPU and at one time: one operation ends before the next begins.
//!
//! The packets of a veth pair are worked on by the CPU of the sender, so that this CPU does all there is to do for an
//! operation, and operations a second are the CPU time of one, upside down.

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
    unistd::{Pid, setsid},
};
use rustix::process::setpriority_process;

use super::protocol::{BenchResponse, Comparison, Workload};
use crate::deadline::Stopwatch;

/// How long the first operation of a target may take.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
const FIRST: i32 = -20;

/// Moves the calling thread, and all it starts from now on, to the last CPU it may run on, before everything else there.
fn take_cpu() -> Result<()> {
    let allowed = sched_getaffinity(Pid::from_raw(0)).context("ask for this thread's CPUs")?;
    let last = (0..CpuSet::count()).rev().find(|cpu| allowed.is_set(*cpu).unwrap_or(false));
    let mut one = CpuSet::new();
    one.set(last.context("no CPU to run on")?).context("choose a CPU")?;
    sched_setaffinity(Pid::from_raw(0), &one).context("move to one CPU")?;
    go_first();
    Ok(())
}

/// Puts the calling thread, and all it starts from now on, before what else wants to run. That keeps others from
/// disturbing; without it the spread is wider.
pub(super) fn go_first() {
    // Where the scheduler groups by session, priority counts in a session of its own, which this process may have already.
    let _session = setsid();
    let _group = fs::write("/proc/self/autogroup", FIRST.to_string());
    let _nice = setpriority_process(None, FIRST);
}

/// Answers on ports, each from a thread of its own.
pub(super) fn serve(ports: &[(Workload, u16)]) -> Result<()> {
    take_cpu()?;
    for (workload, port) in ports {
        let address = SocketAddr::from((Ipv4Addr::UNSPECIFIED, *port));
        match workload {
            Workload::ConnectRequestClose => listen(address, |stream| answer_once(&stream))?,
            Workload::RequestResponse => listen(address, |stream| answer_all(&stream))?,
            Workload::UdpRequestResponse => {
                let socket = UdpSocket::bind(address).with_context(|| format!("bind UDP {address}"))?;
                thread::spawn(move || {
                    loop {
                        // An error is about one datagram.
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
            // A connection that breaks is the client's to report.
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

fn answer_datagram(socket: &UdpSocket) -> io::Result<usize> {
    let mut byte = [0];
    let (_, client) = socket.recv_from(&mut byte)?;
    socket.send_to(&byte, client)
}

/// Puts load on the targets, turn by turn.
pub(super) fn compare(compare: &Comparison) -> Result<BenchResponse> {
    take_cpu()?;
    let Comparison { workload, targets, rounds, turn } = compare;
    for (target, addresses) in targets.iter().enumerate() {
        for address in addresses {
            if let Err(error) = try_once(*workload, *address) {
                return Ok(BenchResponse::NotServed { target, why: format!("{address}: {error}") });
            }
        }
    }
    let mut rates = vec![vec![0.0; targets.len()]; *rounds];
    for (round, rates) in rates.iter_mut().enumerate() {
        for step in 0..targets.len() {
            let target = (round + step) % targets.len();
            let rate = one_turn(*workload, &targets[target], round, *turn);
            rates[target] = rate.with_context(|| format!("{} to {:?}", workload.name(), targets[target]))?;
        }
    }
    Ok(BenchResponse::Rates(rates))
}

/// One operation, with a limit to the time it takes.
fn try_once(workload: Workload, address: SocketAddr) -> io::Result<()> {
    match workload {
        Workload::UdpRequestResponse => ask_udp(&udp_socket()?, address),
        Workload::ConnectRequestClose | Workload::RequestResponse => {
            let stream = TcpStream::connect_timeout(&address, ANSWER_TIMEOUT)?;
            stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
            ask(&stream)
        }
    }
}

/// Operations a second.
fn one_turn(workload: Workload, addresses: &[SocketAddr], round: usize, turn: Duration) -> io::Result<f64> {
    // A connection that stays goes to another endpoint each round.
    let address = addresses[round % addresses.len()];
    match workload {
        Workload::ConnectRequestClose => {
            // By chance, as Services choose: a server that was the last one too is a little quicker.
            count(turn, || {
                fastrand::choice(addresses).map_or(Ok(()), |address| connect_request_close(*address))
            })
        }
        Workload::RequestResponse => {
            let stream = TcpStream::connect(address)?;
            stream.set_nodelay(true)?;
            count(turn, || ask(&stream))
        }
        Workload::UdpRequestResponse => {
            let socket = udp_socket()?;
            count(turn, || ask_udp(&socket, address))
        }
    }
}

fn count(turn: Duration, mut operation: impl FnMut() -> io::Result<()>) -> io::Result<f64> {
    // The first one of a turn finds caches as the other target left them.
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
    ask(&stream)?;
    // The server closes first, so that no port of the client waits in `TIME_WAIT`.
    match (&stream).read(&mut [0])? {
        0 => Ok(()),
        _ => Err(io::Error::other("more than one byte came back")),
    }
}

fn ask(mut stream: &TcpStream) -> io::Result<()> {
    stream.write_all(b"q")?;
    stream.read_exact(&mut [0])
}

fn udp_socket() -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    socket.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    Ok(socket)
}

fn ask_udp(socket: &UdpSocket, address: SocketAddr) -> io::Result<()> {
    socket.send_to(b"q", address)?;
    let (_, from) = socket.recv_from(&mut [0])?;
    if from == address { Ok(()) } else { Err(io::Error::other(format!("{from} answered"))) }
}
