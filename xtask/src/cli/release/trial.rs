//! `cargo xtask release --try`: builds the image of this machine's architecture, and runs it in
//! containerd with what the `DaemonSet` gives it.

use std::fs;

use anyhow::{Context as _, Result};
use clap::ValueEnum as _;
use xtask::run::Run;
use xtask::workspace;

use super::settings::Settings;
use super::target::Target;
use super::{artefacts, inputs};
use crate::cli::{privilege, setup, steps};

/// Runs the scenarios of the image. They need root.
pub(crate) fn run() -> Result<()> {
    privilege::require("release --try")?;
    setup::ensure()?;
    setup::ensure_release()?;
    setup::ensure_image()?;
    let own = Target::value_variants().iter().copied().find(|target| target.is_host());
    let own = own.context("there is no image for the architecture of this machine")?;
    steps::build_deployment().show()?;
    let inputs = inputs::read(Settings::read()?, &[own], true)?;
    let path = workspace::target().join("release-work/image.tar");
    fs::write(&path, artefacts::image_of(&inputs)?.archive)
        .with_context(|| format!("cannot write {}", path.display()))?;
    Run::new(workspace::release().join("deployment")).arg("--image").arg(path).limit(steps::BUILD).show()
}
