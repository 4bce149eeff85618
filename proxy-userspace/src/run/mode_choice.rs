//! Chooses the mode: the configured one, or one for `auto`, and the next one if that breaks.

use std::time::Duration;

use proxy_userspace::{
    config::{Config, ConfigError, Environment, Flags},
    dataplane::Mode,
    kernel::{self, command::Launcher},
    metrics::Fallback,
    probe,
    watch::ObjectReader,
};

/// How long a mode that `auto` chose may fail before another mode replaces it. A lock that somebody
/// holds or a short lack of memory must not be a reason.
const GIVE_UP_AFTER: Duration = Duration::from_secs(30);

/// The configuration of the mode that runs, and how the mode was chosen.
pub(crate) struct ModeChoice {
    pub(super) flags: Flags,
    pub(super) environment: Environment,
    pub(super) launcher: Launcher,
    /// The configuration for the chosen mode.
    pub(crate) config: Config,
    /// The reason for the mode, in one line.
    pub(super) why: String,
    /// Modes that ran and broke.
    broken: Vec<Mode>,
    /// Reads objects that are not watched, for questions about them.
    pub(super) reader: ObjectReader,
}

impl ModeChoice {
    /// Loads the configuration. If shunt is to run and the mode is `auto`, probes the kernel for a
    /// mode. If no mode works, the preferred one is chosen: its start reports what is missing.
    pub(crate) fn new(
        flags: Flags,
        environment: Environment,
        launcher: Launcher,
    ) -> Result<Self, ConfigError> {
        let config = Config::load(&flags, &environment)?;
        Self::of(config, flags, environment, launcher)
    }

    /// Does the same with a configuration that was loaded from `flags` and `environment`.
    pub(super) fn of(
        config: Config,
        flags: Flags,
        environment: Environment,
        launcher: Launcher,
    ) -> Result<Self, ConfigError> {
        let broken = Vec::new();
        let why = "as configured".into();
        let reader = ObjectReader::default();
        let mut this = Self { flags, environment, launcher, config, why, broken, reader };
        if this.config.mode_is_auto && this.flags.runs() {
            let evaluation = this.probe();
            this.why = format!("auto: {}", evaluation.why);
            if let Some(mode) = this.first_usable(&evaluation) {
                this.set_mode(mode)?;
            }
        }
        Ok(this)
    }

    /// Returns how long the mode may fail before another mode replaces it, or `None` if none may.
    pub(super) fn give_up_after(&self) -> Option<Duration> {
        self.config.mode_is_auto.then_some(GIVE_UP_AFTER)
    }

    /// Returns why `auto` runs another mode than the one that it prefers, or `None` if it does not.
    pub(super) fn fallback(&self) -> Option<Fallback> {
        fallback(self.config.mode, self.config.mode_is_auto, &self.broken)
    }

    /// Switches to the next mode that works. Returns false if there is none.
    pub(super) fn next_mode(&mut self, error: &str) -> Result<bool, ConfigError> {
        if !self.config.mode_is_auto {
            return Ok(false);
        }
        self.broken.push(self.config.mode);
        let Some(next) = self.first_usable(&self.probe()) else { return Ok(false) };
        self.why = format!("auto: the mode {} broke: {error}", self.config.mode);
        self.set_mode(next)?;
        Ok(true)
    }

    fn probe(&self) -> probe::Evaluation {
        probe::evaluate(&kernel::probe::facts(&self.launcher, &self.config.ebpf.pin_dir))
    }

    fn first_usable(&self, evaluation: &probe::Evaluation) -> Option<Mode> {
        let mut works = evaluation.modes.iter().filter(|mode| mode.works()).map(|mode| mode.mode);
        works.find(|mode| mode.is_for_auto() && !self.broken.contains(mode))
    }

    fn set_mode(&mut self, mode: Mode) -> Result<(), ConfigError> {
        if mode != self.config.mode {
            // Uses the text that was read before: the file may be invalid by now.
            let file = self.config.file.clone();
            self.config = Config::load_from(&self.flags, file, &self.environment, mode)?;
        }
        Ok(())
    }
}

/// Returns why this mode is a fallback: it was chosen by `auto`, which prefers another one.
fn fallback(mode: Mode, is_auto: bool, broken: &[Mode]) -> Option<Fallback> {
    let why = if broken.is_empty() { Fallback::Unsupported } else { Fallback::Broken };
    (is_auto && mode != Mode::PREFERRED).then_some(why)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_auto_falls_back() {
        assert_eq!(fallback(Mode::Ebpf, true, &[]), None);
        assert_eq!(fallback(Mode::Nftables, false, &[]), None, "as configured");
        assert_eq!(fallback(Mode::Nftables, true, &[]), Some(Fallback::Unsupported));
        assert_eq!(fallback(Mode::Iptables, true, &[Mode::Nftables]), Some(Fallback::Broken));
    }
}
