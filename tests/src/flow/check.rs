//! Compares the observation of a flow with its expectation. Pure: no clock, no sockets.

use std::{collections::BTreeMap, fmt::Write as _, net::SocketAddr};

use serde_json::Value;

use crate::{
    agent::protocol::{Answer, Attempt, Failure, FailureKind, Page},
    case::{Expectation, ExpectedAnswers, ExpectedPage, Peer, Source},
    world::Host,
};

/// What a flow observed.
#[derive(Clone, Debug, PartialEq)]
pub enum Observation {
    /// The attempts of a connection request.
    Attempts(Vec<Attempt>),
    /// The page of a GET.
    Page(Result<Page, Failure>),
}

/// Compares an observation with the expectation. The error says in a few words how they differ.
pub fn check(from: Host, expect: &Expectation, observed: &Observation) -> Result<(), String> {
    match (expect, observed) {
        (_, Observation::Attempts(attempts)) if attempts.is_empty() => Err("there was no attempt".to_owned()),
        (Expectation::Reach(answers), Observation::Attempts(attempts)) => {
            check_reach(from, answers, attempts)
        }
        (Expectation::Refused, Observation::Attempts(attempts)) => {
            all_fail_with(FailureKind::Refused, attempts)
        }
        (Expectation::Blocked, Observation::Attempts(attempts)) => {
            attempts.iter().try_for_each(|one| match one {
                Attempt::Failed(failure) => check_blocked(failure),
                Attempt::Answered(answer) => Err(format!("{} answered", answer.host)),
            })
        }
        (Expectation::Silent, Observation::Attempts(attempts)) => {
            all_fail_with(FailureKind::TimedOut, attempts)
        }
        (Expectation::Reset, Observation::Attempts(attempts)) => all_fail_with(FailureKind::Reset, attempts),
        (Expectation::TooBig, Observation::Attempts(attempts)) => {
            all_fail_with(FailureKind::TooBig, attempts)
        }
        (Expectation::Refused, Observation::Page(Err(failure))) => check_refused(failure),
        (Expectation::Blocked, Observation::Page(Err(failure))) => check_blocked(failure),
        (Expectation::Refused | Expectation::Blocked, Observation::Page(Ok(page))) => {
            Err(format!("answered with {}", page.status))
        }
        (Expectation::Page(expected), Observation::Page(Ok(page))) => check_page(expected, page),
        (Expectation::Page(_), Observation::Page(Err(failure))) => Err(failure.to_string()),
        (Expectation::Page(_), Observation::Attempts(_))
        | (
            Expectation::Reach(_) | Expectation::Silent | Expectation::Reset | Expectation::TooBig,
            Observation::Page(_),
        ) => Err("the flow's expectation does not fit its action".to_owned()),
    }
}

/// Returns a summary for reports: "12 x a1 saw 10.244.1.12; 1 x connect: Connection refused".
pub fn describe(observed: &Observation) -> String {
    match observed {
        Observation::Page(Ok(page)) => {
            format!("status {}, {} bytes: {}", page.status, page.body.len(), head(&page.body))
        }
        Observation::Page(Err(failure)) => failure.to_string(),
        Observation::Attempts(attempts) => {
            let mut counts: BTreeMap<(bool, String), usize> = BTreeMap::new();
            for one in attempts {
                let (failed, text) = match one {
                    Attempt::Answered(answer) => {
                        (false, format!("{} saw {}", answer.host, answer.client.ip()))
                    }
                    Attempt::Failed(failure) => (true, failure.to_string()),
                };
                *counts.entry((failed, text)).or_default() += 1;
            }
            let parts: Vec<_> = counts.iter().map(|((_, text), count)| format!("{count} x {text}")).collect();
            parts.join("; ")
        }
    }
}

/// Returns true if an attempt failed with an error that came at once, not with silence.
pub(super) fn is_prompt_error(one: &Attempt) -> bool {
    matches!(one, Attempt::Failed(Failure { kind, .. }) if [FailureKind::Refused, FailureKind::Reset, FailureKind::Unreachable].contains(kind))
}

fn check_reach(from: Host, expected: &ExpectedAnswers, attempts: &[Attempt]) -> Result<(), String> {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for one in attempts {
        match one {
            Attempt::Failed(failure) => return Err(failure.to_string()),
            Attempt::Answered(answer) => {
                check_peer(expected.peer, answer)?;
                check_source(from, expected.source, answer)?;
                check_original(expected.original, answer)?;
                *counts.entry(answer.host.as_str()).or_default() += 1;
            }
        }
    }
    check_hosts(expected, &counts)?;
    match expected.share {
        Some(range) => check_shares(range, &counts, attempts.len()),
        None => Ok(()),
    }
}

