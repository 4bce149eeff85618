//! Shows the progress of a step: on a terminal a spinner with the last line of output, elsewhere
//! plain lines.

use std::io::{IsTerminal as _, stderr};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use xtask::run::{self, Run};

/// The interval between lines about a running step, if there is no terminal.
const HEARTBEAT: Duration = Duration::from_secs(30);
const SPIN: Duration = Duration::from_millis(100);

/// The spinners of all running steps, so that none draws over another.
static SPINNERS: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);

/// The progress of one step.
pub(crate) struct Progress {
    label: String,
    spinner: Option<ProgressBar>,
    started: Instant,
    said: Instant,
}

impl Progress {
    /// Shows that the step `label` begins.
    pub(crate) fn start(label: &str) -> Self {
        let spinner = stderr().is_terminal().then(|| spinner(label));
        if spinner.is_none() {
            eprintln!("{label} ...");
        }
        let now = run::now();
        Self { label: label.to_owned(), spinner, started: now, said: now }
    }

    /// Shows the step `label` while `work` runs, and whether it succeeded.
    pub(crate) fn during<T>(label: &str, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let mut progress = Self::start(label);
        let done = work(&mut progress);
        progress.end(if done.is_ok() { "done" } else { "FAILED" });
        done
    }

    /// Runs a program as the step `label` and shows its output.
    pub(crate) fn run(label: &str, run: Run) -> Result<()> {
        Self::during(label, |progress| run.check(&mut |line| progress.line(line)).map(drop))
    }

    /// Shows a line of the step's output until the next one.
    pub(crate) fn line(&mut self, line: &str) {
        let line = line.trim();
        match &self.spinner {
            Some(spinner) if !line.is_empty() => spinner.set_message(line.to_owned()),
            None if self.said.elapsed() > HEARTBEAT => {
                self.said = run::now();
                eprintln!("{} ... {} s: {line}", self.label, self.started.elapsed().as_secs());
            }
            _ => {}
        }
    }

    /// Prints a line that stays.
    pub(crate) fn keep(&self, line: &str) {
        match &self.spinner {
            Some(spinner) => spinner.println(line),
            None => eprintln!("{line}"),
        }
    }

    /// Shows how the step ended. Returns its duration.
    pub(crate) fn end(self, outcome: &str) -> Duration {
        let took = self.started.elapsed();
        if let Some(spinner) = &self.spinner {
            spinner.finish_and_clear();
            SPINNERS.remove(spinner);
        }
        SPINNERS.suspend(|| eprintln!("{}: {outcome} ({:.1} s)", self.label, took.as_secs_f64()));
        took
    }
}

/// A line about everything that runs. Where there is no terminal, it is printed on
/// request.
pub(crate) struct Overall {
    bar: Option<ProgressBar>,
    line: Mutex<String>,
}

impl Overall {
    /// Begins to show the line.
    pub(crate) fn start() -> Self {
        Self { bar: stderr().is_terminal().then(|| spinner("all")), line: Mutex::default() }
    }

    /// Replaces the line.
    pub(crate) fn set(&self, line: &str) {
        match &self.bar {
            Some(bar) => bar.set_message(line.to_owned()),
            None => line.clone_into(&mut self.line.lock().unwrap_or_else(PoisonError::into_inner)),
        }
    }

    /// Prints the line if it is not on a terminal.
    pub(crate) fn print(&self) {
        if self.bar.is_none() {
            eprintln!("{}", self.line.lock().unwrap_or_else(PoisonError::into_inner));
        }
    }
}

impl Drop for Overall {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
            SPINNERS.remove(bar);
        }
    }
}

fn spinner(label: &str) -> ProgressBar {
    let spinner = SPINNERS.add(ProgressBar::new_spinner().with_prefix(label.to_owned()));
    let style = ProgressStyle::with_template("{spinner} {prefix} {elapsed:.dim} {wide_msg:.dim}");
    spinner.set_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
    spinner.enable_steady_tick(SPIN);
    spinner
}
