//! Whether what came of a flow is what was wanted. Pure: no clock, no sockets.

use std::{collections::BTreeMap, fmt::Write as _};

use serde_json::Value;

use crate::{
    agent::protocol::{Answer, Failure, FailureKind, Page, Try},
    case::{Answers, Expect, ExpectPage, Peer, Source},
    world::Host,
};

/// What came of a flow.
#[derive(Clone, Debug, PartialEq)]
pub enum Seen {
    /// Of connections.
    Tries(Vec<Try>),
    /// Of a GET.
    Page(Result<Page, Failure>),
}

/// Judges what was seen. The error says how it differs from what was wanted, in a few words.
pub fn judge(from: Host, expect: &Expect, seen: &Seen) -> Result<(), String> {
    match (expect, seen) {
        (_, Seen::Tries(tries)) if tries.is_empty() => Err("nothing was tried".to_owned()),
        (Expect::Reach(answers), Seen::Tries(tries)) => reached(from, answers, tries),
        (Expect::Refused, Seen::Tries(tries)) => all_fail_with(FailureKind::Refused, tries),
        (Expect::Blocked, Seen::Tries(tries)) => tries.iter().try_for_each(|one| match one {
            Try::Failed(failure) => blocked(failure),
            Try::Answered(answer) => Err(format!("{} answered", answer.host)),
        }),
        (Expect::Silent, Seen::Tries(tries)) => all_fail_with(FailureKind::TimedOut, tries),
        (Expect::Reset, Seen::Tries(tries)) => all_fail_with(FailureKind::Reset, tries),
        (Expect::TooBig, Seen::Tries(tries)) => all_fail_with(FailureKind::TooBig, tries),
        (Expect::Refused, Seen::Page(Err(failure))) => refused(failure),
        (Expect::Blocked, Seen::Page(Err(failure))) => blocked(failure),
        (Expect::Refused | Expect::Blocked, Seen::Page(Ok(page))) => {
            Err(format!("answered with {}", page.status))
        }
        (Expect::Page(wanted), Seen::Page(Ok(page))) => holds(wanted, page),
        (Expect::Page(_), Seen::Page(Err(failure))) => Err(describe_failure(failure)),
        (Expect::Page(_), Seen::Tries(_))
        | (Expect::Reach(_) | Expect::Silent | Expect::Reset | Expect::TooBig, Seen::Page(_)) => {
            Err("the flow's expectation is of another kind than its action".to_owned())
        }
    }
}

/// A summary for reports: "a1 x12, b1 x11, 1 x connect: Connection refused".
pub fn describe(seen: &Seen) -> String {
    match seen {
        Seen::Page(Ok(page)) => {
            format!("status {}, {} bytes: {}", page.status, page.body.len(), head(&page.body))
        }
        Seen::Page(Err(failure)) => describe_failure(failure),
        Seen::Tries(tries) => {
            let mut counts: BTreeMap<(bool, String), usize> = BTreeMap::new();
            for one in tries {
                let (failed, text) = match one {
                    Try::Answered(answer) => (false, format!("{} saw {}", answer.host, answer.seen.ip())),
                    Try::Failed(failure) => (true, describe_failure(failure)),
                };
                *counts.entry((failed, text)).or_default() += 1;
            }
            let parts: Vec<_> = counts.iter().map(|((_, text), count)| format!("{count} x {text}")).collect();
            parts.join("; ")
        }
    }
}

/// Whether TCP had to send few enough segments again.
pub(super) fn sent_again(segments: u64, most: u64) -> Result<(), String> {
    if segments <= most { Ok(()) } else { Err(format!("{segments} segments were sent again")) }
}

/// Whether a failure is an error that came at once, not silence.
pub(super) fn is_prompt_error(one: &Try) -> bool {
    matches!(one, Try::Failed(Failure { kind, .. }) if [FailureKind::Refused, FailureKind::Reset, FailureKind::Unreachable].contains(kind))
}

fn reached(from: Host, wanted: &Answers, tries: &[Try]) -> Result<(), String> {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for one in tries {
        match one {
            Try::Failed(failure) => return Err(describe_failure(failure)),
            Try::Answered(answer) => {
                own_socket_agrees(wanted.peer, answer)?;
                source_is(from, wanted.source, answer)?;
                *counts.entry(answer.host.as_str()).or_default() += 1;
            }
        }
    }
    who_answered(wanted, &counts)?;
    match wanted.share {
        Some(range) => shares_lie_in(range, &counts, tries.len()),
        None => Ok(()),
    }
}

