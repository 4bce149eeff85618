//! Tests the limits with real connections on loopback. Limits that a test is not about are so long
//! that the test fails before they end.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
};

use axum::routing::get;
use bytes::Bytes;
use futures::stream;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    sync::Semaphore,
};

use super::*;

const TEST_LIMIT: Duration = Duration::from_mins(1);
const NEVER: Duration = Duration::from_hours(24);
const NO_LIMITS: Limits = Limits { connections: 1000, header: NEVER, idle: NEVER, read: NEVER, total: NEVER };
const SOON: Duration = Duration::from_millis(20);
const HALF_A_HEADER: &str = "GET /ok HTTP/1.1\r\nHost: n1\r\n";
const END_OF_HEADER: &str = "\r\n";

async fn listener() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a free port");
    let address = listener.local_addr().expect("a bound address");
    (listener, address)
}

fn routes() -> Router {
    Router::new().route("/ok", get(|| async { "served" }))
}

async fn start(limits: Limits) -> SocketAddr {
    let (listener, address) = listener().await;
    tokio::spawn(run(listener, routes(), limits));
    address
}

async fn connect(address: SocketAddr) -> TcpStream {
    TcpStream::connect(address).await.expect("the kernel accepts")
}

async fn send(stream: &mut TcpStream, text: &str) {
    stream.write_all(text.as_bytes()).await.expect("sent");
}

/// Reads until the text arrives.
async fn receive(stream: &mut TcpStream, expected: &str) {
    let mut received = Vec::new();
    while !String::from_utf8_lossy(&received).contains(expected) {
        let read = timeout(TEST_LIMIT, stream.read_buf(&mut received)).await.expect("an answer in time");
        assert_ne!(read.expect("readable"), 0, "closed after {:?}", String::from_utf8_lossy(&received));
    }
}

/// Sends a request on a connection, which stays open, and reads its answer.
async fn ask(stream: &mut TcpStream) {
    send(stream, HALF_A_HEADER).await;
    send(stream, END_OF_HEADER).await;
    receive(stream, "served").await;
}

/// Returns a connection on which a request was answered. The server may close it before, if the
/// machine stands still.
async fn asked(address: SocketAddr) -> TcpStream {
    for _ in 0..100 {
        let mut stream = connect(address).await;
        let _ = stream.write_all([HALF_A_HEADER, END_OF_HEADER].concat().as_bytes()).await;
        let mut first = [0; 12];
        let read = timeout(TEST_LIMIT, stream.read_exact(&mut first)).await.expect("an answer in time");
        if read.is_ok() {
            assert_eq!(&first, b"HTTP/1.1 200");
            return stream;
        }
    }
    panic!("each connection is closed before its first answer");
}

/// Waits until the server has closed the connection.
async fn closed(stream: &mut TcpStream) {
    let mut received = Vec::new();
    let read = timeout(TEST_LIMIT, stream.read_to_end(&mut received)).await.expect("closed in time");
    // The kernel resets connections that are closed with unread bytes.
    assert!(read.is_ok() || read.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionReset));
}

#[tokio::test]
async fn a_probe_is_answered_while_all_places_are_held() {
    const PLACES: usize = 4;
    let limits = Limits { connections: PLACES, ..NO_LIMITS };
    let (address, other) = (start(limits).await, start(limits).await);
    let mut on_other = connect(other).await;
    let mut held = Vec::new();
    for number in 0..3 * PLACES {
        let mut stream = connect(address).await;
        if number % 2 == 0 {
            send(&mut stream, HALF_A_HEADER).await;
        }
        held.push(stream);
    }
    let mut probe = connect(address).await;
    ask(&mut probe).await;
    let evicted = held.len() + 1 - PLACES;
    for stream in &mut held[..evicted] {
        closed(stream).await;
    }
    for (number, stream) in held.iter_mut().enumerate().skip(evicted) {
        let rest =
            if number % 2 == 0 { END_OF_HEADER.into() } else { HALF_A_HEADER.to_owned() + END_OF_HEADER };
        send(stream, &rest).await;
        receive(stream, "served").await;
    }
    ask(&mut on_other).await;
}

