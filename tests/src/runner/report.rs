//! Reports on cases, for people and as JSON.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    time::Duration,
};

use anyhow::Error;
use serde::Serialize;

use crate::{
    case::{Case, Flow},
    flow::FlowResult,
    world::Host,
};

/// The report of a case.
#[derive(Clone, Debug, Serialize)]
pub struct CaseReport {
    /// The name of the case.
    pub name: String,
    /// The reason why the case was skipped, if it was.
    pub left_out: Option<String>,
    /// The flows, in order.
    pub flows: Vec<FlowReport>,
    /// Problems other than failed flows: the proxy did not start, did not stop, or left something
    /// behind.
    pub problems: Vec<String>,
    /// The ends of the logs of the proxies, if anything failed.
    pub log_tails: BTreeMap<Host, String>,
    /// How many packets left before the stack, if links have an XDP program.
    pub sent_before_stack: Option<u64>,
    /// The duration.
    pub took: Duration,
}

/// The report of a flow.
#[derive(Clone, Debug, Serialize)]
pub struct FlowReport {
    /// The step, counted from 1.
    pub step: usize,
    /// The number of the flow in the step, counted from 1.
    pub flow: usize,
    /// The host that acted.
    pub from: Host,
    /// What the host did.
    pub action: String,
    /// What was expected.
    pub wanted: String,
    /// The result.
    pub result: FlowResult,
}

/// Totals over all cases, and the table by case and host.
#[derive(Clone, Debug, Serialize)]
pub struct Summary<'a> {
    passed: usize,
    failed: usize,
    sent_before_stack: Option<u64>,
    took: Duration,
    cases: &'a [CaseReport],
}

#[derive(Clone, Copy, Default)]
struct Counts {
    held: usize,
    failed: usize,
}

impl CaseReport {
    /// Creates the report of a case before it starts.
    pub fn new(case: &Case) -> Self {
        Self {
            name: case.name.clone(),
            left_out: None,
            flows: Vec::new(),
            problems: Vec::new(),
            log_tails: BTreeMap::new(),
            sent_before_stack: None,
            took: Duration::ZERO,
        }
    }

    /// Adds a problem other than a failed flow.
    pub fn add_problem(&mut self, operation: &str, error: &Error) {
        self.problems.push(format!("{operation}: {error:#}"));
    }

    /// Adds the flows from `first_step` on, which did not run because of `error`.
    pub(super) fn add_unrun_flows(&mut self, case: &Case, first_step: usize, error: &Error) {
        for (number, step) in case.steps.iter().enumerate().skip(first_step) {
            for (flow_number, flow) in step.flows.iter().enumerate() {
                let result = not_run(error);
                self.flows.push(FlowReport::new(number, flow_number, flow, result));
            }
        }
    }

    /// Returns the number of flows that held.
    pub fn held(&self) -> usize {
        self.counts().held
    }

    /// Returns the number of failed flows and problems.
    pub fn failed(&self) -> usize {
        self.counts().failed + self.problems.len()
    }

    fn counts(&self) -> Counts {
        self.flows.iter().fold(Counts::default(), |mut counts, flow| {
            counts.add(&flow.result);
            counts
        })
    }

    fn verdict(&self) -> &'static str {
        if self.failed() == 0 { "PASS" } else { "FAIL" }
    }
}

impl FlowReport {
    /// Creates the report of a flow. Step and flow are counted from 0 here.
    pub(super) fn new(step: usize, number: usize, flow: &Flow, result: FlowResult) -> Self {
        Self {
            step: step + 1,
            flow: number + 1,
            from: flow.from,
            action: flow.to_string(),
            wanted: flow.expect.to_string(),
            result,
        }
    }
}

/// Returns the result of a flow that could not run.
pub(super) fn not_run(error: &Error) -> FlowResult {
    FlowResult::Failed { why: "not run".to_owned(), seen: format!("{error:#}") }
}

impl Counts {
    fn add(&mut self, result: &FlowResult) {
        match result {
            FlowResult::Held { .. } => self.held += 1,
            FlowResult::Failed { .. } => self.failed += 1,
        }
    }

    /// Returns the cell of the table: "3", or "1/3 FAIL" if one of three held.
    fn cell(self) -> String {
        match self {
            Self { held: 0, failed: 0 } => String::new(),
            Self { held, failed: 0 } => format!("{held}"),
            Self { held, failed } => format!("{held}/{} FAIL", held + failed),
        }
    }
}

