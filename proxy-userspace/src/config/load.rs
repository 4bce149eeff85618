//! Loads the configuration from the command line, the file and the environment.

use super::{
    environment::Environment, error::ConfigError, file::ConfigFile, flags::Flags, resolve, resolved::Config,
    settings::Settings,
};
use crate::mode::Mode;

impl Config {
    /// Reads the file that the flags name, if any, and combines flags, file and defaults.
    pub fn load(flags: &Flags, environment: &Environment) -> Result<Self, ConfigError> {
        let file = flags.config.as_ref().map(ConfigFile::read).transpose()?;
        Self::load_from(flags, file, environment, Mode::Ebpf)
    }

    /// Combines flags, a file that was read already, and defaults. If the mode is `auto`, uses the
    /// sections and defaults of the mode `auto`.
    pub fn load_from(
        flags: &Flags,
        file: Option<ConfigFile>,
        environment: &Environment,
        auto: Mode,
    ) -> Result<Self, ConfigError> {
        let yaml = file.as_ref().map(ConfigFile::yaml).transpose()?;
        let config = Self::from_parts(flags, yaml.as_ref(), environment, auto)?;
        Ok(Self { file, ..config })
    }

    pub(super) fn from_parts(
        flags: &Flags,
        file: Option<&serde_yaml_ng::Value>,
        environment: &Environment,
        auto: Mode,
    ) -> Result<Self, ConfigError> {
        let mut settings = Settings::default();
        if let Some(file) = file {
            settings.add_file(file);
        }
        flags.add_to(&mut settings);
        resolve::resolve(settings, environment, auto)
    }
}
