//! Reports the backstop: as a metric, and as a log line and a Kubernetes Event when it changes.

use super::Outputs;
use crate::{
    causes::with_causes,
    dataplane::{BackstopStatus, RenderError},
};

/// Remembers what was reported.
#[derive(Debug, Default)]
pub(super) struct BackstopReport {
    last: Option<BackstopStatus>,
    last_error: Option<String>,
}

impl BackstopReport {
    /// Logs that a removal failed, once.
    pub(super) fn report_errors(&mut self, errors: &[RenderError]) {
        let error = errors.first().map(|error| with_causes(error));
        if let Some(error) = error.as_ref().filter(|error| self.last_error.as_ref() != Some(error)) {
            tracing::warn!(error, "cannot remove the backstop: the next sync tries again");
        }
        self.last_error = error;
    }

    /// Reports a change of what is in place.
    pub(super) fn report(&mut self, backstop: Option<BackstopStatus>, outputs: &Outputs) {
        if backstop == self.last {
            return;
        }
        outputs.metrics.set_backstop(backstop.as_ref());
        let note = if let Some(BackstopStatus { mode, needs }) = &backstop {
            let why = needs.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
            tracing::info!(%mode, why, "the backstop is in place");
            format!("rules of the {mode} mode serve what the programs do not translate: {why}")
        } else {
            tracing::info!("removed the backstop: nothing needs it any more");
            "removed the backstop: nothing needs it any more".to_owned()
        };
        outputs.events.normal("Backstop", note);
        self.last = backstop;
    }
}