/// Formats one line. A failure also has lines with the step, the flow, the expectation and the
/// proxy's log.
impl fmt::Display for CaseReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(why) = &self.left_out {
            return write!(f, "{:<8}{:<34}{why}", "-", self.name);
        }
        let (held, failed) = (self.held(), self.failed());
        let counts = format!("{held:>3} passed {failed:>3} failed");
        write!(f, "{:<8}{:<34}{counts} {:>6.2} s", self.verdict(), self.name, self.took.as_secs_f32())?;
        for flow in &self.flows {
            match &flow.result {
                FlowResult::Failed { why, seen } => {
                    write!(f, "\n    step {}, flow {}: {}", flow.step, flow.flow, flow.action)?;
                    write!(
                        f,
                        "\n        expected: {}\n        observed: {seen}\n        reason:   {why}",
                        flow.wanted
                    )?;
                }
                FlowResult::Held { late: Some(late) } => {
                    write!(f, "\n    step {}, flow {}: {}", flow.step, flow.flow, flow.action)?;
                    write!(f, "\n        held only after {:.2} s", late.as_secs_f32())?;
                }
                FlowResult::Held { late: None } => {}
            }
        }
        for problem in &self.problems {
            write!(f, "\n    {problem}")?;
        }
        let tails = self.log_tails.iter().filter(|(_, tail)| failed > 0 && !tail.is_empty());
        for (node, tail) in tails {
            write!(f, "\n    the end of the log of the proxy on {node}:")?;
            tail.lines().try_for_each(|line| write!(f, "\n      | {line}"))?;
        }
        Ok(())
    }
}

impl<'a> Summary<'a> {
    /// Creates the summary of cases that took this time together. It has one more failure if links
    /// have an XDP program from which no packet left.
    pub fn new(cases: &'a [CaseReport], took: Duration) -> Self {
        let total = |count: fn(&CaseReport) -> usize| cases.iter().map(count).sum();
        let (passed, failed): (_, usize) = (total(CaseReport::held), total(CaseReport::failed));
        let sent_before_stack = cases.iter().filter_map(|case| case.sent_before_stack).reduce(|a, b| a + b);
        let failed = failed + usize::from(sent_before_stack == Some(0));
        Self { passed, failed, sent_before_stack, took, cases }
    }

    /// Returns true if nothing failed.
    pub fn is_success(&self) -> bool {
        self.failed == 0
    }

    fn table(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hosts: BTreeSet<Host> =
            self.cases.iter().flat_map(|r| r.flows.iter().map(|flow| flow.from)).collect();
        write!(f, "{:<34}", "flows by case and host")?;
        hosts.iter().try_for_each(|host| write!(f, "{host:>10}"))?;
        writeln!(f)?;
        for report in self.cases.iter().filter(|report| report.left_out.is_none()) {
            let mut counts: BTreeMap<Host, Counts> = BTreeMap::new();
            for flow in &report.flows {
                counts.entry(flow.from).or_default().add(&flow.result);
            }
            let mut line = format!("{:<34}", report.name);
            for host in &hosts {
                let cell = counts.get(host).copied().unwrap_or_default().cell();
                line = format!("{line}{cell:>10}");
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }

    fn write_skipped(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut reasons: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for case in self.cases {
            if let Some(why) = &case.left_out {
                reasons.entry(why).or_default().push(&case.name);
            }
        }
        reasons.iter().try_for_each(|(why, names)| writeln!(f, "skipped, {why}: {}", names.join(", ")))
    }
}

/// Formats the table, the skipped cases with the reasons, and the totals in the last line.
impl fmt::Display for Summary<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.table(f)?;
        writeln!(f)?;
        self.write_skipped(f)?;
        let Self { passed, failed, sent_before_stack, took, cases } = self;
        let late = cases
            .iter()
            .flat_map(|case| &case.flows)
            .filter(|flow| matches!(flow.result, FlowResult::Held { late: Some(_) }))
            .count();
        if late > 0 {
            writeln!(f, "{late} of the passed flows held only after a retry")?;
        }
        if let Some(sent) = sent_before_stack {
            writeln!(f, "{sent} packets left before the stack")?;
        }
        let run = cases.iter().filter(|case| case.left_out.is_none()).count();
        writeln!(f, "{run} cases in {:.1} s", took.as_secs_f32())?;
        write!(f, "{passed} passed, {failed} failed")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn run_with_xdp_fails_if_no_packet_left_before_the_stack() {
        let case = "{name: x, about: y, steps: [{}]}".parse().expect("a case");
        let with = |sent: Option<u64>| CaseReport { sent_before_stack: sent, ..CaseReport::new(&case) };
        for (counts, is_success) in [
            ([None, None], true),
            ([Some(0), None], false),
            ([Some(0), Some(0)], false),
            ([Some(0), Some(7)], true),
        ] {
            let reports = counts.map(with);
            assert_eq!(Summary::new(&reports, Duration::ZERO).is_success(), is_success, "{counts:?}");
        }
    }
}
