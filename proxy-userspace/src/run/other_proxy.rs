//! Finds out whether another proxy, such as kube-proxy, serves this node.

use std::{
    collections::BTreeMap,
    io::{self, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    thread,
    time::Duration,
};

use anyhow::Context as _;
use proxy_userspace::{
    config::Config,
    dataplane::{Mode, modes_with_rules},
    kernel::{KernelError, bpf::PinDir, command::Launcher},
};

/// How often to look for the other proxy.
const PAUSE: Duration = Duration::from_secs(1);
/// How many times: for ten minutes. The image of the other proxy may have to be pulled.
const ATTEMPTS: u32 = 600;
/// A log line every half minute.
const ATTEMPTS_PER_LOG: u32 = 30;
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// The largest page of metrics that is read.
const LARGEST_PAGE: u64 = 64 << 20;

/// The times of the last sync and of the last request for one, which kube-proxy and shunt count by
/// IP family. `/healthz` does not help: kube-proxy's answers 200 before the first sync.
const SYNCED: &str = "kubeproxy_sync_proxy_rules_last_timestamp_seconds";
const QUEUED: &str = "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds";

/// Waits until no shunt uses the pins and another proxy has written all its rules. Returns the
/// locked pins, or `None` at once if there are no pins.
pub(super) fn wait_until_it_serves(config: &Config) -> anyhow::Result<Option<PinDir>> {
    let address = config.metrics_bind_address.context(
        "metricsBindAddress is empty: set it to the address where the other proxy serves /metrics, which tells when it \
         has written its rules",
    )?;
    let mut was_synced = false;
    let mut why = String::new();
    for attempt in 0..ATTEMPTS {
        match PinDir::lock_existing(&config.ebpf.pin_dir) {
            Ok(None) => return Ok(None),
            Ok(Some(pins)) => match has_synced(address) {
                // The two IP families sync one after the other.
                Ok(()) if was_synced => return Ok(Some(pins)),
                Ok(()) => was_synced = true,
                Err(reason) => (was_synced, why) = (false, reason),
            },
            Err(KernelError::PinsInUse { .. }) => {
                (was_synced, why) = (false, "shunt still runs on this node".into());
            }
            Err(error) => return Err(error.into()),
        }
        if attempt % ATTEMPTS_PER_LOG == 0 && !was_synced {
            tracing::info!(%address, why, "waiting until another proxy serves this node");
        }
        thread::sleep(PAUSE);
    }
    anyhow::bail!(
        "no other proxy serves this node: {why}; nothing was removed; start the other proxy and run this again"
    )
}

/// Returns true if another proxy that has written its rules answers at the address of the metrics.
pub(super) fn serves(config: &Config) -> bool {
    config.metrics_bind_address.is_some_and(|address| has_synced(address).is_ok())
}

/// Checks that the proxy with these metrics has written the rules of all its IP families. The error
/// says what is missing.
fn has_synced(address: SocketAddr) -> Result<(), String> {
    let page = metrics(address).map_err(|error| format!("its /metrics do not answer: {error}"))?;
    if is_synced(&page) { Ok(()) } else { Err(format!("{SYNCED} says that it has not synced yet")) }
}

fn metrics(address: SocketAddr) -> io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&address, ANSWER_TIMEOUT)?;
    stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    stream.set_write_timeout(Some(ANSWER_TIMEOUT))?;
    // An answer to HTTP 1.0 ends with the connection and is not sent in chunks.
    write!(stream, "GET /metrics HTTP/1.0\r\nHost: {address}\r\nAccept: text/plain\r\n\r\n")?;
    let mut page = Vec::new();
    stream.take(LARGEST_PAGE).read_to_end(&mut page)?;
    Ok(String::from_utf8_lossy(&page).into_owned())
}

/// Returns true if each IP family that is to be synced has been synced.
fn is_synced(page: &str) -> bool {
    let (synced, queued) = (samples(page, SYNCED), samples(page, QUEUED));
    let is_done = |labels: &&str| synced.get(*labels).is_some_and(|time| *time > 0.0);
    synced.keys().any(is_done) && queued.keys().all(is_done)
}

/// Returns the values of a metric by the text of its labels.
fn samples<'a>(page: &'a str, name: &str) -> BTreeMap<&'a str, f64> {
    let values = page.lines().filter_map(|line| {
        let (labels, value) = line.strip_prefix(name)?.rsplit_once(' ')?;
        (labels.is_empty() || labels.starts_with('{')).then_some((labels, value.trim().parse().ok()?))
    });
    values.collect()
}

/// Returns the modes of kube-proxy whose rules are in the kernel.
pub(super) fn rules(launcher: &Launcher) -> Vec<&'static str> {
    modes_with_rules(launcher).into_iter().map(Mode::name).collect()
}

/// Returns true if an earlier process left programs in the pin directory.
pub(super) fn has_programs(config: &Config) -> bool {
    let pins = PinDir::existing(&config.ebpf.pin_dir).ok().flatten();
    pins.is_some_and(|pins| pins.link_names().is_ok_and(|names| !names.is_empty()))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn page(queued: &[(&str, f64)], synced: &[(&str, f64)]) -> String {
        let line = |name: &str, samples: &[(&str, f64)]| -> String {
            samples
                .iter()
                .fold(String::new(), |page, (labels, value)| page + &format!("{name}{labels} {value:e}\n"))
        };
        format!("# TYPE {SYNCED} gauge\n{}{}", line(QUEUED, queued), line(SYNCED, synced))
    }

    #[test]
    fn a_proxy_serves_when_each_queued_family_has_been_synced() {
        let (v4, v6) = ("{ip_family=\"IPv4\"}", "{ip_family=\"IPv6\"}");
        let now = 1.79e9;
        assert!(is_synced(&page(&[(v4, now), (v6, now)], &[(v4, now), (v6, now)])));
        assert!(is_synced(&page(&[("", now)], &[("", now)])), "before Kubernetes 1.33 without labels");
        for unsynced in [
            page(&[(v4, now), (v6, now)], &[(v4, now)]),
            page(&[(v4, now)], &[(v4, 0.0)]),
            page(&[], &[]),
            String::new(),
        ] {
            assert!(!is_synced(&unsynced), "{unsynced}");
        }
    }

    #[test]
    fn metrics_of_another_proxy_are_read_over_http() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let server = thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a client");
            let mut request = [0; 1024];
            let length = stream.read(&mut request).expect("a request");
            assert!(request[..length].starts_with(b"GET /metrics HTTP/1.0\r\n"));
            let body = page(&[("", 1.0)], &[("", 2.0)]);
            write!(stream, "HTTP/1.0 200 OK\r\n\r\n{body}").expect("an answer");
        });
        assert_eq!(has_synced(address), Ok(()));
        server.join().expect("a request was answered");
        let error = has_synced(address).expect_err("nobody listens");
        assert!(error.starts_with("its /metrics do not answer: "), "{error}");
    }
}
