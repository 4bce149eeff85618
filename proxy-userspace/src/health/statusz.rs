//! Writes `/statusz`: the head that components of Kubernetes have (`component-base/zpages/statusz`,
//! KEP-4827), and shunt's own facts.

use std::{
    fmt::{self, Display},
    time::Duration,
};

use axum::http::{HeaderMap, header};
use jiff::Timestamp;

use super::{
    proxy_health::{FamilyProgress, Progress},
    status::{Facts, ReportedScope, RunningMode},
};
use crate::{
    dataplane::{BackstopStatus, Mode},
    model::{DirectScope, LinkPath, SocketScope},
};

const HEAD: &str = "
shunt statusz
Warning: This page is for people who debug. Its format can change in every version. Programs should read /metrics.
";
/// Go's `time.UnixDate`, as upstream writes times here.
const TIME_FORMAT: &str = "%a %b %e %H:%M:%S UTC %Y";
const NONE: &str = "none";

/// What the page shows.
pub(super) struct Page<'a> {
    pub(super) started: Timestamp,
    pub(super) up: Duration,
    /// The paths of the server, as upstream lists them: the first segments, sorted.
    pub(super) paths: &'a str,
    pub(super) facts: &'a Facts,
    pub(super) progress: &'a Progress,
}

impl Display for Page<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(HEAD)?;
        writeln!(f)?;
        line(f, "Started", time(self.started))?;
        line(f, "Up", uptime(self.up))?;
        line(f, "Binary version", env!("CARGO_PKG_VERSION"))?;
        line(f, "Paths", self.paths)?;
        writeln!(f)?;
        let mode = self.facts.mode.as_ref();
        write_mode(f, mode)?;
        if mode.is_some_and(|running| running.mode == Mode::Ebpf) {
            write_ebpf(f, self.facts)?;
        }
        write_progress(f, self.progress)?;
        let failing = self.facts.failing.iter();
        list(f, "Failing", failing.map(|(task, error)| format!("cannot {task}: {error}")))
    }
}

fn write_mode(f: &mut fmt::Formatter<'_>, running: Option<&RunningMode>) -> fmt::Result {
    let Some(RunningMode { mode, why, since }) = running else { return line(f, "Mode", NONE) };
    line(f, "Mode", mode)?;
    line(f, "Mode reason", why)?;
    line(f, "Mode since", time(*since))
}

/// Writes what only the ebpf mode has.
fn write_ebpf(f: &mut fmt::Formatter<'_>, facts: &Facts) -> fmt::Result {
    match &facts.link_path {
        None => line(f, "Link path", "not known yet")?,
        Some(LinkPath::Programs) => line(f, "Link path", "programs")?,
        Some(LinkPath::Direct { scope, without }) => {
            line(f, "Link path", "direct")?;
            let flows = match scope {
                DirectScope::Learned => "learned",
                DirectScope::Whole => "whole",
            };
            line(f, "Direct path of flows", flows)?;
            if !without.is_empty() {
                let links: Vec<&str> = without.iter().map(|link| &**link).collect();
                line(f, "Links without direct path", links.join(", "))?;
            }
        }
        Some(LinkPath::Netfilter { why }) => {
            line(f, "Link path", "netfilter")?;
            line(f, "Link path reason", why)?;
        }
    }
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

/// Returns true if one of the accepted media types is plain text, or if there is no header
/// `Accept`. Upstream also has JSON, with a type and a version of its own API.
pub(super) fn accepts_text(headers: &HeaderMap) -> bool {
    let mut values = headers.get_all(header::ACCEPT).iter().peekable();
    let is_text = |range: &str| {
        let media_type = range.split(';').next().unwrap_or_default().trim();
        ["text/plain", "text/*", "*/*"].iter().any(|text| media_type.eq_ignore_ascii_case(text))
    };
    values.peek().is_none()
        || values.any(|value| value.to_str().is_ok_and(|value| value.split(',').any(is_text)))
}

#[cfg(test)]
mod tests {
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
        Page { started, up: 3_725 * SECOND, paths: "/metrics /statusz", facts, progress }.to_string()
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
        let netfilter = LinkPath::Netfilter { why: "a rule of others looks at the source".into() };
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
            displaced: vec![DisplacedLink { link: "eth0".into(), by: "cni_ingress".into() }],
            failing: [(SyncTask::Program, "the map services is full".into())].into(),
        };
        let progress = Progress { not_ready: vec!["a Service is left out"], ..progress(3, Some(2)) };
        let text = text(&facts, &progress).replace(env!("CARGO_PKG_VERSION"), "VERSION");
        insta::assert_snapshot!(text);
    }

    #[test]
    fn the_page_of_the_ebpf_mode_says_none_where_nothing_is_unusual() {
        let facts = Facts {
            mode: Some(running(Mode::Ebpf, "auto: it works")),
            link_path: Some(LinkPath::Programs),
            socket_scope: Some(ReportedScope { scope: SocketScope::All, why: None }),
            ..Facts::default()
        };
        let text = text(&facts, &progress(0, None));
        let (_, own) = text.split_once("Paths: /metrics /statusz\n\n").expect("a head");
        let expected = "Mode: ebpf\nMode reason: auto: it works\nMode since: Mon Sep 21 14:13:21 UTC 2026\n\
                        Link path: programs\nSocket scope: all\nBackstop: none\nLink left out: none\n\
                        Link displaced: none\nReady: yes\nLast sync: IPv4 0 s ago, IPv6 0 s ago\n\
                        Pending changes: none\nFailing: none\n";
        assert_eq!(own, expected);
    }

    #[test]
    fn netfilter_modes_have_no_lines_of_the_ebpf_mode() {
        let facts = Facts { mode: Some(running(Mode::Nftables, "as configured")), ..Facts::default() };
        let text = text(&facts, &progress(1, None));
        let keys = text.lines().skip_while(|line| !line.starts_with("Mode"));
        let keys: Vec<_> = keys.filter_map(|line| Some(line.split_once(':')?.0)).collect();
        let expected =
            ["Mode", "Mode reason", "Mode since", "Ready", "Last sync", "Pending changes", "Failing"];
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
        assert!(text.ends_with("Failing: cannot program the kernel: nft failed: line 2\n"), "{text}");
    }

    #[test]
    fn text_is_acceptable_without_a_header_and_for_ranges_that_contain_it() {
        let accepts = |values: &[&'static str]| {
            let pairs = values.iter().map(|value| (header::ACCEPT, header::HeaderValue::from_static(value)));
            accepts_text(&pairs.collect())
        };
        assert!(accepts(&[]));
        for value in ["*/*", "text/*;q=0.5", "text/plain; charset=utf-8", "text/html, Text/Plain"] {
            assert!(accepts(&[value]), "{value}");
        }
        assert!(accepts(&["text/html", "text/plain"]), "the header may come twice");
        assert!(!accepts(&["application/json;v=v1alpha1;g=config.k8s.io;as=Statusz"]));
        assert!(!accepts(&["text/html"]) && !accepts(&[""]));
    }
}
