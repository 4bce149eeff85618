//! Which mode runs: the configured one, or the one that `auto` takes, and the next after it when that breaks for good.

use std::time::Duration;

use proxy_userspace::{
    config::{Config, ConfigError, Environment, Flags, Mode},
    kernel::{self, command::SearchPath},
    probe::{self, ModeSupport},
};

/// A mode that `auto` never takes: upstream gives it up.
const NEVER_TAKEN: &str = "ipvs";

/// How long a mode of `auto`'s may fail before the next one takes over. A lock that is held, or a kernel that is short of memory
/// for a while, is no reason.
const GIVE_UP_AFTER: Duration = Duration::from_secs(30);

/// The configuration of the mode that is to run, and what it was chosen from.
pub(crate) struct Chosen {
    flags: Flags,
    environment: Environment,
    /// The configuration, of this mode.
    pub(crate) config: Config,
    /// Why it is this mode, in one line.
    pub(crate) why: String,
    /// Modes that ran and broke.
    broken: Vec<Mode>,
}

impl Chosen {
    /// The configured mode, or the one that `auto` stands for here. Where nothing works, starting the preferred mode tells what
    /// is missing.
    pub(crate) fn new(flags: Flags, environment: Environment) -> Result<Self, ConfigError> {
        let config = Config::load(&flags, &environment)?;
        let mut this = Self { flags, environment, config, why: "as configured".into(), broken: Vec::new() };
        let Flags { cleanup, init_only, .. } = this.flags;
        let runs = !cleanup && !init_only && this.flags.write_config_to.is_none();
        if this.config.mode_is_auto && runs {
            let verdict = probe::evaluate(&kernel::probe::facts(&SearchPath::default()));
            this.why = format!("auto: {}", verdict.why);
            if let Some(mode) = verdict.modes.iter().find_map(|mode| this.takes(mode)) {
                this.run_mode(mode)?;
            }
        }
        Ok(this)
    }

    /// What the configuration is made from besides the file.
    pub(crate) fn origin(&self) -> (Flags, Environment) {
        (self.flags.clone(), self.environment.clone())
    }

    /// How long the mode may fail before another takes over, if one may.
    pub(crate) fn give_up_after(&self) -> Option<Duration> {
        self.has_others().then_some(GIVE_UP_AFTER)
    }

    /// Whether another mode may take over from one that breaks.
    pub(crate) fn has_others(&self) -> bool {
        self.config.mode_is_auto
    }

    /// Goes on to the next mode that works here; false where there is none.
    pub(crate) fn next_mode(&mut self, error: &str) -> Result<bool, ConfigError> {
        if !self.has_others() {
            return Ok(false);
        }
        self.broken.push(self.config.mode);
        let verdict = probe::evaluate(&kernel::probe::facts(&SearchPath::default()));
        let Some(next) = verdict.modes.iter().find_map(|mode| self.takes(mode)) else { return Ok(false) };
        self.why = format!("auto: the mode {} broke: {error}", self.config.mode.name());
        self.run_mode(next)?;
        Ok(true)
    }

    fn takes(&self, verdict: &ModeSupport) -> Option<Mode> {
        let mode = Mode::ALL.into_iter().find(|mode| mode.name() == verdict.mode)?;
        (verdict.works() && verdict.mode != NEVER_TAKEN && !self.broken.contains(&mode)).then_some(mode)
    }

    fn run_mode(&mut self, mode: Mode) -> Result<(), ConfigError> {
        if mode != self.config.mode {
            // As the file was read: it may be a bad one by now.
            let file = self.config.file.clone();
            self.config = Config::load_from(&self.flags, file, &self.environment, mode)?;
        }
        Ok(())
    }
}
