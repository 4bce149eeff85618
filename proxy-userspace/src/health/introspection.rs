//! Serves what the metrics server shows about the proxy itself: its settings, flags, status, log
//! level and profiles.

use std::{collections::BTreeMap, fmt, sync::Arc, time::Duration};

use axum::{
    Json, Router,
    extract::Query,
    http::{HeaderMap, HeaderName, Method, StatusCode, header},
    response::{Html, IntoResponse, Response},
    routing::{any, get},
};
use serde::Deserialize;
use serde_json::json;
use tokio::{sync::watch, task::spawn_blocking, time::sleep};

use super::{ProxyHealth, Status, flagz, routes::NO_SNIFF, statusz};
use crate::kernel::{KernelError, cpu_profile::Recording, own_process};

/// What the metrics server reports about the proxy itself.
#[derive(Clone, Debug)]
pub struct Introspection {
    /// What shunt does on this node, for `/statusz`.
    pub status: Status,
    /// Health, for `/statusz`.
    pub health: ProxyHealth,
    /// The effective configuration, for `/configz`.
    pub config: watch::Receiver<serde_json::Value>,
    /// The command line flags with their values, for `/flagz`. `None` if the feature gate
    /// `ComponentFlagz` is off.
    pub flags: Option<BTreeMap<&'static str, String>>,
    /// Enables `/statusz`: the feature gate `ComponentStatusz`.
    pub statusz: bool,
    /// The server also has `/ui/`, so `/statusz` names it: `shunt.ui`.
    pub ui: bool,
    /// Enables `/debug/pprof/` and `/debug/flags/`. `None` if `enableProfiling` is false.
    pub debugging: Option<Debugging>,
}

/// What `enableProfiling` allows.
#[derive(Clone)]
pub struct Debugging {
    /// Sets the verbosity of the log.
    pub set_verbosity: Arc<dyn Fn(u32) + Send + Sync>,
}

impl fmt::Debug for Debugging {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Debugging")
    }
}

const BINARY: (HeaderName, &str) = (header::CONTENT_TYPE, "application/octet-stream");
const AS_FILE: (HeaderName, &str) = (header::CONTENT_DISPOSITION, "attachment; filename=\"profile\"");
/// The key of upstream's configuration in `/configz`.
const CONFIG_NAME: &str = "kubeproxy.config.k8s.io";
const PROFILES: &str = "\
cmdline: the command line
memory: resident, proportional and anonymous memory, in kB
profile: the CPU time of functions for ?seconds=30, for go tool pprof; without the time in the kernel and in the C library
threads: each thread with its CPU time in seconds

There is no heap profile. perf record -g -p PID also shows the time in the kernel.
";
/// How long a profile is recorded, in seconds, unless the request says it: as Go does.
const PROFILE_SECONDS: u64 = 30;
const MOST_PROFILE_SECONDS: u64 = 300;
/// The page of upstream's `DebugFlags`.
const DEBUG_FLAGS: &str = "<html><head><title>/debug/flags/</title></head><body>/debug/flags/<br>flags: \
                           <a href=\"/debug/flags/v\">v</a> (PUT a number)</body></html>\n";

/// Returns `/configz`, `/flagz` and `/statusz`, and with debugging also `/debug/`.
pub fn introspection_routes(introspection: Introspection) -> Router {
    let paths = paths(&introspection);
    let Introspection { status, health, config, flags, statusz, ui: _, debugging } = introspection;
    let configz = move || async move { ([NO_SNIFF], Json(json!({ CONFIG_NAME: *config.borrow() }))) };
    let mut routes = Router::new().route("/configz", get(configz));
    if let Some(flags) = flags {
        let flagz = move |headers: HeaderMap| async move { flagz::answer(&flags, &headers) };
        routes = routes.route("/flagz", get(flagz));
    }
    if statusz {
        let page =
            move |headers: HeaderMap| async move { statusz::answer(&status, &health, &paths, &headers) };
        routes = routes.route("/statusz", get(page));
    }
    match debugging {
        Some(debugging) => routes.merge(profiles()).merge(debug_flags(debugging)),
        None => routes,
    }
}

