//! Writes the annotation of this Node that says where the node takes packets of the tunnel for
//! direct server return, and which other addresses it has.

use std::time::Duration;

use percent_encoding::utf8_percent_encode;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::{sync::watch, time::timeout};
use tracing::{debug, info, warn};

use super::{
    Timing,
    backoff::Backoff,
    failure::{Failure, FailureClass},
    request::ESCAPED,
    response,
};
use crate::{model::DsrAnnouncement, watch::decode::DSR_ANNOTATION};

const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);
/// When the annotation is written again, if the Node is still not seen with it: somebody may have
/// removed it at the same moment.
const REPEAT: Duration = Duration::from_mins(5);

/// What this node announces. None if the Node has what it should have, or if nobody knows yet. If
/// there are no addresses, the annotation must be removed.
type Wanted = watch::Receiver<Option<DsrAnnouncement>>;

/// Writes the annotation whenever `wanted` has a value, until all senders are gone. The sender
/// compares them with the Node that is watched, and sends `None` if they are equal: so a node that
/// starts again asks for nothing, and an annotation that somebody changes is written again.
pub async fn announce_dsr(client: &kube::Client, node_name: &str, timing: Timing, mut wanted: Wanted) {
    let mut backoff = Backoff::new(timing);
    let mut report = Report::default();
    loop {
        let Some(announcement) = wanted.borrow_and_update().clone() else {
            match wanted.changed().await {
                Ok(()) => continue,
                Err(_) => return,
            }
        };
        let written = patch(client, node_name, &announcement).await;
        report.tried(&announcement, written.as_ref().err());
        if written.is_err() {
            if is_gone_within(backoff.pause(), &mut wanted).await {
                return;
            }
            continue;
        }
        backoff.reset();
        // Whoever else writes the annotation must not keep this node busy.
        if is_gone_within(timing.first_retry, &mut wanted).await {
            return;
        }
        let others = wanted.wait_for(|now| now.as_ref() != Some(&announcement));
        if matches!(timeout(REPEAT, others).await, Ok(Err(_))) {
            return;
        }
    }
}

/// Waits for a pause. Returns true at once if all senders are gone.
async fn is_gone_within(pause: Duration, wanted: &mut Wanted) -> bool {
    let gone = async { while wanted.changed().await.is_ok() {} };
    timeout(pause, gone).await.is_ok()
}

/// Writes the annotation. The server changes nothing if the Node has it already.
async fn patch(
    client: &kube::Client,
    node_name: &str,
    announcement: &DsrAnnouncement,
) -> Result<(), Failure> {
    /// The changed Node, whose content is not needed.
    #[derive(Deserialize)]
    struct Patched {}

    let path = format!("/api/v1/nodes/{}", utf8_percent_encode(node_name, ESCAPED));
    let request = http::Request::patch(path)
        .header(http::header::CONTENT_TYPE, "application/merge-patch+json")
        .body(body(announcement).to_string().into_bytes())
        .map_err(Failure::invalid)?;
    response::request(client, request, RESPONSE_TIMEOUT).await.map(|Patched {}| ())
}

/// Returns a patch that changes the annotation only.
fn body(announcement: &DsrAnnouncement) -> Value {
    let value = (!announcement.addresses.is_empty()).then(|| announcement.to_string());
    json!({ "metadata": { "annotations": { DSR_ANNOTATION: value } } })
}

/// Logs each failure once until the class of the failure changes.
#[derive(Default)]
struct Report {
    /// The class of the last failure, if no attempt succeeded since.
    failing: Option<FailureClass>,
}

