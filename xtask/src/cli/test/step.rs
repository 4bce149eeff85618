//! A step of `cargo xtask test`: a command whose output is counted, logged and shown.

use std::fs::File;
use std::io::Write as _;

use anyhow::{Context as _, Result};
use xtask::run::Run;
use xtask::warnings::Warnings;
use xtask::workspace;

use super::live::Live;
use crate::cli::counts::Counts;
use crate::cli::failures::Failures;
use crate::cli::progress::Progress;
use crate::cli::summary::Outcome;

/// Reads numbers of tests from a line of output.
pub(super) type Count = fn(&str) -> Option<Counts>;

/// A step: its name, its command, and how its output is read.
#[derive(Clone)]
pub(super) struct Step {
    pub(super) name: &'static str,
    pub(super) run: Run,
    /// How to count its tests, if it runs tests. A runner that prints no numbers has not run.
    pub(super) count: Option<Count>,
    /// True if its lines stay on the screen.
    pub(super) echo: bool,
    /// True if a warning of the compiler fails the step. Cargo also prints the warnings of what it
    /// built before.
    pub(super) denies_warnings: bool,
}

impl Step {
    pub(super) fn plain(name: &'static str, run: Run) -> Self {
        Self { name, run, count: None, echo: false, denies_warnings: false }
    }

    pub(super) fn counted(name: &'static str, run: Run, count: Count) -> Self {
        Self { count: Some(count), ..Self::plain(name, run) }
    }

    /// Runs the command. Only an error of xtask itself is returned: a step that fails is an
    /// outcome.
    pub(super) fn run_to_end(self, live: &Live) -> Result<Outcome> {
        let path = workspace::logs().join(format!("{}.log", self.name.replace(' ', "-")));
        let mut log = File::create(&path).with_context(|| format!("cannot write {}", path.display()))?;
        let mut progress = Progress::start(self.name);
        let mut counts = None;
        let mut failures = Failures::default();
        let mut warnings = Warnings::default();
        let ended = self.run.watch(&mut |line| {
            if let Some(more) = self.count.and_then(|count| count(line)) {
                *counts.get_or_insert_default() += more;
                live.count(more);
            }
            if self.echo {
                progress.keep(line);
            }
            progress.line(line);
            failures.line(line);
            if self.denies_warnings {
                warnings.take(line);
            }
            // An incomplete log must not fail the step.
            drop(writeln!(log, "{line}"));
        });
        let missing = self.count.is_some() && counts.is_none();
        let counts: Counts = counts.unwrap_or_default();
        let complaint = match ended {
            Err(error) => Some(format!("{error:#}")),
            Ok(finished) if !finished.status.success() => {
                Some(format!("{}\n{}", finished.tail, finished.status))
            }
            Ok(_) if warnings.are_of_compiler => Some(warnings.lines.join("\n")),
            Ok(_) if missing => Some("it printed no result".to_owned()),
            Ok(_) => None,
        };
        let ok = complaint.is_none() && counts.failed == 0;
        if let Some(complaint) = complaint {
            progress.keep(&format!("{complaint}\n(the whole output is in {})", path.display()));
        }
        let took = progress.end(verdict(ok));
        live.end(self.name, ok);
        Ok(Outcome { step: self.name, counts, failures: failures.all, ok, took })
    }
}

pub(super) fn verdict(ok: bool) -> &'static str {
    if ok { "ok" } else { "FAILED" }
}

#[cfg(test)]
mod tests {
    use super::super::plan::Plan;
    use super::*;

    #[test]
    fn warning_of_the_compiler_fails_a_step_that_denies_warnings() {
        std::fs::create_dir_all(workspace::logs()).unwrap();
        let live = Live::start(Plan::default(), 1);
        let ends_well = |denies_warnings, line: &str| {
            let run = Run::new("echo").arg(line);
            let step = Step { denies_warnings, ..Step::plain("step with a warning", run) };
            step.run_to_end(&live).unwrap().ok
        };
        let warning = "warning: `shunt` (lib) generated 1 warning";
        assert!(!ends_well(true, warning));
        assert!(ends_well(false, warning));
        assert!(ends_well(true, "warning: spurious network error (3 tries remaining)"));
    }
}
