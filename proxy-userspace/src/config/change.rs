//! What a changed configuration asks for: nothing, something that a running process can do, or another process.

use super::{
    Config, Mode,
    schema::{self, Effect},
};

/// Settings that a running process takes on.
const IN_PLACE: [&str; 9] = [
    "logging.verbosity",
    "shunt.logFilter",
    "nodePortAddresses",
    "iptables.syncPeriod",
    "iptables.minSyncPeriod",
    "nftables.syncPeriod",
    "nftables.minSyncPeriod",
    "ipvs.syncPeriod",
    "ipvs.minSyncPeriod",
];
/// Sizes that a running process takes on where they grow.
const GROWING: &str = "shunt.ebpf.mapSizes.";

/// What differs between two configurations that has an effect, by the settings' paths.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// What a running process takes on.
    pub in_place: Vec<&'static str>,
    /// Among those: room in maps.
    pub grows: bool,
    /// What another process has to be started for.
    pub restart: Vec<&'static str>,
}

impl Change {
    /// What has to be done for `new` to take the place of `old`, in the mode that runs.
    pub fn between(old: &Config, new: &Config) -> Self {
        let mut change = Self::default();
        for path in old.effective.differing(&new.effective) {
            if !has_effect(path, old.mode) {
                continue;
            }
            if path.starts_with(GROWING) {
                let size = |config: &Config| {
                    config.effective.number(path).or_else(|| schema::field(path)?.default.parse().ok())
                };
                let grows = size(old) <= size(new);
                change.grows |= grows;
                (if grows { &mut change.in_place } else { &mut change.restart }).push(path);
            } else if IN_PLACE.contains(&path) {
                change.in_place.push(path);
            } else {
                change.restart.push(path);
            }
        }
        change
    }

    /// Nothing has to be done.
    pub fn is_empty(&self) -> bool {
        self.in_place.is_empty() && self.restart.is_empty()
    }
}

fn has_effect(path: &str, mode: Mode) -> bool {
    match schema::field(path).map(|field| field.effect) {
        Some(Effect::Everywhere) => mode == Mode::Ebpf || !path.starts_with("shunt.ebpf."),
        Some(Effect::In(modes)) => modes.contains(&mode.name()),
        Some(Effect::Nowhere(_)) | None => false,
    }
}