impl Report {
    fn tried(&mut self, announcement: &DsrAnnouncement, failure: Option<&Failure>) {
        let Some(error) = failure else {
            self.failing = None;
            if announcement.addresses.is_empty() {
                info!("removed the annotation {DSR_ANNOTATION} of this Node");
            } else {
                info!(addresses = %announcement, "wrote the annotation {DSR_ANNOTATION} of this Node");
            }
            return;
        };
        if self.failing.replace(error.class) == Some(error.class) {
            debug!(%error, "cannot write the annotation {DSR_ANNOTATION} of this Node");
            return;
        }
        let hint = match error.class {
            FailureClass::Forbidden => "; the ServiceAccount of shunt needs the ClusterRole shunt-dsr",
            _ => "",
        };
        let consequence = if announcement.addresses.is_empty() {
            "this node takes no packets of the tunnel for direct server return, but others may send it some"
        } else {
            "other nodes send this node nothing through the tunnel for direct server return and drop what it sends, \
             so this node masquerades"
        };
        warn!(
            %error,
            "cannot write the annotation {DSR_ANNOTATION} of this Node: {consequence}{hint}; shunt tries again"
        );
    }
}

#[cfg(test)]
mod tests {
    use std::{
        convert::Infallible,
        sync::{Arc, Mutex, MutexGuard},
    };

    use http::{Method, Request, Response};
    use kube::client::Body;
    use tokio::{task::JoinHandle, time::Instant};

    use super::*;
    use crate::captured_log::CapturedLog;

    /// A server of one Node.
    #[derive(Clone, Default)]
    struct Server(Arc<Mutex<Exchange>>);

    #[derive(Default)]
    struct Exchange {
        /// The patches that came, with the time since the start.
        patches: Vec<(Duration, Value)>,
        /// The statuses of the next answers.
        refusals: Vec<u16>,
    }

    impl Server {
        /// Starts a server that refuses the first patches with these statuses, and an announcer.
        fn start(refusals: &[u16]) -> (Self, watch::Sender<Option<DsrAnnouncement>>, JoinHandle<()>) {
            let server = Self::default();
            server.exchange().refusals = refusals.to_vec();
            let (answering, start) = (server.clone(), Instant::now());
            let service = tower::service_fn(move |request: Request<Body>| {
                let server = answering.clone();
                async move { Ok::<_, Infallible>(server.answer(request, start.elapsed()).await) }
            });
            let client = kube::Client::new(service, "default");
            let (wanted, receiver) = watch::channel(None);
            let announcing = async move { announce_dsr(&client, "n1", Timing::default(), receiver).await };
            (server, wanted, tokio::spawn(announcing))
        }

        async fn answer(self, request: Request<Body>, now: Duration) -> Response<Body> {
            assert_eq!((request.method(), request.uri().path()), (&Method::PATCH, "/api/v1/nodes/n1"));
            assert_eq!(request.headers()["content-type"], "application/merge-patch+json");
            let body = request.into_body().collect_bytes().await.expect("a body");
            let Exchange { patches, refusals } = &mut *self.exchange();
            patches.push((now, serde_json::from_slice(&body).expect("JSON")));
            let code = if refusals.is_empty() { 200 } else { refusals.remove(0) };
            let body = json!({"kind": "Status", "code": code, "message": "no", "reason": "Refused"});
            let answer = Response::builder().status(code).body(Body::from(body.to_string().into_bytes()));
            answer.expect("a response")
        }

        fn exchange(&self) -> MutexGuard<'_, Exchange> {
            self.0.lock().expect("no panic")
        }