/// Returns the first segments of the server's paths, sorted, as upstream lists them.
fn paths(introspection: &Introspection) -> Vec<&'static str> {
    let always = ["/configz", "/healthz", "/metrics", "/proxyMode"].map(Some);
    let some = [
        introspection.debugging.as_ref().map(|_| "/debug"),
        introspection.flags.as_ref().map(|_| "/flagz"),
        introspection.statusz.then_some("/statusz"),
        introspection.ui.then_some("/ui/"),
    ];
    let mut paths: Vec<_> = always.into_iter().chain(some).flatten().collect();
    paths.sort_unstable();
    paths
}

fn profiles() -> Router {
    let command_line = || async { std::env::args().collect::<Vec<_>>().join("\0") };
    Router::new()
        .route("/debug/pprof/", get(|| async { PROFILES }))
        .route("/debug/pprof/cmdline", get(command_line))
        .route("/debug/pprof/memory", get(|| async { text_or_error(own_process::memory()) }))
        .route("/debug/pprof/profile", get(profile))
        .route("/debug/pprof/threads", get(|| async { text_or_error(own_process::threads()) }))
}

/// The query of `/debug/pprof/profile`.
#[derive(Debug, Deserialize)]
struct ProfileQuery {
    seconds: Option<u64>,
}

/// Records a CPU profile. If the client goes away, the recording ends.
async fn profile(Query(ProfileQuery { seconds }): Query<ProfileQuery>) -> Response {
    let seconds = seconds.unwrap_or(PROFILE_SECONDS);
    if !(1..=MOST_PROFILE_SECONDS).contains(&seconds) {
        let message = format!("seconds={seconds}: must be a number from 1 to {MOST_PROFILE_SECONDS}\n");
        return (StatusCode::BAD_REQUEST, [NO_SNIFF], message).into_response();
    }
    let recorded = async {
        let recording = Recording::start()?;
        sleep(Duration::from_secs(seconds)).await;
        Ok(spawn_blocking(|| recording.finish()).await)
    };
    let failed =
        |error: String| (StatusCode::INTERNAL_SERVER_ERROR, [NO_SNIFF], error + "\n").into_response();
    match recorded.await {
        Ok(Ok(Ok(profile))) => ([NO_SNIFF, BINARY, AS_FILE], profile).into_response(),
        Err(error) | Ok(Ok(Err(error))) => failed(error.to_string()),
        Ok(Err(panic)) => failed(panic.to_string()),
    }
}

