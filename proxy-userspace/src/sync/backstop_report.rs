//! Reports the backstop: as a metric, and as a log line and a Kubernetes Event when it changes.

use super::Outputs;
use crate::{
    causes::with_causes,
    dataplane::{BackstopStatus, RenderError},
    health::SyncTask,
};

/// Logs that a removal failed, once.
pub(super) fn report_errors(errors: &[RenderError], outputs: &Outputs) {
    let Some(error) = errors.first().map(|error| with_causes(error)) else {
        outputs.status.task_succeeded(SyncTask::RemoveBackstop);
        return;
    };
    let before = outputs.status.task_failed(SyncTask::RemoveBackstop, error.clone());
    if before.as_ref() != Some(&error) {
        tracing::warn!(error, "cannot remove the backstop: the next sync tries again");
    }
}

/// Reports a change of what is in place.
pub(super) fn report(backstop: Option<&BackstopStatus>, outputs: &Outputs) {
    let before = outputs.status.set_backstop(backstop.cloned());
    if backstop == before.as_ref() {
        return;
    }
    outputs.metrics.set_backstop(backstop);
    let note = if let Some(BackstopStatus { mode, needs }) = backstop {
        let why = needs.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
        tracing::info!(%mode, why, "the backstop is in place");
        format!("rules of the {mode} mode serve what the programs do not translate: {why}")
    } else {
        tracing::info!("removed the backstop: nothing needs it any more");
        "removed the backstop: nothing needs it any more".to_owned()
    };
    outputs.events.normal("Backstop", note);
}
