//! Applies changes of the configuration file: in this process if possible, otherwise by a restart.

use std::{sync::Arc, time::Duration};

use proxy_userspace::{
    causes::with_causes,
    config::{Config, ConfigChange, ConfigError, ConfigFile, Environment, FileWatcher, Flags, ObjectSource},
    health::ProxyHealth,
    sync::{SyncPeriods, SyncSettings},
};
use tokio::sync::watch;

use super::{ModeChoice, log_ineffective_settings};

/// Sets the log filter.
pub(crate) type SetLogFilter = Arc<dyn Fn(&str) + Send + Sync>;

/// What a changed file needs that running parts cannot do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReloadAction {
    /// Create the dataplane again, in this process.
    RebuildDataplane,
    /// Start a new process.
    Restart,
}

/// Watches the configuration file and passes changes to the parts that apply them.
pub(super) struct Reload {
    flags: Flags,
    environment: Environment,
    watcher: Option<FileWatcher>,
    set_log_filter: SetLogFilter,
    health: ProxyHealth,
    /// The configuration that runs.
    pub(super) config: Config,
    /// The settings in effect, for `/configz`.
    pub(super) effective: watch::Sender<serde_json::Value>,
    /// The settings of the sync loop.
    pub(super) settings: watch::Sender<SyncSettings>,
}

impl Reload {
    pub(super) fn new(choice: &ModeChoice, set_log_filter: SetLogFilter, health: ProxyHealth) -> Self {
        let config = choice.config.clone();
        Self {
            flags: choice.flags.clone(),
            environment: choice.environment.clone(),
            watcher: config.file.clone().map(FileWatcher::new),
            set_log_filter,
            health,
            effective: watch::Sender::new(config.effective.document()),
            settings: watch::Sender::new(settings(&config, choice.give_up_after())),
            config,
        }
    }

    /// Replaces the configuration that runs.
    pub(super) fn set_config(&mut self, config: Config) {
        self.effective.send_replace(config.effective.document());
        self.config = config;
    }

    /// Applies changes of the file until one needs more. An invalid file is logged and changes
    /// nothing.
    pub(super) async fn watch(&mut self) -> ReloadAction {
        loop {
            let Some(watcher) = &mut self.watcher else { return std::future::pending().await };
            let read = watcher.next().await.and_then(|file| self.load(file));
            match read {
                Ok(new) => {
                    if let Some(action) = self.apply(new) {
                        return action;
                    }
                }
                Err(error) => tracing::error!(
                    error = with_causes(&error),
                    "cannot use the changed configuration file: the settings stay as they are; correct the file"
                ),
            }
        }
    }

    /// Loads a file for the mode that runs: a change of the file alone does not change what `auto`
    /// chooses.
    fn load(&self, file: ConfigFile) -> Result<Config, ConfigError> {
        Config::load_from(&self.flags, Some(file), &self.environment, self.config.mode)
    }

    fn apply(&mut self, new: Config) -> Option<ReloadAction> {
        let change = ConfigChange::between(&self.config, &new);
        if change.is_empty() {
            tracing::info!("the configuration file has changed, without an effect in this mode");
            self.set_config(new);
            return None;
        }
        if !change.restart.is_empty() {
            let settings = change.restart.join(", ");
            tracing::info!(settings, "the configuration file has changed: restarting; Services keep working");
            return Some(ReloadAction::Restart);
        }
        let settings = change.in_place.join(", ");
        tracing::info!(settings, "the configuration file has changed: applied without a restart");
        log_ineffective_settings(&new);
        (self.set_log_filter)(&new.log_filter);
        self.health.set_timeout(new.sync_period * 2);
        let give_up_after = self.settings.borrow().periods.give_up_after;
        self.settings.send_replace(self::settings(&new, give_up_after));
        self.set_config(new);
        change.maps_grow.then_some(ReloadAction::RebuildDataplane)
    }
}

/// Returns the settings of the sync loop.
pub(super) fn settings(config: &Config, give_up_after: Option<Duration>) -> SyncSettings {
    let Config { min_sync_period, sync_period, .. } = *config;
    let wait_for_node = matches!(config.source, ObjectSource::Api { .. });
    SyncSettings {
        model: config.model.clone(),
        periods: SyncPeriods { min_sync_period, sync_period, give_up_after, wait_for_node },
    }
}
