//! When each disturbance began, and what shunt logged when the load failed.

use std::{fmt::Write as _, time::Duration};

use jiff::Timestamp;
use shunt_tests::{deadline::Stopwatch, runner::last_lines};

/// The log that is shown from before and after a failure.
const BEFORE: Duration = Duration::from_secs(6);
const AFTER: Duration = Duration::from_secs(2);
/// The number of failures whose surroundings are shown.
const SHOWN: usize = 3;
/// The number of lines of the log's end that are shown instead.
const END: usize = 40;

/// The disturbances since the load began.
#[derive(Debug)]
pub(super) struct Timeline {
    pub(super) since: Stopwatch,
    began: Timestamp,
    begun: Vec<(f32, &'static str)>,
}

impl Default for Timeline {
    fn default() -> Self {
        Self { since: Stopwatch::start(), began: Timestamp::now(), begun: Vec::new() }
    }
}

impl Timeline {
    /// Returns the seconds since the load began.
    pub(super) fn seconds(&self) -> f32 {
        self.since.elapsed().as_secs_f32()
    }

    /// Records that something begins.
    pub(super) fn begins(&mut self, what: &'static str) {
        self.begun.push((self.seconds(), what));
    }

    /// Returns what was going on when the load failed, with the lines of the log from then.
    /// Without a time in a failure, returns the end of the log.
    pub(super) fn explain<'a>(&self, failures: impl Iterator<Item = &'a String>, log: &str) -> String {
        let mut text = String::new();
        let times = failures.filter_map(|failure| failure.split_once(" s: ")?.0.parse::<f32>().ok());
        for time in times.take(SHOWN) {
            let begun: Vec<String> = self
                .begun
                .iter()
                .filter(|(at, _)| (time - 10.0..time + 1.0).contains(at))
                .map(|(at, what)| format!("{at:.2} s: {what}"))
                .collect();
            _ = writeln!(text, "failure at {time:.2} s; before it: {}; the log:", begun.join(", "));
            let at = self.began + Duration::from_secs_f32(time);
            lines_between(log, at - BEFORE, at + AFTER).for_each(|line| _ = writeln!(text, "{line}"));
        }
        if text.is_empty() {
            text = last_lines(log, END);
        }
        text
    }
}

/// Returns the lines of a log whose times are between two.
fn lines_between(log: &str, from: Timestamp, to: Timestamp) -> impl Iterator<Item = &str> {
    log.lines().filter(move |line| {
        let time = line.split(' ').next().and_then(|time| time.parse::<Timestamp>().ok());
        time.is_some_and(|time| (from..=to).contains(&time))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failure_is_shown_with_what_began_before_it_and_the_log_of_its_time() {
        let began: Timestamp = "2026-11-28T04:41:00Z".parse().expect("a time");
        let timeline =
            Timeline { began, begun: vec![(20.0, "early"), (40.5, "switch")], ..Timeline::default() };
        let log = "2026-11-28T04:41:30.1Z  INFO old\n2026-11-28T04:41:40.2Z  INFO near\nno time";
        let failures = ["41.24 s: udp to 192.0.2.1:1: a saw b".to_owned()];
        let text = timeline.explain(failures.iter(), log);
        assert!(text.starts_with("failure at 41.24 s; before it: 40.50 s: switch; the log:"), "{text}");
        assert!(text.contains("near") && !text.contains("old"), "{text}");
        assert!(timeline.explain(["no time".to_owned()].iter(), log).contains("old"));
    }
}
