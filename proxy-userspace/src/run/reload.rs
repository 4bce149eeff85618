//! Applies changes of the configuration file: in this process if possible, otherwise by a restart.

use std::{sync::Arc, time::Duration};

use proxy_userspace::{
    causes::with_causes,
    config::{Config, ConfigChange, ConfigError, ConfigFile, Environment, FileWatcher, Flags, ObjectSource},
    health::ProxyHealth,
    metrics::Metrics,
    node::NodeEvents,
    sync::{Outputs, SyncPeriods, SyncSettings},
};
use tokio::{sync::watch, time::Instant};

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
    /// A changed file that is not applied yet.
    waiting: Option<WaitingFile>,
    is_refused: bool,
    set_log_filter: SetLogFilter,
    health: ProxyHealth,
    metrics: Metrics,
    events: NodeEvents,
    /// The configuration that runs.
    pub(super) config: Config,
    /// The settings in effect, for `/configz`.
    pub(super) effective: watch::Sender<serde_json::Value>,
    /// The settings of the sync loop.
    pub(super) settings: watch::Sender<SyncSettings>,
}

/// A file that waits because of `shunt.reload.jitter`.
struct WaitingFile {
    file: ConfigFile,
    until: Instant,
}

impl Reload {
    pub(super) fn new(choice: &ModeChoice, set_log_filter: SetLogFilter, outputs: &Outputs) -> Self {
        let config = choice.config.clone();
        Self {
            flags: choice.flags.clone(),
            environment: choice.environment.clone(),
            watcher: config.file.clone().map(FileWatcher::new),
            waiting: None,
            is_refused: false,
            set_log_filter,
            health: outputs.health.clone(),
            metrics: outputs.metrics.clone(),
            events: outputs.events.clone(),
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

    /// Applies changes of the file until one needs more. A file that cannot be used is reported and
    /// changes nothing. The waiting file survives if the future is dropped.
    pub(super) async fn watch(&mut self) -> ReloadAction {
        loop {
            let Some(watcher) = &mut self.watcher else { return std::future::pending().await };
            let until = self.waiting.as_ref().map(|waiting| waiting.until);
            let changed = tokio::select! {
                biased;
                read = watcher.next() => Some(read),
                () = tokio::time::sleep_until(until.unwrap_or_else(Instant::now)), if until.is_some() => None,
            };
            let action = match changed {
                Some(read) => self.take(read),
                None => self.apply_waiting(),
            };
            if let Some(action) = action {
                return action;
            }
        }
    }

    /// Takes a changed file in: checks it at once, and applies it at once or later.
    fn take(&mut self, read: Result<ConfigFile, ConfigError>) -> Option<ReloadAction> {
        let loaded = read.and_then(|file| Ok((self.load(file.clone())?, file)));
        let waiting = self.waiting.take();
        let (new, file) = match loaded {
            Ok(loaded) => loaded,
            Err(error) => {
                self.refuse(&error);
                return None;
            }
        };
        self.accept();
        let delay = new.reload_jitter.mul_f64(fastrand::f64());
        if delay.is_zero() || ConfigChange::between(&self.config, &new).is_empty() {
            return self.apply(new);
        }
        // A file that keeps changing is not deferred.
        let until = Instant::now() + delay;
        let until = waiting.map_or(until, |waiting| waiting.until.min(until));
        tracing::info!(
            after = ?until.saturating_duration_since(Instant::now()),
            "the configuration file has changed: it is applied later (shunt.reload.jitter)"
        );
        self.waiting = Some(WaitingFile { file, until });
        None
    }

    /// Applies the file that waited. It is loaded again: the mode may have changed meanwhile.
    fn apply_waiting(&mut self) -> Option<ReloadAction> {
        let WaitingFile { file, .. } = self.waiting.take()?;
        match self.load(file) {
            Ok(new) => self.apply(new),
            Err(error) => {
                self.refuse(&error);
                None
            }
        }
    }

    fn refuse(&mut self, error: &ConfigError) {
        let error = with_causes(error);
        self.events.warning(
            "ConfigurationRefused",
            format!("cannot use the changed configuration file, the settings stay as they are: {error}"),
        );
        self.metrics.set_configuration_refused(true);
        self.is_refused = true;
        tracing::error!(
            error,
            "cannot use the changed configuration file: the settings stay as they are; correct the file"
        );
    }

    fn accept(&mut self) {
        self.metrics.set_configuration_refused(false);
        if std::mem::take(&mut self.is_refused) {
            self.events.normal("ConfigurationAccepted", "the configuration file can be used again");
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

#[cfg(test)]
mod tests {
    use std::{fs, path::PathBuf};

    use proxy_userspace::{kernel::command::Launcher, node::NodeEvent};
    use tokio::{sync::mpsc, time::timeout};

    use super::*;

    const MINUTE: Duration = Duration::from_mins(1);

    /// A reload of a file in the mode nftables, whose settings need no restart.
    struct Node {
        path: PathBuf,
        reload: Reload,
        outputs: Outputs,
        events: mpsc::Receiver<NodeEvent>,
        _directory: tempfile::TempDir,
    }

    impl Node {
        fn new() -> Self {
            let directory = tempfile::tempdir().expect("a directory");
            let path = directory.path().join("config.yaml");
            write(&path, "");
            let arguments = ["shunt", "--hostname-override=n1", &format!("--config={}", path.display())];
            let flags = Flags::parse(arguments).expect("valid flags");
            let choice = ModeChoice::new(flags, Environment::default(), Launcher::default()).expect("valid");
            let (events, received) = NodeEvents::channel();
            let outputs = Outputs::new(MINUTE, events);
            let reload = Reload::new(&choice, Arc::new(|_| {}), &outputs);
            Self { path, reload, outputs, events: received, _directory: directory }
        }

        /// Writes the file and watches it for this time.
        async fn change(&mut self, settings: &str, time: Duration) -> Option<ReloadAction> {
            write(&self.path, settings);
            self.pass(time).await
        }

        async fn pass(&mut self, time: Duration) -> Option<ReloadAction> {
            timeout(time, self.reload.watch()).await.ok()
        }

        fn sync_period(&self) -> u64 {
            self.reload.config.sync_period.as_secs()
        }

        fn is_refused(&self) -> bool {
            let (_, text) = self.outputs.metrics.exposition().encode(None).expect("text");
            text.contains("shunt_configuration_refused 1\n")
        }

        fn event(&mut self) -> Option<(&'static str, String)> {
            self.events.try_recv().ok().map(|event| (event.reason, event.note))
        }
    }

    fn write(path: &PathBuf, settings: &str) {
        let head =
            "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: nftables\n";
        fs::write(path, format!("{head}{settings}")).expect("written");
    }

    #[tokio::test(start_paused = true)]
    async fn a_refused_file_is_an_event_and_a_metric_until_it_is_corrected() {
        let mut node = Node::new();
        assert!(!node.is_refused());
        assert_eq!(node.change("nftables: {syncPeriod: often}\n", MINUTE).await, None);
        assert!(node.is_refused());
        let (reason, text) = node.event().expect("an Event");
        assert!(reason == "ConfigurationRefused" && text.contains("nftables.syncPeriod"), "{text}");
        assert_eq!(node.pass(10 * MINUTE).await, None);
        assert_eq!(node.event(), None, "one Event");
        assert_eq!(node.change("nftables: {syncPeriod: 7s}\n", MINUTE).await, None);
        assert_eq!((node.is_refused(), node.sync_period()), (false, 7));
        assert_eq!(node.event().map(|(reason, _)| reason), Some("ConfigurationAccepted"));
        fs::remove_file(&node.path).expect("removed");
        assert_eq!(node.pass(MINUTE).await, None);
        assert!(node.is_refused());
        assert_eq!(node.change("nftables: {syncPeriod: 7s}\n", MINUTE).await, None);
        assert!(!node.is_refused(), "the same text is readable again");
    }

    #[tokio::test(start_paused = true)]
    async fn a_changed_file_is_applied_within_the_jitter_and_the_newest_counts() {
        let mut node = Node::new();
        let with_period =
            |period: u8| format!("nftables: {{syncPeriod: {period}s}}\nshunt: {{reload: {{jitter: 1h}}}}\n");
        // A new file has another delay, but at most that of the one before.
        let mut was_deferred = false;
        for period in 1..=8 {
            node.change(&with_period(period), Duration::from_secs(30)).await;
            was_deferred |= node.sync_period() != u64::from(period);
        }
        assert!(was_deferred);
        node.pass(60 * MINUTE).await;
        assert_eq!(node.sync_period(), 8);
        // A refused file cancels what waits: it is newer.
        node.change(&with_period(9), Duration::from_secs(3)).await;
        node.change("mode: what\n", 90 * MINUTE).await;
        assert_eq!((node.is_refused(), node.sync_period()), (true, 8));
        // A setting that needs a restart waits, too.
        let restart = format!("clusterCIDR: 10.0.0.0/8\n{}", with_period(8));
        assert_eq!(node.change(&restart, 61 * MINUTE).await, Some(ReloadAction::Restart));
    }
}
