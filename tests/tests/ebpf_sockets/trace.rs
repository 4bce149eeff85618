//! Trace events of single connections.

use std::{
    io,
    net::TcpStream,
    sync::{LazyLock, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use aya::maps::{HashMap, MapData};
use proxy_common::layout::{EndpointKey, EndpointValue};
use proxy_userspace::{
    dataplane::ebpf::{EbpfSettings, MapSizes, TracingPrograms},
    kernel::bpf::LogLevel,
    model::{Dirty, Protocol},
};
use shunt_tests::deadline::Deadline;

use crate::bench::{Bench, tcp_server, udp_socket};

/// The log of this process.
static LOG: LazyLock<Mutex<Vec<u8>>> = LazyLock::new(|| {
    let log = tracing_subscriber::fmt().with_ansi(false).with_max_level(tracing::Level::DEBUG);
    log.with_writer(|| Writer).init();
    Mutex::default()
});

struct Writer;

impl io::Write for Writer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        log().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn log() -> MutexGuard<'static, Vec<u8>> {
    LOG.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the log lines that contain all these words.
fn lines(words: &[String]) -> Vec<String> {
    let log = String::from_utf8_lossy(&log()).into_owned();
    log.lines().filter(|line| words.iter().all(|word| line.contains(&**word))).map(str::to_owned).collect()
}

fn wait_for(words: &[String]) {
    let found = || (!lines(words).is_empty()).then_some(());
    let found = Deadline::after(Duration::from_secs(30)).poll(found);
    assert!(found.is_some(), "no line has all of {words:?}:\n{}", String::from_utf8_lossy(&log()));
}

#[test]
fn programs_trace_only_if_asked_and_have_no_code_for_it_otherwise() {
    LazyLock::force(&LOG);
    let mut bench = Bench::new();
    let (_server, endpoint) = tcp_server("127.0.0.1:0");
    let untraced = bench.serve(Protocol::Tcp, "10.96.7.9:80", &[endpoint]);
    TcpStream::connect(untraced).expect("connect");
    bench.dataplane().load_link_programs().expect("load");
    let without = bench.programs();
    bench.settings.log = LogLevel::Debug;
    bench.restart();
    bench.sync(&Dirty::everything());
    connections_are_traced(&mut bench);
    refusals_are_traced(&mut bench);
    conversations_are_traced_once(&mut bench);
    errors_are_logged(&mut bench);
    assert_eq!(lines(&[format!("vip={untraced}")]), Vec::<String>::new());
    bench.dataplane().load_link_programs().expect("load");
    let with = bench.programs();
    for name in ["shunt_connect4", "shunt_sendmsg6", "shunt_in_eth"] {
        // Tracing takes more than 1,000 instructions. Without it, only the check remains.
        assert!(without[name] + 1_000 < with[name], "{name}: {} and {}", without[name], with[name]);
    }
}

/// All programs pass the verifier with the code that traces, and with the code that captures
/// packets.
#[test]
fn programs_that_trace_use_the_maps_of_those_that_do_not() {
    let mut bench = Bench::new();
    let (_server, endpoint) = tcp_server("127.0.0.1:0");
    let vip = bench.serve(Protocol::Tcp, "10.96.7.8:80", &[endpoint]);
    for packets in [false, true] {
        let (programs, mut records) = TracingPrograms::load(&bench.settings, packets).expect("loaded");
        TcpStream::connect(vip).expect("connect");
        assert_eq!(records.events(10), [], "they are not attached");
        assert_eq!(records.lost().expect("counts"), 0);
        drop(programs);
    }
    let other = EbpfSettings {
        map_sizes: MapSizes { services: bench.settings.map_sizes.services * 2, ..bench.settings.map_sizes },
        ..bench.settings.clone()
    };
    let error = TracingPrograms::load(&other, false).err().expect("the maps have another size");
    assert!(error.to_string().contains("use the maps of this shunt"), "{error}");
}

fn connections_are_traced(bench: &mut Bench) {
    let families = [("10.96.7.1:80", "127.0.0.1:0", '4'), ("[fd96::7:1]:80", "[::1]:0", '6')];
    for (service, local, version) in families {
        let (_server, endpoint) = tcp_server(local);
        let vip = bench.serve(Protocol::Tcp, service, &[endpoint]);
        TcpStream::connect(vip).expect("connect");
        wait_for(&[
            "DEBUG ebpf: ".into(),
            format!("program=\"shunt_connect{version}\" verdict=\"translated\" protocol=\"TCP\""),
            format!("vip={service} endpoint={endpoint} "),
        ]);
    }
}

fn refusals_are_traced(bench: &mut Bench) {
    let nowhere = bench.serve(Protocol::Tcp, "10.96.7.2:80", &[]);
    TcpStream::connect(nowhere).expect_err("it has no endpoints");
    let refused = "INFO ebpf: refused or dropped program=\"shunt_connect4\" verdict=\"refused\"";
    wait_for(&[refused.into(), nowhere.to_string()]);
}

fn conversations_are_traced_once(bench: &mut Bench) {
    let (_server, endpoint) = udp_socket("127.0.0.1:0");
    let vip = bench.serve(Protocol::Udp, "10.96.7.3:53", &[endpoint]);
    let (client, _) = udp_socket("127.0.0.1:0");
    for _ in 0..3 {
        client.send_to(b"?", vip).expect("send");
    }
    wait_for(&["program=\"shunt_sendmsg4\" verdict=\"translated\"".into(), format!("endpoint={endpoint}")]);
    assert_eq!(lines(&[format!("vip={vip}")]).len(), 1);
}

fn errors_are_logged(bench: &mut Bench) {
    let (_server, endpoint) = tcp_server("127.0.0.1:0");
    let vip = bench.serve(Protocol::Tcp, "10.96.7.4:80", &[endpoint]);
    let mut endpoints: HashMap<MapData, EndpointKey, EndpointValue> = bench.pinned("endpoints");
    let slots: Vec<EndpointKey> = endpoints.keys().map(|key| key.expect("read")).collect();
    for slot in &slots {
        endpoints.remove(slot).expect("removed");
    }
    TcpStream::connect(vip).expect_err("the slot is empty");
    wait_for(&["ERROR ebpf: ".into(), "program=\"shunt_connect4\" error=\"endpoint_missing\"".into()]);
}
