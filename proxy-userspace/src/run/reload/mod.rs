//! Applies changes of the configuration file: in this process if possible, otherwise by a restart.

#[cfg(test)]
mod tests;

use std::{error::Error, sync::Arc, time::Duration};

use proxy_userspace::{
    causes::with_causes,
    config::{Config, ConfigChange, ConfigError, ConfigFile, Environment, FileWatcher, Flags, ObjectSource},
    health::{ProxyHealth, Status},
    kernel::{KernelError, command::Launcher, hangup::Hangups},
    metrics::Metrics,
    node::NodeEvents,
    sync::{Outputs, SyncPeriods, SyncSettings},
};
use tokio::{sync::watch, time::Instant};

use super::{ModeChoice, log_ineffective_settings, start_check};

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
    launcher: Launcher,
    hangups: Hangups,
    watcher: Option<FileWatcher>,
    /// A changed file that is not applied yet.
    waiting: Option<WaitingFile>,
    /// Why the last file was refused.
    refusal: Option<String>,
    set_log_filter: SetLogFilter,
    health: ProxyHealth,
    metrics: Metrics,
    status: Status,
    events: NodeEvents,
    /// The configuration that runs.
    pub(super) config: Config,
    /// The settings in effect, for `/configz`.
    pub(super) effective: watch::Sender<serde_json::Value>,
    /// The settings of the sync loop.
    pub(super) settings: watch::Sender<SyncSettings>,
}

/// A file that waits because of `shunt.reload.jitter`, or because a start with it would fail now.
struct WaitingFile {
    file: ConfigFile,
    until: Instant,
}

/// When a file with which a start would fail is tried again: what it names may be there by then.
const TRY_AGAIN_AFTER: Duration = Duration::from_mins(1);

/// Why a file cannot be used.
enum Refusal {
    /// Something is wrong with it.
    File(ConfigError),
    /// A start with it would fail now.
    Start(anyhow::Error),
}

impl Reload {
    pub(super) fn new(
        choice: &ModeChoice,
        set_log_filter: SetLogFilter,
        outputs: &Outputs,
    ) -> Result<Self, KernelError> {
        let config = choice.config.clone();
        Ok(Self {
            flags: choice.flags.clone(),
            environment: choice.environment.clone(),
            launcher: choice.launcher.clone(),
            hangups: Hangups::listen()?,
            watcher: config.file.clone().map(FileWatcher::new),
            waiting: None,
            refusal: None,
            set_log_filter,
            health: outputs.health.clone(),
            metrics: outputs.metrics.clone(),
            status: outputs.status.clone(),
            events: outputs.events.clone(),
            effective: watch::Sender::new(config.effective.document()),
            settings: watch::Sender::new(settings(&config, choice.give_up_after())),
            config,
        })
    }

    /// Replaces the configuration that runs.
    pub(super) fn set_config(&mut self, config: Config) {
        self.effective.send_replace(config.effective.document());
        self.config = config;
    }

    /// Applies changes of the file until one needs more. A file that cannot be used is reported and
    /// changes nothing. The waiting file survives if the future is dropped.
    pub(super) async fn watch(&mut self) -> ReloadAction {
        loop {
            let until = self.waiting.as_ref().map(|waiting| waiting.until);
            let action = tokio::select! {
                biased;
                read = next_change(&mut self.watcher) => self.take(read).await,
                () = self.hangups.next() => self.read_again().await,
                () = tokio::time::sleep_until(until.unwrap_or_else(Instant::now)), if until.is_some() => {
                    self.apply_waiting().await
                }
            };
            if let Some(action) = action {
                return action;
            }
        }
    }

    /// Takes a changed file in: checks it at once, and applies it at once or later.
    async fn take(&mut self, read: Result<ConfigFile, ConfigError>) -> Option<ReloadAction> {
        let before = self.waiting.take().map(|waiting| waiting.until);
        let file = match read {
            Ok(file) => file,
            Err(error) => {
                self.refuse(&error);
                return None;
            }
        };
        // It waits already during the check: this future may be dropped.
        let until = before.unwrap_or_else(Instant::now);
        self.waiting = Some(WaitingFile { file: file.clone(), until });
        let new = self.take_waiting().await?;
        let delay = new.reload_jitter.mul_f64(fastrand::f64());
        if delay.is_zero() || ConfigChange::between(&self.config, &new).is_empty() {
            return self.apply(new);
        }
        // A file that keeps changing is not deferred.
        let until = Instant::now() + delay;
        let until = before.map_or(until, |before| before.min(until));
        tracing::info!(
            after = ?until.saturating_duration_since(Instant::now()),
            "the configuration file has changed: it is applied later (shunt.reload.jitter)"
        );
        self.waiting = Some(WaitingFile { file, until });
        None
    }

