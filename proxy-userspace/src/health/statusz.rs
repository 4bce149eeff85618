//! Writes `/statusz`: the head that components of Kubernetes have (`component-base/zpages/statusz`,
//! KEP-4827), and shunt's own facts.

use std::{
    fmt::{self, Display},
    time::Duration,
};

use axum::{
    Json,
    http::HeaderMap,
    response::{IntoResponse, Response},
};
use jiff::Timestamp;
use proxy_common::link::direct::LEASE_NS;
use serde_json::json;

use super::{
    ProxyHealth, Status,
    proxy_health::{FamilyProgress, Progress},
    routes::NO_SNIFF,
    status::{Facts, ReportedScope, RunningMode},
    zpages::{self, Format},
};
use crate::{
    dataplane::{BackstopStatus, Mode},
    model::{ChosenPath, DirectScope, LinkPath, SocketScope},
};

/// Go's `time.UnixDate`, as upstream writes times here.
const TIME_FORMAT: &str = "%a %b %e %H:%M:%S UTC %Y";
const NONE: &str = "none";
const VERSION: &str = env!("CARGO_PKG_VERSION");
/// The Kubernetes version whose kube-proxy shunt stands in for.
const EMULATION_VERSION: &str = "1.36";

/// Answers in the format that the client accepts.
pub(super) fn answer(
    status: &Status,
    health: &ProxyHealth,
    paths: &[&'static str],
    headers: &HeaderMap,
) -> Response {
    let (started, up) = (status.started, status.running_since.elapsed());
    match zpages::negotiate("Statusz", headers) {
        Ok(Format::Text) => {
            let page = Page { started, up, paths, facts: &status.facts(), progress: &health.progress() };
            ([NO_SNIFF], page.to_string()).into_response()
        }
        Ok(Format::Json(version)) => ([NO_SNIFF], Json(to_json(version, started, up, paths))).into_response(),
        Err(response) => *response,
    }
}

/// Returns upstream's type `Statusz`. shunt's own facts are only in the text.
fn to_json(version: &str, started: Timestamp, up: Duration, paths: &[&'static str]) -> serde_json::Value {
    let mut page = zpages::object("Statusz", version);
    page["startTime"] = json!(started.strftime("%Y-%m-%dT%H:%M:%SZ").to_string());
    page["uptimeSeconds"] = json!(up.as_secs());
    page["goVersion"] = json!("");
    page["binaryVersion"] = json!(VERSION);
    page["emulationVersion"] = json!(EMULATION_VERSION);
    page["paths"] = json!(paths);
    page
}

/// What the page shows.
pub(super) struct Page<'a> {
    pub(super) started: Timestamp,
    pub(super) up: Duration,
    /// The first segments of the server's paths.
    pub(super) paths: &'a [&'static str],
    pub(super) facts: &'a Facts,
    pub(super) progress: &'a Progress,
}

impl Display for Page<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&zpages::head("statusz"))?;
        writeln!(f)?;
        line(f, "Started", time(self.started))?;
        line(f, "Up", uptime(self.up))?;
        line(f, "Binary version", VERSION)?;
        line(f, "Emulation version", EMULATION_VERSION)?;
        line(f, "Paths", self.paths.join(" "))?;
        writeln!(f)?;
        let mode = self.facts.mode.as_ref();
        write_mode(f, mode)?;
        if mode.is_some_and(|running| running.mode == Mode::Ebpf) {
            write_ebpf(f, self.facts)?;
        }
        write_progress(f, self.progress)?;
        let failing = self.facts.failing.iter();
        list(f, "Failing", failing.map(|(task, error)| format!("cannot {task}: {error}")))?;
        line(f, "Configuration refused", self.facts.configuration_refused.as_deref().unwrap_or(NONE))
    }
}

