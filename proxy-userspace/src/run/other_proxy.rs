//! Finds out whether another proxy, such as kube-proxy, serves this node.

use std::{collections::BTreeMap, net::SocketAddr, thread, time::Duration};

use anyhow::Context as _;
use http::{
    Request, StatusCode,
    header::{ACCEPT, HOST},
};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::{body::Bytes, client::conn::http1};
use hyper_util::rt::TokioIo;
use proxy_userspace::{
    config::Config,
    dataplane::{Mode, modes_with_rules},
    kernel::{KernelError, bpf::PinDir, command::Launcher},
};
use tokio::{net::TcpStream, runtime, time::timeout};

/// How often to look for the other proxy.
pub(super) const PAUSE: Duration = Duration::from_secs(1);
/// How many times: for ten minutes. The image of the other proxy may have to be pulled.
pub(super) const ATTEMPTS: u32 = 600;
/// A log line every half minute.
pub(super) const ATTEMPTS_PER_LOG: u32 = 30;
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// The largest page of metrics that is read, in bytes.
const LARGEST_PAGE: usize = 64 << 20;

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
    let page = metrics(address).map_err(|error| format!("its /metrics do not answer: {error:#}"))?;
    if is_synced(&page) { Ok(()) } else { Err(format!("{SYNCED} says that it has not synced yet")) }
}

/// Reads the page with the metrics, on a runtime of its own: only one-shot commands ask.
fn metrics(address: SocketAddr) -> anyhow::Result<String> {
    let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
    let page = runtime.block_on(async { timeout(ANSWER_TIMEOUT, request_metrics(address)).await });
    page.with_context(|| format!("no answer within {} s", ANSWER_TIMEOUT.as_secs()))?
}

async fn request_metrics(address: SocketAddr) -> anyhow::Result<String> {
    let stream = TcpStream::connect(address).await?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    let request = Request::get("/metrics")
        .header(HOST, address.to_string())
        .header(ACCEPT, "text/plain")
        .body(Empty::<Bytes>::new())?;
    let response = sender.send_request(request).await?;
    anyhow::ensure!(response.status() == StatusCode::OK, "the status is {}", response.status());
    let page = Limited::new(response.into_body(), LARGEST_PAGE).collect().await;
    let page = page.map_err(anyhow::Error::from_boxed)?;
    Ok(String::from_utf8_lossy(&page.to_bytes()).into_owned())
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
    use std::{
        io::{BufRead as _, BufReader, Write as _},
        net::TcpListener,
    };

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

    /// Answers one request with this text. Returns the address and the request's first line.
    fn serve_once(response: String) -> (SocketAddr, thread::JoinHandle<String>) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let server = thread::spawn(move || {
            let (stream, _) = listener.accept().expect("a client");
            let mut lines = BufReader::new(&stream).lines().map(|line| line.expect("a request"));
            let first = lines.next().expect("a request");
            lines.find(String::is_empty).expect("the end of a request");
            (&stream).write_all(response.as_bytes()).expect("an answer");
            first
        });
        (address, server)
    }

    #[test]
    fn metrics_of_another_proxy_are_read_over_http() {
        let body = page(&[("", 1.0)], &[("", 2.0)]);
        let (address, server) = serve_once(format!("HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{body}"));
        assert_eq!(has_synced(address), Ok(()));
        assert_eq!(server.join().expect("a request was answered"), "GET /metrics HTTP/1.1");
        let error = has_synced(address).expect_err("nobody listens");
        assert!(error.starts_with("its /metrics do not answer: Connection refused"), "{error}");
    }

    #[test]
    fn answer_that_is_no_metrics_names_its_status() {
        let (address, _server) = serve_once("HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n".to_owned());
        let error = has_synced(address).expect_err("no metrics");
        assert_eq!(error, "its /metrics do not answer: the status is 404 Not Found");
    }
}