fn check_hosts(expected: &ExpectedAnswers, counts: &BTreeMap<&str, usize>) -> Result<(), String> {
    let is_expected = |name: &&str| expected.hosts.iter().any(|host| host.name() == *name);
    if let Some(unexpected) = counts.keys().find(|name| !is_expected(name)) {
        return Err(format!("{unexpected} answered"));
    }
    if expected.sticky {
        return if counts.len() == 1 { Ok(()) } else { Err(format!("{} hosts answered", counts.len())) };
    }
    match expected.hosts.iter().find(|host| !counts.contains_key(host.name())) {
        Some(missing) => Err(format!("{missing} never answered")),
        None => Ok(()),
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts of attempts are far below 2^52")]
fn check_shares((low, high): (f64, f64), counts: &BTreeMap<&str, usize>, total: usize) -> Result<(), String> {
    for (host, count) in counts {
        let share = *count as f64 / total as f64;
        if !(low..=high).contains(&share) {
            return Err(format!("{host} has {share:.2} of the answers"));
        }
    }
    Ok(())
}

/// The caller's socket must report the destination as its peer, unless the flow says otherwise.
fn check_peer(expected: Peer, answer: &Answer) -> Result<(), String> {
    if expected == Peer::Any || answer.peer == answer.destination {
        return Ok(());
    }
    Err(format!("the socket reports {} as its peer, not the VIP", answer.peer))
}

fn check_source(from: Host, expected: Option<Source>, answer: &Answer) -> Result<(), String> {
    let address = answer.client.ip();
    let right = match expected {
        None => true,
        Some(Source::Client) => from.owns(address) || answer.source == Some(address),
        Some(Source::Node) => Host::Node1.owns(address),
    };
    if right { Ok(()) } else { Err(format!("{} saw the client address {address}", answer.host)) }
}

fn check_original(expected: Option<SocketAddr>, answer: &Answer) -> Result<(), String> {
    if expected.is_none() || expected == answer.original {
        return Ok(());
    }
    let saw = answer.original.map_or_else(|| "no".to_owned(), |original| original.to_string());
    Err(format!("{} saw {saw} original destination", answer.host))
}

fn all_fail_with(kind: FailureKind, attempts: &[Attempt]) -> Result<(), String> {
    attempts.iter().try_for_each(|one| match one {
        Attempt::Failed(failure) if failure.kind == kind => Ok(()),
        Attempt::Failed(failure) => Err(failure.to_string()),
        Attempt::Answered(answer) => Err(format!("{} answered", answer.host)),
    })
}

fn check_refused(failure: &Failure) -> Result<(), String> {
    if failure.kind == FailureKind::Refused { Ok(()) } else { Err(failure.to_string()) }
}

fn check_blocked(failure: &Failure) -> Result<(), String> {
    // An error of another kind is a problem of the test and says nothing about the proxy.
    if failure.kind == FailureKind::Other { Err(failure.to_string()) } else { Ok(()) }
}

fn check_page(expected: &ExpectedPage, page: &Page) -> Result<(), String> {
    if let Some(status) = expected.status
        && status != page.status
    {
        return Err(format!("status is {}", page.status));
    }
    for (name, value) in &expected.header {
        match page.headers.get(&name.to_ascii_lowercase()) {
            Some(found) if found == value => {}
            Some(found) => return Err(format!("header {name} is {found:?}")),
            None => return Err(format!("there is no header {name}")),
        }
    }
    if let Some(text) = &expected.contains
        && !page.body.contains(text.as_str())
    {
        return Err(format!("the body does not contain {text:?}"));
    }
    let Some(json) = &expected.json else { return Ok(()) };
    let body = serde_json::from_str(&page.body).map_err(|error| format!("the body is not JSON: {error}"))?;
    check_json(&body, json, "")
}

/// Returns an error unless `whole` has every field of `part` with the same value.
fn check_json(whole: &Value, part: &Value, path: &str) -> Result<(), String> {
    match (whole, part) {
        (Value::Object(fields), Value::Object(expected)) => expected.iter().try_for_each(|(name, value)| {
            let path = format!("{path}.{name}");
            match fields.get(name) {
                Some(found) => check_json(found, value, &path),
                None => Err(format!("the body has no {path}")),
            }
        }),
        _ if whole == part => Ok(()),
        _ => Err(format!("{path} is {whole}")),
    }
}

/// Returns the first line of a body, for a report.
fn head(body: &str) -> String {
    let mut line: String = body.lines().next().unwrap_or_default().chars().take(120).collect();
    if line.len() < body.trim_end().len() {
        let _infallible = write!(line, "...");
    }
    line
}