    /// Reads the file now, and applies it without a delay.
    async fn read_again(&mut self) -> Option<ReloadAction> {
        let Some(watcher) = &mut self.watcher else {
            tracing::info!("SIGHUP is ignored: without --config there is no file to read again");
            return None;
        };
        tracing::info!("SIGHUP: reading the configuration file again");
        match watcher.read() {
            Ok(file) => {
                self.waiting = Some(WaitingFile { file, until: Instant::now() });
                self.apply_waiting().await
            }
            Err(error) => {
                self.waiting = None;
                self.refuse(&error);
                None
            }
        }
    }

    async fn apply_waiting(&mut self) -> Option<ReloadAction> {
        let new = self.take_waiting().await?;
        self.apply(new)
    }

    /// Takes the file that waits, or refuses it. It is loaded again: the mode may have changed
    /// meanwhile. It keeps waiting if the future is dropped.
    async fn take_waiting(&mut self) -> Option<Config> {
        let file = self.waiting.as_ref()?.file.clone();
        let loaded = self.load(file.clone()).await;
        self.waiting = None;
        match loaded {
            Ok(new) => {
                self.accept();
                Some(new)
            }
            Err(Refusal::File(error)) => {
                self.refuse(&error);
                None
            }
            Err(Refusal::Start(error)) => {
                self.waiting = Some(WaitingFile { file, until: Instant::now() + TRY_AGAIN_AFTER });
                self.refuse(error.as_ref());
                None
            }
        }
    }

    /// Reports each refusal once.
    fn refuse(&mut self, error: &(dyn Error + 'static)) {
        let error = with_causes(error);
        if self.refusal.replace(error.clone()).as_ref() == Some(&error) {
            return;
        }
        self.events.warning(
            "ConfigurationRefused",
            format!("cannot use the changed configuration file, the settings stay as they are: {error}"),
        );
        self.metrics.set_configuration_refused(true);
        self.status.set_configuration_refused(Some(error.clone()));
        tracing::error!(
            error,
            "cannot use the changed configuration file: the settings stay as they are; correct the file, or what it \
             names"
        );
    }

    fn accept(&mut self) {
        self.metrics.set_configuration_refused(false);
        self.status.set_configuration_refused(None);
        if self.refusal.take().is_some() {
            self.events.normal("ConfigurationAccepted", "the configuration file can be used again");
        }
    }

    /// Loads a file for the mode that runs: a change of the file alone does not change what `auto`
    /// chooses. If it needs a restart, checks that a start would not fail.
    async fn load(&self, file: ConfigFile) -> Result<Config, Refusal> {
        let new = Config::load_from(&self.flags, Some(file), &self.environment, self.config.mode)
            .map_err(Refusal::File)?;
        if !ConfigChange::between(&self.config, &new).restart.is_empty() {
            let (flags, environment) = (self.flags.clone(), self.environment.clone());
            let (launcher, config) = (self.launcher.clone(), new.clone());
            let choose = move || Ok(ModeChoice::of(config, flags, environment, launcher)?);
            let checked = start_check::check(&self.config, &new, &self.environment.proxies, choose).await;
            checked.map_err(Refusal::Start)?;
        }
        Ok(new)
    }

    fn apply(&mut self, new: Config) -> Option<ReloadAction> {
        let change = ConfigChange::between(&self.config, &new);
        if change.is_empty() {
            tracing::info!("the configuration file has no change with an effect in this mode");
            if new.ineffective != self.config.ineffective {
                log_ineffective_settings(&new);
            }
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

/// Waits for a change of the file, if there is one.
async fn next_change(watcher: &mut Option<FileWatcher>) -> Result<ConfigFile, ConfigError> {
    match watcher {
        Some(watcher) => watcher.next().await,
        None => std::future::pending().await,
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