fn who_answered(wanted: &Answers, counts: &BTreeMap<&str, usize>) -> Result<(), String> {
    let is_wanted = |name: &&str| wanted.hosts.iter().any(|host| host.name() == *name);
    if let Some(stranger) = counts.keys().find(|name| !is_wanted(name)) {
        return Err(format!("{stranger} answered"));
    }
    if wanted.sticky {
        return if counts.len() == 1 { Ok(()) } else { Err(format!("{} hosts answered", counts.len())) };
    }
    match wanted.hosts.iter().find(|host| !counts.contains_key(host.name())) {
        Some(missing) => Err(format!("{missing} never answered")),
        None => Ok(()),
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts of tries are far below 2^52")]
fn shares_lie_in(
    (low, high): (f64, f64),
    counts: &BTreeMap<&str, usize>,
    total: usize,
) -> Result<(), String> {
    for (host, count) in counts {
        let share = *count as f64 / total as f64;
        if !(low..=high).contains(&share) {
            return Err(format!("{host} has {share:.2} of the answers"));
        }
    }
    Ok(())
}

/// The caller's own socket must report the VIP it connected to, unless the flow says otherwise.
fn own_socket_agrees(wanted: Peer, answer: &Answer) -> Result<(), String> {
    if wanted == Peer::Any || answer.reported == answer.destination {
        return Ok(());
    }
    Err(format!("the socket reports {} as its peer, not the VIP", answer.reported))
}

fn source_is(from: Host, wanted: Option<Source>, answer: &Answer) -> Result<(), String> {
    let address = answer.seen.ip();
    let right = match wanted {
        None => true,
        Some(Source::Client) => from.owns(address) || answer.source == Some(address),
        Some(Source::Node) => Host::Node1.owns(address),
    };
    if right { Ok(()) } else { Err(format!("{} saw the client address {address}", answer.host)) }
}

fn all_fail_with(kind: FailureKind, tries: &[Try]) -> Result<(), String> {
    tries.iter().try_for_each(|one| match one {
        Try::Failed(failure) if failure.kind == kind => Ok(()),
        Try::Failed(failure) => Err(describe_failure(failure)),
        Try::Answered(answer) => Err(format!("{} answered", answer.host)),
    })
}

fn refused(failure: &Failure) -> Result<(), String> {
    if failure.kind == FailureKind::Refused { Ok(()) } else { Err(describe_failure(failure)) }
}

fn blocked(failure: &Failure) -> Result<(), String> {
    // An error of another kind is the test's own, and says nothing about the proxy.
    if failure.kind == FailureKind::Other { Err(describe_failure(failure)) } else { Ok(()) }
}

fn holds(wanted: &ExpectPage, page: &Page) -> Result<(), String> {
    if let Some(status) = wanted.status
        && status != page.status
    {
        return Err(format!("status is {}", page.status));
    }
    for (name, value) in &wanted.header {
        match page.headers.get(&name.to_ascii_lowercase()) {
            Some(found) if found == value => {}
            Some(found) => return Err(format!("header {name} is {found:?}")),
            None => return Err(format!("there is no header {name}")),
        }
    }
    if let Some(text) = &wanted.contains
        && !page.body.contains(text.as_str())
    {
        return Err(format!("the body does not contain {text:?}"));
    }
    let Some(json) = &wanted.json else { return Ok(()) };
    let body = serde_json::from_str(&page.body).map_err(|error| format!("the body is no JSON: {error}"))?;
    includes(&body, json, "")
}

/// Whether `whole` has every field of `part`, with the same value.
fn includes(whole: &Value, part: &Value, path: &str) -> Result<(), String> {
    match (whole, part) {
        (Value::Object(fields), Value::Object(wanted)) => wanted.iter().try_for_each(|(name, value)| {
            let path = format!("{path}.{name}");
            match fields.get(name) {
                Some(found) => includes(found, value, &path),
                None => Err(format!("the body has no {path}")),
            }
        }),
        _ if whole == part => Ok(()),
        _ => Err(format!("{path} is {whole}")),
    }
}

fn describe_failure(failure: &Failure) -> String {
    format!("{}: {}", failure.doing, failure.message)
}

/// The first line of a body, for a report.
fn head(body: &str) -> String {
    let mut line: String = body.lines().next().unwrap_or_default().chars().take(120).collect();
    if line.len() < body.trim_end().len() {
        let _infallible = write!(line, "...");
    }
    line
}