fn text_or_error(read: Result<String, KernelError>) -> Response {
    match read {
        Ok(text) => text.into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

/// Returns upstream's `DebugFlags` (`apiserver/pkg/server/routes/flags.go`): a PUT to
/// `/debug/flags/v` sets the verbosity of the log until the configuration file changes.
fn debug_flags(Debugging { set_verbosity }: Debugging) -> Router {
    let put = move |method: Method, body: String| async move {
        if method != Method::PUT {
            return (StatusCode::NOT_ACCEPTABLE, [NO_SNIFF], "unsupported http method\n".into());
        }
        let Ok(level) = body.parse::<u32>() else {
            let message = format!("cannot set the verbosity to {body:?}: it must be a whole number\n");
            return (StatusCode::BAD_REQUEST, [NO_SNIFF], message);
        };
        set_verbosity(level);
        tracing::info!(level, "the verbosity of the log was set through /debug/flags/v");
        (StatusCode::OK, [NO_SNIFF], format!("successfully set klog.logging.verbosity to {level}\n"))
    };
    let index = || async { Html(DEBUG_FLAGS) };
    Router::new()
        .route("/debug/flags", any(index))
        .route("/debug/flags/", any(index))
        .route("/debug/flags/v", any(put))
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicU32, Ordering},
        time::Duration,
    };

    use axum::{
        body::{Body, to_bytes},
        http::{Request, header},
    };
    use tower::ServiceExt as _;

    use super::*;
    use crate::{
        dataplane::Mode,
        health::SyncTask,
        model::{ChosenPath, IpFamily, LinkPath},
    };

    const JSON: &str = "application/json;v=v1beta1;g=config.k8s.io;as=";

    fn introspection() -> Introspection {
        let (_, config) = watch::channel(serde_json::Value::Null);
        Introspection {
            status: Status::default(),
            health: ProxyHealth::new(Duration::from_mins(1)),
            config,
            flags: Some([("v", "2".to_owned()), ("config", "/etc/a\nb".to_owned())].into()),
            statusz: true,
            ui: false,
            debugging: None,
        }
    }

    /// Sends a request. Returns the status code, the content type and the body.
    async fn ask(
        routes: &Router,
        method: &str,
        path: &str,
        accept: &str,
        body: &str,
    ) -> (StatusCode, String, String) {
        let request = Request::builder().method(method).uri(path).header(header::ACCEPT, accept);
        let request = request.body(Body::from(body.to_owned())).expect("a request");
        let Ok(answer) = routes.clone().oneshot(request).await;
        let (head, body) = answer.into_parts();
        let body = to_bytes(body, usize::MAX).await.expect("the whole body");
        let content_type = head.headers.get(header::CONTENT_TYPE);
        let content_type = content_type.map_or("", |value| value.to_str().expect("text")).to_owned();
        (head.status, content_type, String::from_utf8(body.into()).expect("text"))
    }

    async fn get_page(routes: &Router, path: &str, accept: &str) -> (StatusCode, String, String) {
        ask(routes, "GET", path, accept, "").await
    }

    #[tokio::test]
    async fn statusz_shows_the_current_facts() {
        let introspection = introspection();
        let (status, health) = (introspection.status.clone(), introspection.health.clone());
        let routes = introspection_routes(introspection);
        status.set_mode(Mode::Ebpf, "as configured");
        status.set_link_path(ChosenPath::new(LinkPath::Programs, "shunt.links.path is programs"));
        let (code, content_type, body) = get_page(&routes, "/statusz", "*/*").await;
        assert_eq!((code, content_type.as_str()), (StatusCode::OK, "text/plain; charset=utf-8"));
        let starting = "Ready: no: the first full sync is not complete\nLast sync: none\n";
        assert!(body.contains(starting), "{body}");
        for line in ["shunt statusz", "Mode: ebpf", "Link path: programs", "Socket scope: not known yet"] {
            assert!(body.lines().any(|shown| shown == line), "{line}: {body}");
        }
        health.updated(&IpFamily::ALL);
        status.set_mode(Mode::Nftables, "auto: the mode ebpf broke");
        status.task_failed(SyncTask::Program, "no memory".into());
        let (_, _, body) = get_page(&routes, "/statusz", "text/plain").await;
        assert!(body.contains("Mode: nftables\n") && !body.contains("Link path"), "{body}");
        assert!(body.contains("Ready: yes\n") && body.contains("kernel: no memory\n"), "{body}");
    }

    #[tokio::test]
    async fn statusz_names_the_pages_only_while_they_are_on() {
        for ui in [true, false] {
            let routes = introspection_routes(Introspection { ui, ..introspection() });
            let (_, _, body) = get_page(&routes, "/statusz", "text/plain").await;
            let paths = body.lines().find(|line| line.starts_with("Paths: ")).expect("paths");
            assert_eq!(paths.ends_with(" /statusz /ui/"), ui, "{paths}");
        }
    }

    /// The fields of upstream's type `Statusz` (`apiserver/pkg/server/statusz/api/v1beta1`).
    #[tokio::test(start_paused = true)]
    async fn statusz_and_flagz_have_upstreams_json() {
        let routes = introspection_routes(introspection());
        let (code, content_type, body) = get_page(&routes, "/statusz", &format!("{JSON}Statusz")).await;
        assert_eq!((code, content_type.as_str()), (StatusCode::OK, "application/json"));
        let mut page: serde_json::Value = serde_json::from_str(&body).expect("JSON");
        let started = page["startTime"].take();
        let started = started.as_str().expect("a time");
        assert!(started.len() == "2026-01-01T00:00:00Z".len() && started.ends_with('Z'), "{started}");
        let expected = json!({
            "kind": "Statusz", "apiVersion": "config.k8s.io/v1beta1", "metadata": {"name": "shunt"},
            "startTime": null, "uptimeSeconds": 0, "goVersion": "", "emulationVersion": "1.36",
            "binaryVersion": env!("CARGO_PKG_VERSION"),
            "paths": ["/configz", "/flagz", "/healthz", "/metrics", "/proxyMode", "/statusz"],
        });
        assert_eq!(page, expected);
        let (_, _, body) = get_page(&routes, "/flagz", &format!("{JSON}Flagz")).await;
        let expected = json!({
            "kind": "Flagz", "apiVersion": "config.k8s.io/v1beta1", "metadata": {"name": "shunt"},
            "flags": {"v": "2", "config": "/etc/a\nb"},
        });
        assert_eq!(serde_json::from_str::<serde_json::Value>(&body).expect("JSON"), expected);
        let (code, content_type, body) = get_page(&routes, "/flagz", "application/json").await;
        assert_eq!((code, content_type.as_str()), (StatusCode::NOT_ACCEPTABLE, "application/json"));
        assert!(body.contains("\"reason\":\"NotAcceptable\""), "{body}");
    }

    #[tokio::test]
    async fn flagz_has_one_line_for_each_flag() {
        let routes = introspection_routes(introspection());
        let (code, _, body) = get_page(&routes, "/flagz", "text/plain").await;
        assert!(code == StatusCode::OK && body.starts_with("\nshunt flagz\nWarning: "), "{body}");
        assert!(body.ends_with("\nconfig=/etc/a b\nv=2\n"), "{body}");
    }

    #[tokio::test]
    async fn feature_gates_and_profiling_decide_which_pages_exist() {
        let without = Introspection { flags: None, statusz: false, ..introspection() };
        let routes = introspection_routes(without);
        for path in ["/statusz", "/flagz", "/debug/pprof/", "/debug/flags/v"] {
            assert_eq!(get_page(&routes, path, "*/*").await.0, StatusCode::NOT_FOUND, "{path}");
        }
        assert_eq!(get_page(&routes, "/configz", "*/*").await.0, StatusCode::OK);
    }

    #[tokio::test]
    async fn a_put_to_debug_flags_v_sets_the_verbosity() {
        let level = Arc::new(AtomicU32::new(0));
        let set = Arc::clone(&level);
        let set_verbosity = Arc::new(move |value| set.store(value, Ordering::Relaxed));
        let debugging = Some(Debugging { set_verbosity });
        let routes = introspection_routes(Introspection { debugging, ..introspection() });
        let (code, _, body) = ask(&routes, "PUT", "/debug/flags/v", "*/*", "5").await;
        let expected = "successfully set klog.logging.verbosity to 5\n";
        assert_eq!((code, body.as_str(), level.load(Ordering::Relaxed)), (StatusCode::OK, expected, 5));
        for bad in ["", "-1", "high", "5\n"] {
            let (code, ..) = ask(&routes, "PUT", "/debug/flags/v", "*/*", bad).await;
            assert_eq!(code, StatusCode::BAD_REQUEST, "{bad:?}");
        }
        let (code, _, body) = ask(&routes, "GET", "/debug/flags/v", "*/*", "").await;
        assert_eq!((code, body.as_str()), (StatusCode::NOT_ACCEPTABLE, "unsupported http method\n"));
        assert!(get_page(&routes, "/debug/flags", "*/*").await.2.contains("/debug/flags/v"));
        assert_eq!(level.load(Ordering::Relaxed), 5);
    }
}