#[tokio::test]
async fn a_request_that_is_being_answered_keeps_its_place() {
    let (started, may_answer) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
    let (starting, permission) = (Arc::clone(&started), Arc::clone(&may_answer));
    let slow = move || async move {
        starting.add_permits(1);
        let _permit = permission.acquire().await.expect("never closed");
        "slow answer"
    };
    let (listener, address) = listener().await;
    let limits = Limits { connections: 2, ..NO_LIMITS };
    tokio::spawn(run(listener, routes().route("/slow", get(slow)), limits));
    let mut scraper = connect(address).await;
    send(&mut scraper, "GET /slow HTTP/1.1\r\nHost: n1\r\n\r\n").await;
    let _started = timeout(TEST_LIMIT, started.acquire()).await.expect("the request arrives");
    let mut held = Vec::new();
    for _ in 0..10 {
        let mut stream = connect(address).await;
        // Connections are accepted in order, so that the server has seen all before.
        ask(&mut stream).await;
        held.push(stream);
    }
    may_answer.add_permits(1);
    receive(&mut scraper, "slow answer").await;
}

#[tokio::test]
async fn a_connection_with_a_slow_first_header_is_closed() {
    let address = start(Limits { header: SOON, ..NO_LIMITS }).await;
    let (mut silent, mut slow) = (connect(address).await, connect(address).await);
    send(&mut slow, HALF_A_HEADER).await;
    closed(&mut silent).await;
    closed(&mut slow).await;
}

#[tokio::test]
async fn a_connection_without_a_further_request_is_closed() {
    let address = start(Limits { idle: SOON, ..NO_LIMITS }).await;
    let (mut idle, mut slow) = (asked(address).await, asked(address).await);
    // The server may have closed it already.
    let _ = slow.write_all(HALF_A_HEADER.as_bytes()).await;
    closed(&mut idle).await;
    closed(&mut slow).await;
}

#[tokio::test]
async fn a_connection_is_closed_after_its_total_time() {
    let address = start(Limits { total: SOON, ..NO_LIMITS }).await;
    closed(&mut connect(address).await).await;
}

#[tokio::test]
async fn a_connection_whose_client_does_not_read_is_closed() {
    let (listener, address) = listener().await;
    let closed = CancellationToken::new();
    let on_drop = closed.clone();
    // More than the buffers of the kernel take. The body is dropped with the connection.
    let endless = move || {
        let on_drop = on_drop.clone().drop_guard();
        let parts = stream::repeat_with(move || {
            let _held = &on_drop;
            Ok::<_, io::Error>(Bytes::from_static(&[b'x'; 1 << 12]))
        });
        future::ready(Body::from_stream(parts))
    };
    let service = Router::new().route("/ok", get(endless));
    tokio::spawn(run(listener, service, Limits { read: SOON, ..NO_LIMITS }));
    let mut stream = connect(address).await;
    send(&mut stream, HALF_A_HEADER).await;
    send(&mut stream, END_OF_HEADER).await;
    timeout(TEST_LIMIT, closed.cancelled()).await.expect("closed in time");
}

#[tokio::test]
async fn open_connections_end_with_the_server() {
    let (listener, address) = listener().await;
    let server = tokio::spawn(run(listener, routes(), NO_LIMITS));
    let mut stream = connect(address).await;
    ask(&mut stream).await;
    server.abort();
    closed(&mut stream).await;
    let refused = TcpStream::connect(address).await.map(drop);
    assert_eq!(refused.map_err(|error| error.kind()), Err(io::ErrorKind::ConnectionRefused));
}

/// A listener that fails before it accepts.
struct Failing {
    errors: Vec<i32>,
    listener: TcpListener,
}

impl Accept for Failing {
    type Stream = TcpStream;

    async fn accept(&mut self) -> io::Result<TcpStream> {
        match self.errors.pop() {
            Some(error) => Err(io::Error::from_raw_os_error(error)),
            None => Accept::accept(&mut self.listener).await,
        }
    }
}

#[tokio::test]
async fn the_server_continues_after_accept_fails() {
    let (listener, address) = listener().await;
    let errors = vec![libc::EMFILE, libc::ECONNABORTED, libc::ENFILE, libc::ENOBUFS, libc::EHOSTUNREACH];
    tokio::spawn(run(Failing { errors, listener }, routes(), NO_LIMITS));
    ask(&mut connect(address).await).await;
}

#[tokio::test]
async fn a_missing_descriptor_closes_the_oldest_connection() {
    let places = Places::new(2);
    let (older, newer) = (places.take().await, places.take().await);
    older.set_serving(true);
    older.set_serving(false);
    places.evict_one();
    timeout(TEST_LIMIT, newer.evicted()).await.expect("it waits longer for its client");
    places.evict_one();
    timeout(TEST_LIMIT, older.evicted()).await.expect("an evicted connection does not count again");
}
