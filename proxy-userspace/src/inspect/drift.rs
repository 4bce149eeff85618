//! Compares the kernel with what was written, when somebody asks.

use std::sync::Arc;

use super::{gather::port_name, kernel_rows::DriftRow, rows::NamedPort};
use crate::{
    causes::with_causes,
    dataplane::Held,
    model::{IpFamily, ServicePortKey, UnixNanos},
    sync::{Inspected, Inspector, NoAnswer},
};

/// Why the kernel cannot be compared.
#[derive(Debug, thiserror::Error)]
pub(super) enum DriftError {
    /// The loop does not answer.
    #[error(transparent)]
    NoAnswer(#[from] NoAnswer),
    /// Nothing is programmed, or not all of it.
    #[error("what the kernel should hold is not known: shunt starts, or its last sync failed")]
    Unknown,
    /// The kernel cannot be read.
    #[error("cannot read what the kernel holds: {0}")]
    Unread(String),
}

/// What the kernel held when somebody asked.
#[derive(Clone)]
pub(super) struct Drift {
    held: Arc<Held>,
    /// When the reading began.
    since: UnixNanos,
}

impl Drift {
    /// Reads the kernel, on a thread of its own.
    pub(super) async fn read(inspector: &Inspector) -> Result<Self, DriftError> {
        let found = inspector.read(|inspected| Some((inspected.now(), inspected.held_reader()?))).await?;
        let (since, reader) = found.ok_or(DriftError::Unknown)?;
        let read = tokio::task::spawn_blocking(reader).await;
        let held = read.map_err(|error| DriftError::Unread(error.to_string()))?;
        let held = held.map_err(|error| DriftError::Unread(with_causes(&error)))?;
        Ok(Self { held: Arc::new(held), since })
    }

    /// Returns what differs of a service port. `None` if it is left out, waits, is of a family that
    /// fails, or changed since the reading began.
    pub(super) fn of(&self, inspected: &Inspected<'_>, key: &ServicePortKey) -> Option<Vec<String>> {
        if inspected.is_failing(key.family) {
            return None;
        }
        inspected.programmed(key).filter(|at| *at < self.since && !inspected.left_out().contains_key(key))?;
        inspected.differences(&self.held, Some(key))
    }

    /// Returns a row for each difference of a service port.
    pub(super) fn rows(&self, inspected: &Inspected<'_>, key: &ServicePortKey) -> Vec<DriftRow> {
        rows(Some(&port_name(key)), self.of(inspected, key))
    }

    /// Returns a row for each difference of what all service ports share, and for each family that
    /// cannot be compared.
    pub(super) fn rows_of_node(&self, inspected: &Inspected<'_>) -> Vec<DriftRow> {
        let unknown = IpFamily::ALL.into_iter().filter_map(|family| unknown(inspected, family));
        let not_compared = |difference| DriftRow { port: None, difference, not_compared: true };
        let mut rows = rows(None, Some(self.of_node(inspected)));
        rows.extend(unknown.map(not_compared));
        rows
    }

    /// Returns what differs of what all service ports share.
    pub(super) fn of_node(&self, inspected: &Inspected<'_>) -> Vec<String> {
        inspected.differences(&self.held, None).unwrap_or_default()
    }
}

/// Returns why a family cannot be compared, if so.
pub(super) fn unknown(inspected: &Inspected<'_>, family: IpFamily) -> Option<String> {
    let why = || format!("{family}: what the kernel should hold is not known, because its last sync failed");
    inspected.is_failing(family).then(why)
}

fn rows(port: Option<&NamedPort>, differences: Option<Vec<String>>) -> Vec<DriftRow> {
    let differences = differences.unwrap_or_default().into_iter();
    let row = |difference| DriftRow { port: port.cloned(), difference, not_compared: false };
    differences.map(row).collect()
}
