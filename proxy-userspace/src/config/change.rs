//! Compares two configurations: what a running process can apply, and what needs a restart.

use super::{
    resolved::Config,
    schema::{self, UsedBy},
};
use crate::mode::Mode;

/// Settings that a running process applies.
const IN_PLACE: [&str; 10] = [
    "logging.verbosity",
    "shunt.logFilter",
    "shunt.reload.jitter",
    "nodePortAddresses",
    "iptables.syncPeriod",
    "iptables.minSyncPeriod",
    "nftables.syncPeriod",
    "nftables.minSyncPeriod",
    "ipvs.syncPeriod",
    "ipvs.minSyncPeriod",
];

/// The settings that differ between two configurations and have an effect, by path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConfigChange {
    /// Settings that a running process can apply.
    pub in_place: Vec<&'static str>,
    /// Some of these are sizes of maps, which grow.
    pub maps_grow: bool,
    /// Settings that need a restart.
    pub restart: Vec<&'static str>,
}

impl ConfigChange {
    /// Returns the change from `old` to `new`, in the mode that runs.
    pub fn between(old: &Config, new: &Config) -> Self {
        let mut change = Self::default();
        for path in old.effective.differing(&new.effective) {
            if !has_effect(path, old.mode) {
                continue;
            }
            let is_growth = path.starts_with(schema::MAP_SIZES) && size(old, path) <= size(new, path);
            change.maps_grow |= is_growth;
            let is_in_place = is_growth || IN_PLACE.contains(&path);
            (if is_in_place { &mut change.in_place } else { &mut change.restart }).push(path);
        }
        change
    }

    /// Returns true if nothing has to be done.
    pub fn is_empty(&self) -> bool {
        self.in_place.is_empty() && self.restart.is_empty()
    }
}

/// Returns the size of a map.
fn size(config: &Config, path: &str) -> Option<u64> {
    let given = config.effective.value(path).and_then(serde_json::Value::as_u64);
    given.or_else(|| schema::field(path)?.default.parse().ok())
}

fn has_effect(path: &str, mode: Mode) -> bool {
    match schema::field(path).map(|field| field.used_by) {
        Some(UsedBy::AllModes) => mode == Mode::Ebpf || !path.starts_with("shunt.ebpf."),
        Some(UsedBy::Modes(modes)) => modes.contains(&mode),
        Some(UsedBy::Nothing(_)) | None => false,
    }
}