        /// Returns the values that were written so far.
        fn values(&self) -> Vec<Value> {
            let patches = &self.exchange().patches;
            patches.iter().map(|(_, body)| body["metadata"]["annotations"]["shunt.dev/dsr"].clone()).collect()
        }
    }

    fn addresses(texts: &[&str]) -> DsrAnnouncement {
        let addresses = texts.iter().map(|text| text.parse().expect("an address")).collect();
        DsrAnnouncement { addresses, ..DsrAnnouncement::default() }
    }

    #[test]
    fn the_patch_changes_the_annotation_only() {
        let both = addresses(&["192.0.2.11:4790", "[2001:db8::11]:4790"]);
        let expected = "192.0.2.11:4790,[2001:db8::11]:4790";
        assert_eq!(body(&both), json!({"metadata": {"annotations": {"shunt.dev/dsr": expected}}}));
        let others = ["fd57::11", "10.0.0.11"].map(|text| text.parse().expect("an address")).into();
        let expected = format!("{expected},10.0.0.11,fd57::11");
        let with_others = DsrAnnouncement { others, ..both };
        assert_eq!(body(&with_others), json!({"metadata": {"annotations": {"shunt.dev/dsr": expected}}}));
        assert_eq!(body(&addresses(&[])), json!({"metadata": {"annotations": {"shunt.dev/dsr": null}}}));
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_written_until_addresses_are_wanted_or_after_the_sender_is_gone() {
        let (server, wanted, announcing) = Server::start(&[]);
        tokio::time::sleep(2 * REPEAT).await;
        assert_eq!(server.values(), Vec::<Value>::new());
        drop(wanted);
        announcing.await.expect("no panic");
        let (server, wanted, announcing) = Server::start(&[500; 100]);
        wanted.send_replace(Some(addresses(&["192.0.2.11:4790"])));
        tokio::time::sleep(Duration::from_secs(1)).await;
        drop(wanted);
        let start = Instant::now();
        announcing.await.expect("no panic");
        assert!(start.elapsed().is_zero() && !server.values().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn changes_are_written_and_a_node_that_is_seen_with_them_ends_the_writing() {
        let (server, wanted, _announcing) = Server::start(&[]);
        for texts in [&["192.0.2.11:4790"][..], &["192.0.2.11:4791"], &[], &["192.0.2.11:4791"]] {
            wanted.send_replace(Some(addresses(texts)));
            tokio::time::sleep(Duration::from_secs(2)).await;
        }
        let written =
            [json!("192.0.2.11:4790"), json!("192.0.2.11:4791"), Value::Null, json!("192.0.2.11:4791")];
        assert_eq!(server.values(), written);
        wanted.send_replace(None);
        tokio::time::sleep(2 * REPEAT).await;
        assert_eq!(server.values().len(), 4);
        // Somebody removes the annotation, again and again.
        for _ in 0..1000 {
            wanted.send_replace(Some(addresses(&["192.0.2.11:4791"])));
            tokio::time::sleep(Duration::from_millis(5)).await;
            wanted.send_replace(None);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert!((5..25).contains(&server.values().len()), "{}", server.values().len());
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_that_is_not_seen_with_the_annotation_gets_it_again() {
        let (server, wanted, _announcing) = Server::start(&[]);
        wanted.send_replace(Some(addresses(&["192.0.2.11:4790"])));
        tokio::time::sleep(REPEAT + REPEAT / 2).await;
        assert_eq!(server.values().len(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_refused_patch_is_repeated_with_growing_pauses_and_each_failure_is_logged_once() {
        let log = CapturedLog::start();
        let (server, wanted, announcing) = Server::start(&[403, 403, 403, 500, 500, 403]);
        wanted.send_replace(Some(addresses(&["192.0.2.11:4790"])));
        tokio::time::sleep(Duration::from_mins(3)).await;
        announcing.abort();
        let _cancelled = announcing.await;
        let times: Vec<Duration> = server.exchange().patches.iter().map(|(at, _)| *at).collect();
        assert_eq!(times.len(), 7, "{times:?}");
        let pauses: Vec<Duration> = times.windows(2).map(|pair| pair[1].saturating_sub(pair[0])).collect();
        let least = [800, 1600, 3200, 6400, 12800, 25600].map(Duration::from_millis);
        assert!(pauses.iter().zip(least).all(|(pause, least)| *pause >= least), "{pauses:?}");
        let text = log.end();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 4, "{text}");
        for (line, part) in
            lines.iter().zip(["needs the ClusterRole shunt-dsr", "(500)", "(403)", "wrote the"])
        {
            assert!(line.contains(part), "{line}");
        }
    }
}
