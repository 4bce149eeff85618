//! `shunt doctor`: finds what is wrong on this node, and says what mends it. It asks the daemon and
//! reads the kernel, and changes nothing.
//!
//! [`gather`] reads the facts. [`checks`] judge them and are pure. [`catalog`] says what each
//! finding means, and what mends it.
#![forbid(unsafe_code)]

mod arguments;
mod bundle;
mod catalog;
mod checks;
mod facts;
mod gather;

use std::fmt;

use serde::Serialize;

use self::catalog::Kind;
pub use self::{
    arguments::{DoctorArguments, command},
    bundle::{BundleError, BundledFile},
};
use crate::{health::WatchReport, kernel::command::Launcher};

/// The exit code if the report cannot be written.
pub const CANNOT_REPORT: u8 = 3;

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Worth knowing. Services work.
    Info,
    /// Services work. Some clients or a later change may meet the problem.
    Warning,
    /// Some or all Services do not work, or are not kept up to date.
    Error,
}

impl Severity {
    const fn label(self) -> &'static str {
        match self {
            Self::Info => "INFO",
            Self::Warning => "WARNING",
            Self::Error => "ERROR",
        }
    }
}

/// Something that a check found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Finding {
    /// The stable identifier.
    pub id: &'static str,
    /// How bad it is.
    pub severity: Severity,
    /// What was found.
    pub message: String,
    /// What it means.
    pub meaning: &'static str,
    /// The command or setting that mends it.
    pub remedy: String,
}

impl Finding {
    fn new(kind: &Kind, message: impl Into<String>) -> Self {
        let Kind { id, severity, meaning, remedy } = *kind;
        Self { id, severity, message: message.into(), meaning, remedy: remedy.to_owned() }
    }

    fn with_remedy(self, remedy: impl Into<String>) -> Self {
        let remedy = remedy.into();
        if remedy.is_empty() { self } else { Self { remedy, ..self } }
    }
}

/// The findings on a node, the worst first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// The mode that runs. `None` without a daemon.
    pub mode: Option<String>,
    /// The watches of the API server, with the time since the last event or bookmark.
    pub watches: Vec<WatchReport>,
    /// The findings.
    pub findings: Vec<Finding>,
}

impl Report {
    fn new(mode: Option<String>, watches: Vec<WatchReport>, mut findings: Vec<Finding>) -> Self {
        findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
        Self { mode, watches, findings }
    }

    /// Returns 2 if there is an error, 1 if there is a warning, and else 0.
    pub fn exit_code(&self) -> u8 {
        match self.findings.iter().map(|finding| finding.severity).max() {
            Some(Severity::Error) => 2,
            Some(Severity::Warning) => 1,
            Some(Severity::Info) | None => 0,
        }
    }

    fn count(&self, severity: Severity) -> usize {
        self.findings.iter().filter(|finding| finding.severity == severity).count()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Finding { id, severity, message, meaning, remedy } in &self.findings {
            writeln!(f, "{:<8} {id}: {}", severity.label(), one_line(message))?;
            writeln!(f, "         Meaning: {meaning}")?;
            writeln!(f, "         Remedy:  {}\n", one_line(remedy))?;
        }
        for WatchReport { kind, connected, seconds_since_event } in &self.watches {
            let state = if *connected { "watched" } else { "not watched" };
            let event =
                seconds_since_event.map_or("none yet".to_owned(), |seconds| format!("{seconds} s ago"));
            writeln!(f, "{kind}: {state}, last event or bookmark: {event}")?;
        }
        let [errors, warnings, infos] =
            [Severity::Error, Severity::Warning, Severity::Info].map(|severity| self.count(severity));
        let mode = self.mode.as_deref().unwrap_or("none");
        writeln!(f, "Mode: {mode}. Errors: {errors}, warnings: {warnings}, other findings: {infos}.")
    }
}

/// Errors of commands can contain line breaks, which must not look like other findings.
fn one_line(text: &str) -> String {
    text.trim().replace(char::is_control, " ")
}

/// What the command does.
#[derive(Debug)]
pub struct Outcome {
    /// The report.
    pub report: Report,
    /// What is in the bug report, if one was asked for.
    pub bundle: Option<Result<Vec<BundledFile>, BundleError>>,
}

/// Reads the facts and judges them, and writes a bug report if that was asked for. Blocks
/// meanwhile.
pub fn run(arguments: &DoctorArguments, launcher: &Launcher) -> Outcome {
    let facts = gather::facts(arguments, launcher);
    let report = checks::judge(&facts);
    let bundle = arguments.bundle.as_deref();
    let bundle = bundle.map(|path| bundle::write(path, &report, &facts.evaluation, launcher));
    Outcome { report, bundle }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finding(severity: Severity) -> Finding {
        Finding { severity, ..Finding::new(&catalog::CHECK_FAILED, "a\nb") }
    }

    #[test]
    fn the_exit_code_is_that_of_the_worst_finding() {
        let code = |severities: &[Severity]| {
            Report::new(None, Vec::new(), severities.iter().copied().map(finding).collect()).exit_code()
        };
        assert_eq!(code(&[]), 0);
        assert_eq!(code(&[Severity::Info]), 0);
        assert_eq!(code(&[Severity::Info, Severity::Warning]), 1);
        assert_eq!(code(&[Severity::Warning, Severity::Error, Severity::Info]), 2);
    }

    #[test]
    fn the_worst_finding_is_printed_first_and_line_breaks_do_not_look_like_findings() {
        let report = Report::new(
            Some("ebpf".into()),
            Vec::new(),
            vec![finding(Severity::Info), finding(Severity::Error)],
        );
        let text = report.to_string();
        assert!(text.starts_with("ERROR    CheckFailed: a b\n         Meaning: "), "{text}");
        let end = "Mode: ebpf. Errors: 1, warnings: 0, other findings: 1.\n";
        assert!(text.ends_with(end), "{text}");
    }
}
