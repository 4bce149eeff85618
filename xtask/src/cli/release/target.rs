//! The processor architectures of releases.

use clap::ValueEnum;

/// A processor architecture, under the name of OCI and Debian.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Target {
    /// 64-bit x86.
    #[default]
    Amd64,
    /// 64-bit ARM.
    Arm64,
}

impl Target {
    /// Returns the name of OCI and Debian.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Amd64 => "amd64",
            Self::Arm64 => "arm64",
        }
    }

    /// Returns Rust's name.
    pub(crate) fn triple(self) -> &'static str {
        match self {
            Self::Amd64 => "x86_64-unknown-linux-gnu",
            Self::Arm64 => "aarch64-unknown-linux-gnu",
        }
    }

    /// Returns the architecture of this machine, if there are releases for it.
    pub(crate) fn host() -> Option<Self> {
        Self::value_variants().iter().copied().find(|target| target.is_host())
    }

    /// Returns true if this program runs on this architecture.
    pub(crate) fn is_host(self) -> bool {
        self.triple().starts_with(std::env::consts::ARCH)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_on_the_command_line_are_those_of_oci() {
        for target in Target::value_variants() {
            assert_eq!(Target::from_str(target.name(), false).as_ref(), Ok(target));
        }
    }

    #[test]
    fn one_architecture_at_most_is_that_of_this_machine() {
        assert!(Target::value_variants().iter().filter(|target| target.is_host()).count() <= 1);
    }
}
