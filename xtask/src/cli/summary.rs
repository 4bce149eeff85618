//! The end of the output of `cargo xtask test`: the failures and the table.

use std::fmt;
use std::time::Duration;

use super::counts::Counts;

/// The result of a step.
#[derive(Debug, Clone, Default)]
pub(crate) struct Outcome {
    pub(crate) step: &'static str,
    /// Its tests. A step that failed without a failed test counts as one failed test.
    pub(crate) counts: Counts,
    /// Its failures, each with the lines that explain it.
    pub(crate) failures: Vec<Vec<String>>,
    pub(crate) ok: bool,
    pub(crate) took: Duration,
}

/// All steps, displayed as the failures and a table with the totals as its last line.
#[derive(Debug, Default)]
pub(crate) struct Summary {
    steps: Vec<Outcome>,
    /// What was left out, and why.
    pub(crate) left_out: Vec<String>,
}

impl Summary {
    /// Adds a step.
    pub(crate) fn add(&mut self, mut outcome: Outcome) {
        if !outcome.ok {
            outcome.counts.failed = outcome.counts.failed.max(1);
        }
        self.steps.push(outcome);
    }

    /// Appends all steps of another table.
    pub(crate) fn append(&mut self, other: Self) {
        self.steps.extend(other.steps);
    }

    /// Returns all steps.
    pub(crate) fn steps(&self) -> impl Iterator<Item = &Outcome> {
        self.steps.iter()
    }

    /// Returns the sum over all steps.
    pub(crate) fn totals(&self) -> Counts {
        let mut sum = Counts::default();
        self.steps.iter().for_each(|outcome| sum += outcome.counts);
        sum
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Outcome { step, failures, .. } in &self.steps {
            for failure in failures {
                writeln!(f, "{step}: {}\n", failure.join("\n    "))?;
            }
        }
        self.left_out.iter().try_for_each(|why| writeln!(f, "left out: {why}\n"))?;
        writeln!(f, "{:<26}{:<8}{:>8}{:>8}{:>8}{:>9}", "step", "", "passed", "failed", "ignored", "time")?;
        for Outcome { step, counts, ok, took, .. } in &self.steps {
            let Counts { passed, failed, ignored } = counts;
            let ok = if *ok { "ok" } else { "FAILED" };
            let took = format!("{:.1} s", took.as_secs_f64());
            writeln!(f, "{step:<26}{ok:<8}{passed:>8}{failed:>8}{ignored:>8}{took:>9}")?;
        }
        let totals = self.totals();
        write!(f, "{} passed, {} failed", totals.passed, totals.failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(step: &'static str, passed: u64, failed: u64, ok: bool) -> Outcome {
        let counts = Counts { passed, failed, ..Counts::default() };
        Outcome { step, counts, ok, took: Duration::from_millis(1500), ..Outcome::default() }
    }

    #[test]
    fn last_line_holds_only_the_totals() {
        let mut summary = Summary::default();
        summary.add(outcome("tests", 26, 0, true));
        summary.add(outcome("conformance", 400, 2, false));
        assert_eq!(summary.to_string().lines().last(), Some("426 passed, 2 failed"));
    }

    #[test]
    fn step_that_failed_without_a_failed_test_counts_as_one() {
        let mut summary = Summary::default();
        summary.add(outcome("format", 0, 0, false));
        assert_eq!(summary.totals().failed, 1);
    }

    #[test]
    fn failures_are_shown_before_the_table() {
        let mut summary = Summary::default();
        let failures = vec![vec!["links::one".to_owned(), "no link after 30s".to_owned()]];
        summary.add(Outcome { failures, ..outcome("kernel 5.10", 254, 1, false) });
        let text = summary.to_string();
        assert!(text.starts_with("kernel 5.10: links::one\n    no link after 30s\n\nstep "), "{text}");
    }

    #[test]
    fn what_was_left_out_is_named_above_the_table() {
        let left_out = vec!["helm is missing".to_owned()];
        let text = Summary { left_out, ..Summary::default() }.to_string();
        assert!(text.starts_with("left out: helm is missing\n\nstep "), "{text}");
    }

    #[test]
    fn columns_line_up() {
        let mut summary = Summary::default();
        summary.add(outcome("conformance", 400, 2, false));
        let text = summary.to_string();
        let lengths: Vec<usize> = text.lines().take(2).map(str::len).collect();
        assert_eq!(lengths[0], lengths[1], "{text}");
    }
}