fn write_link_path(f: &mut fmt::Formatter<'_>, chosen: Option<&ChosenPath>) -> fmt::Result {
    let Some(ChosenPath { path, why }) = chosen else { return line(f, "Link path", "not known yet") };
    line(f, "Link path", path.name())?;
    line(f, "Link path reason", why)?;
    let LinkPath::Direct { scope, lease, without, .. } = path else { return Ok(()) };
    let flows = match scope {
        DirectScope::Learned => "learned",
        DirectScope::Whole => "whole",
    };
    line(f, "Direct path of flows", flows)?;
    let lease = Duration::from_nanos(LEASE_NS).max(*lease);
    line(f, "Direct path lease", format!("up to {lease:?}"))?;
    if without.is_empty() {
        return Ok(());
    }
    let links: Vec<&str> = without.iter().map(|link| &**link).collect();
    line(f, "Links without direct path", links.join(", "))
}

fn write_mode(f: &mut fmt::Formatter<'_>, running: Option<&RunningMode>) -> fmt::Result {
    let Some(RunningMode { mode, why, since }) = running else { return line(f, "Mode", NONE) };
    line(f, "Mode", mode)?;
    line(f, "Mode reason", why)?;
    line(f, "Mode since", time(*since))
}

/// Writes what only the ebpf mode has.
fn write_ebpf(f: &mut fmt::Formatter<'_>, facts: &Facts) -> fmt::Result {
    write_link_path(f, facts.link_path.as_ref())?;
    write_sockets(f, facts)?;
    match &facts.backstop {
        None => line(f, "Backstop", NONE)?,
        Some(BackstopStatus { mode, needs }) => {
            line(f, "Backstop", mode)?;
            needs.iter().try_for_each(|need| line(f, "Backstop need", need))?;
        }
    }
    list(f, "Link left out", facts.left_out.iter())?;
    list(f, "Link displaced", facts.displaced.iter())
}

fn write_sockets(f: &mut fmt::Formatter<'_>, facts: &Facts) -> fmt::Result {
    let Some(ReportedScope { scope, why }) = &facts.socket_scope else {
        return line(f, "Socket scope", "not known yet");
    };
    match scope {
        SocketScope::All => line(f, "Socket scope", "all")?,
        SocketScope::Node => line(f, "Socket scope", "node")?,
        SocketScope::AllBut(cookies) if cookies.len() == 1 => {
            line(f, "Socket scope", "all but 1 exempt namespace")?;
        }
        SocketScope::AllBut(cookies) => {
            line(f, "Socket scope", format!("all but {} exempt namespaces", cookies.len()))?;
        }
    }
    if let Some(why) = why {
        line(f, "Socket scope reason", why)?;
    }
    let mut exempt: Vec<String> = facts.exempt.values().map(ToString::to_string).collect();
    exempt.sort_unstable();
    exempt.into_iter().try_for_each(|namespace| line(f, "Exempt namespace", namespace))
}

fn write_progress(f: &mut fmt::Formatter<'_>, progress: &Progress) -> fmt::Result {
    if progress.not_ready.is_empty() {
        line(f, "Ready", "yes")?;
    } else {
        line(f, "Ready", format!("no: {}", progress.not_ready.join("; ")))?;
    }
    let of_families = |text: &dyn Fn(&FamilyProgress) -> Option<String>| {
        let texts = progress.families.iter().filter_map(|state| Some((state.family, text(state)?)));
        let texts: Vec<_> = texts.map(|(family, text)| format!("{family} {text}")).collect();
        if texts.is_empty() { NONE.to_owned() } else { texts.join(", ") }
    };
    let seconds = |ago: Duration| ago.as_secs();
    let last_sync = |state: &FamilyProgress| Some(format!("{} s ago", seconds(state.last_updated?)));
    let pending = |state: &FamilyProgress| Some(format!("for {} s", seconds(state.oldest_pending?)));
    line(f, "Last sync", of_families(&last_sync))?;
    line(f, "Pending changes", of_families(&pending))
}

/// Writes one line for each value, or a line with `none`.
fn list(
    f: &mut fmt::Formatter<'_>,
    key: &str,
    values: impl ExactSizeIterator<Item = impl Display>,
) -> fmt::Result {
    if values.len() == 0 {
        return line(f, key, NONE);
    }
    for value in values {
        line(f, key, value)?;
    }
    Ok(())
}

