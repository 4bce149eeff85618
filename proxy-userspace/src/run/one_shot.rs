//! Tasks after which shunt exits: `--write-config-to`, `--init-only`, `--cleanup`, `probe`.

use std::{path::Path, process::ExitCode};

use anyhow::Context as _;
use proxy_userspace::{
    assembly,
    causes::with_causes,
    config::{Config, ProbeOutput},
    dataplane::{Mode, ipvs},
    kernel::{self, command::Launcher},
    node, probe, yaml,
};

use super::dataplane;

/// Writes the configuration in effect, as kube-proxy does: kube-proxy's fields with their defaults,
/// and shunt's own fields if they were given.
pub(crate) fn write_config(config: &Config, path: &Path) -> anyhow::Result<()> {
    let text = yaml::to_string(&config.effective.document())?;
    std::fs::write(path, text).with_context(|| {
        format!("cannot write the configuration to {} (--write-config-to)", path.display())
    })?;
    tracing::info!(file = %path.display(), "wrote the configuration");
    Ok(())
}

/// `--init-only`: sets the sysctls of conntrack and of the ipvs mode, which need privileges. It
/// does not set `route_localnet`, which is unsafe without its rules: others could reach loopback.
pub(crate) fn init_only(config: &Config) -> anyhow::Result<()> {
    let mut errors: Vec<String> =
        node::set_up_kernel(&config.node).iter().map(|error| with_causes(error)).collect();
    if config.mode == Mode::Ipvs {
        let settings = assembly::ipvs(config, &Launcher::default());
        errors.extend(ipvs::set_up_kernel(&settings).iter().map(|error| with_causes(error)));
    }
    for error in &errors {
        tracing::error!(error, "cannot change a kernel setting: it keeps its value");
    }
    anyhow::ensure!(errors.is_empty(), "cannot set {} kernel settings", errors.len());
    tracing::info!("all kernel settings are set");
    Ok(())
}

/// Removes everything that shunt or kube-proxy wrote into the kernel, and logs every error.
pub(crate) fn cleanup(config: &Config) -> anyhow::Result<()> {
    let errors = dataplane::cleanup(config, &Launcher::default());
    for error in &errors {
        tracing::error!(error = with_causes(error), "cannot remove something that shunt or kube-proxy wrote");
    }
    anyhow::ensure!(errors.is_empty(), "the cleanup is incomplete: {} errors; run it again", errors.len());
    tracing::info!("removed everything that shunt or kube-proxy wrote into the kernel");
    Ok(())
}

/// Prints what this machine offers to each mode.
pub(crate) fn probe(output: ProbeOutput) -> ExitCode {
    let pin_dir = Path::new(kernel::bpf::DEFAULT_PIN_DIR);
    let facts = kernel::probe::facts(&Launcher::default(), pin_dir);
    let evaluation = probe::evaluate(&facts);
    match output {
        ProbeOutput::Table => print!("{}", probe::table(&facts, &evaluation)),
        ProbeOutput::Json => match probe::json(&facts, &evaluation) {
            Ok(json) => println!("{json}"),
            Err(error) => eprintln!("shunt: cannot write the report: {error}"),
        },
    }
    if evaluation.auto.is_some() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
