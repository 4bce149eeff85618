//! Reads what the kernel alone can tell, where no shunt runs: flows, and connections of sockets.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::{FlowFilter, Resource, Row, connections, flows};
use crate::kernel::{KernelError, bpf::PinDir};

/// Returns the rows of a list without their Services, as JSON. `None` for lists that only a running
/// shunt knows, and if Services select the rows. `pins` is the directory of pins, if there is one.
pub async fn read_without_daemon(
    resource: Resource,
    filter: &FlowFilter,
    pins: &Path,
) -> Option<Result<Vec<Value>, KernelError>> {
    if filter.services().is_some() {
        return None;
    }
    let has_pins = matches!(PinDir::existing(pins), Ok(Some(_)));
    let pins: Option<PathBuf> = has_pins.then(|| pins.to_owned());
    match (resource, pins) {
        (Resource::Flows, pins) => {
            Some(flows::without_daemon(pins, filter.clone()).await.map(|rows| documents(&rows)))
        }
        (Resource::Connections, Some(pins)) => {
            Some(connections::without_daemon(&pins, filter).map(|rows| documents(&rows)))
        }
        _ => None,
    }
}

/// Rows have only texts and numbers as keys and values, so none is left out.
fn documents<T: Row>(rows: &[T]) -> Vec<Value> {
    rows.iter().filter_map(|row| serde_json::to_value(row).ok()).collect()
}