/// Writes a key and its value. Names of pods and errors of commands can contain line breaks, which
/// must not look like other lines.
fn line(f: &mut fmt::Formatter<'_>, key: &str, value: impl Display) -> fmt::Result {
    let value = value.to_string().replace(char::is_control, " ");
    writeln!(f, "{key}: {}", value.trim_end())
}

fn time(time: Timestamp) -> impl Display {
    time.strftime(TIME_FORMAT)
}

/// Writes a duration as upstream does.
fn uptime(up: Duration) -> String {
    let seconds = up.as_secs();
    format!("{} hr {:02} min {:02} sec", seconds / 3600, seconds / 60 % 60, seconds % 60)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::{
        dataplane::{BackstopNeed, DisplacedLink},
        health::status::SyncTask,
        kernel::{
            netns::NetnsCookie,
            redirecting_pods::{ExemptNamespace, NetnsInode},
        },
        model::IpFamily,
    };

    const SECOND: Duration = Duration::from_secs(1);

    fn text(facts: &Facts, progress: &Progress) -> String {
        let started = Timestamp::from_second(1_790_000_000).expect("in range");
        Page { started, up: 3_725 * SECOND, paths: &["/metrics", "/statusz"], facts, progress }.to_string()
    }

    fn running(mode: Mode, why: &str) -> RunningMode {
        RunningMode { mode, why: why.into(), since: Timestamp::from_second(1_790_000_001).expect("in range") }
    }

    fn progress(last_updated: u32, oldest_pending: Option<u32>) -> Progress {
        let families = IpFamily::ALL.map(|family| FamilyProgress {
            family,
            last_updated: Some(last_updated * SECOND),
            oldest_pending: oldest_pending.map(|seconds| seconds * SECOND),
        });
        Progress { families, not_ready: Vec::new() }
    }

    fn exempt(inode: u64, host_name: Option<&str>, path: &str) -> (NetnsInode, ExemptNamespace) {
        let host_name = host_name.map(Into::into);
        (
            NetnsInode(inode),
            ExemptNamespace { cookie: Some(NetnsCookie(inode)), host_name, path: path.into() },
        )
    }

    #[test]
    fn the_page_of_the_ebpf_mode_names_everything_that_is_not_as_usual() {
        let netfilter = ChosenPath::netfilter("a rule of others looks at the source");
        let facts = Facts {
            mode: Some(running(Mode::Ebpf, "as configured")),
            link_path: Some(netfilter),
            socket_scope: Some(ReportedScope {
                scope: SocketScope::AllBut([NetnsCookie(1), NetnsCookie(2)].into()),
                why: None,
            }),
            exempt: [exempt(1, Some("web-1"), "/run/netns/a"), exempt(2, None, "/proc/7/ns/net")].into(),
            backstop: Some(BackstopStatus {
                mode: Mode::Nftables,
                needs: vec![BackstopNeed::Setting, BackstopNeed::Sctp],
            }),
            left_out: vec!["eth1".into(), "eth2".into()],
            unreadable_manifests: Vec::new(),
            node_families: BTreeSet::new(),
            watch_errors: Vec::new(),
            watches: None,
            clock_ahead: None,
            map_fill: Vec::new(),
            displaced: vec![DisplacedLink { link: "eth0".into(), by: "cni_ingress".into() }],
            failing: [(SyncTask::Program, "the map services is full".into())].into(),
            configuration_refused: Some("mode: no mode has this name".into()),
            second_shunt: None,
        };
        let progress = Progress { not_ready: vec!["a Service is left out"], ..progress(3, Some(2)) };
        let text = text(&facts, &progress).replace(env!("CARGO_PKG_VERSION"), "VERSION");
        insta::assert_snapshot!(text);
    }

    #[test]
    fn the_page_of_the_ebpf_mode_says_none_where_nothing_is_unusual() {
        let facts = Facts {
            mode: Some(running(Mode::Ebpf, "auto: it works")),
            link_path: Some(ChosenPath::new(LinkPath::Programs, "shunt.links.path is programs")),
            socket_scope: Some(ReportedScope { scope: SocketScope::All, why: None }),
            ..Facts::default()
        };
        let text = text(&facts, &progress(0, None));
        let (_, own) = text.split_once("Paths: /metrics /statusz\n\n").expect("a head");
        let expected = "Mode: ebpf\nMode reason: auto: it works\nMode since: Mon Sep 21 14:13:21 UTC 2026\n\
                        Link path: programs\nLink path reason: shunt.links.path is programs\nSocket scope: all\nBackstop: none\nLink left out: none\n\
                        Link displaced: none\nReady: yes\nLast sync: IPv4 0 s ago, IPv6 0 s ago\n\
                        Pending changes: none\nFailing: none\nConfiguration refused: none\n";
        assert_eq!(own, expected);
    }

    #[test]
    fn the_page_says_how_long_flows_keep_the_direct_path() {
        let [watched, unwatched] = [8, 0].map(|lease| {
            let direct = LinkPath::Direct {
                scope: DirectScope::Learned,
                lease: Duration::from_secs(lease),
                without: ["eth1".into()].into(),
                filtered: BTreeSet::new(),
            };
            let mode = Some(running(Mode::Ebpf, "auto: it works"));
            let link_path = Some(ChosenPath::new(direct, "no rule of others"));
            text(&Facts { mode, link_path, ..Facts::default() }, &progress(0, None))
        });
        assert!(watched.contains(
            "Link path: direct\nLink path reason: no rule of others\nDirect path of flows: learned\nDirect path lease: up to 8s\nLinks without direct path: eth1\n"
        ));
        assert!(unwatched.contains("Direct path lease: up to 500ms\n"));
    }

    #[test]
    fn netfilter_modes_have_no_lines_of_the_ebpf_mode() {
        let facts = Facts { mode: Some(running(Mode::Nftables, "as configured")), ..Facts::default() };
        let text = text(&facts, &progress(1, None));
        let keys = text.lines().skip_while(|line| !line.starts_with("Mode"));
        let keys: Vec<_> = keys.filter_map(|line| Some(line.split_once(':')?.0)).collect();
        let expected = [
            "Mode",
            "Mode reason",
            "Mode since",
            "Ready",
            "Last sync",
            "Pending changes",
            "Failing",
            "Configuration refused",
        ];
        assert_eq!(keys, expected);
    }

    #[test]
    fn the_reason_for_a_smaller_scope_is_shown() {
        let why = Some(std::sync::Arc::from("CAP_SYS_ADMIN is missing"));
        let facts = Facts {
            mode: Some(running(Mode::Ebpf, "as configured")),
            socket_scope: Some(ReportedScope { scope: SocketScope::Node, why }),
            ..Facts::default()
        };
        let text = text(&facts, &progress(1, None));
        let expected =
            "Link path: not known yet\nSocket scope: node\nSocket scope reason: CAP_SYS_ADMIN is missing\n";
        assert!(text.contains(expected), "{text}");
    }

    #[test]
    fn line_breaks_in_names_and_errors_make_no_lines() {
        let facts = Facts {
            mode: Some(running(Mode::Ebpf, "as configured")),
            socket_scope: Some(ReportedScope { scope: SocketScope::Node, why: None }),
            exempt: [exempt(1, Some("web\nMode: ipvs"), "/run/netns/a")].into(),
            failing: [(SyncTask::Program, "nft failed:\nline 2\n".into())].into(),
            ..Facts::default()
        };
        let text = text(&facts, &progress(1, None));
        assert_eq!(text.lines().filter(|line| line.starts_with("Mode:")).count(), 1, "{text}");
        assert!(text.contains("\nFailing: cannot program the kernel: nft failed: line 2\n"), "{text}");
    }
}
