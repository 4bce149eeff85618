//! Follows the configuration file: what a running process can take on it does, and for the rest another is started.

use std::time::Duration;

use proxy_userspace::{
    causes::with_causes,
    config::{Change, Config, ConfigError, ConfigFile, Environment, FileChanges, Flags, ObjectSource},
    health::ProxyHealth,
    sync::{SyncPeriods, SyncSettings},
};
use tokio::sync::watch;

use super::{Chosen, tell_what_is_in_vain};

/// Sets which logs are written.
pub(crate) type LogFilter = Box<dyn Fn(&str) + Send + Sync>;

/// What a changed file asks for that the parts that run cannot take on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asked {
    /// The dataplane made anew, in this process.
    Rebuild,
    /// Another process.
    Restart,
}

/// The file, and those that take its changes on.
pub(super) struct Reload {
    flags: Flags,
    environment: Environment,
    changes: Option<FileChanges>,
    set_log_filter: LogFilter,
    health: ProxyHealth,
    /// What runs; written anew with each change.
    pub(super) config: Config,
    /// To the sync loop.
    pub(super) settings: watch::Sender<SyncSettings>,
}

impl Reload {
    pub(super) fn new(chosen: &Chosen, set_log_filter: LogFilter, health: ProxyHealth) -> Self {
        let (flags, environment) = chosen.origin();
        let config = chosen.config.clone();
        let changes = config.file.clone().map(FileChanges::since);
        let settings = watch::Sender::new(settings(&config, chosen.give_up_after()));
        Self { flags, environment, changes, set_log_filter, health, config, settings }
    }

    /// Takes changes on until one asks for more. A file that cannot be used is told of, and changes nothing.
    pub(super) async fn follow(&mut self) -> Asked {
        loop {
            let Some(changes) = &mut self.changes else { return std::future::pending().await };
            let read = changes.next().await.and_then(|file| self.load(file));
            match read {
                Ok(new) => {
                    if let Some(asked) = self.take_on(new) {
                        return asked;
                    }
                }
                Err(error) => tracing::error!(
                    error = with_causes(&error),
                    "the changed configuration file cannot be used; the settings stay as they are"
                ),
            }
        }
    }

    /// For the mode that runs: what auto takes does not change with the file alone.
    fn load(&self, file: ConfigFile) -> Result<Config, ConfigError> {
        Config::load_from(&self.flags, Some(file), &self.environment, self.config.mode)
    }

    fn take_on(&mut self, new: Config) -> Option<Asked> {
        let change = Change::between(&self.config, &new);
        if change.is_empty() {
            tracing::info!("the configuration file has changed, but nothing that has an effect here");
            self.config = new;
            return None;
        }
        if !change.restart.is_empty() {
            let settings = change.restart.join(", ");
            tracing::info!(
                settings,
                "the configuration file has changed: starting anew; Services go on working"
            );
            return Some(Asked::Restart);
        }
        tracing::info!(settings = change.in_place.join(", "), "the configuration file has changed: taken on");
        tell_what_is_in_vain(&new);
        (self.set_log_filter)(&new.log_filter);
        self.health.set_timeout(new.sync_period * 2);
        let give_up_after = self.settings.borrow().periods.give_up_after;
        self.settings.send_replace(settings(&new, give_up_after));
        self.config = new;
        change.grows.then_some(Asked::Rebuild)
    }
}

/// What a configuration means to the sync loop.
pub(super) fn settings(config: &Config, give_up_after: Option<Duration>) -> SyncSettings {
    let Config { min_sync_period, sync_period, .. } = *config;
    let wait_for_node = matches!(config.source, ObjectSource::Api { .. });
    SyncSettings {
        model: config.model.clone(),
        periods: SyncPeriods { min_sync_period, sync_period, give_up_after, wait_for_node },
    }
}
