//! `cargo xtask release --try`: builds the image of this machine's architecture, and runs it in
//! containerd with what the `DaemonSet` gives it.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
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
    let own = Target::host().context("there is no image for the architecture of this machine")?;
    steps::build_world()?.show()?;
    // Built like the program of a release, and already there when tests run.
    let shunt = |_, _: &Path| Ok(steps::world().join("shunt"));
    let inputs = inputs::read(Settings::read()?, &[own], true, &shunt)?;
    let path = workspace::target().join("release-work/image.tar");
    fs::write(&path, artefacts::image_of(&inputs)?.archive)
        .with_context(|| format!("cannot write {}", path.display()))?;
    Run::new(steps::world().join("deployment")).arg("--image").arg(path).limit(steps::BUILD).show()
}
