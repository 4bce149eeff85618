//! Tasks after which shunt exits: `--write-config-to`, `--init-only`, `--cleanup`, `--cleanup-own`,
//! `probe`, `doctor`, `completion`, `man`.

use std::{
    io::{self, ErrorKind, Write as _, stdout},
    path::Path,
    process::ExitCode,
};

use anyhow::Context as _;
use proxy_userspace::{
    assembly,
    causes::with_causes,
    config::{Config, Generated, ProbeOutput},
    dataplane::{Mode, RenderError, ebpf::Ebpf, ipvs},
    doctor::{self, BundledFile, DoctorArguments, Outcome},
    inspect::print_one,
    kernel::{self, capabilities, command::Launcher},
    node, probe, yaml,
};

use super::{
    dataplane, other_proxy,
    standard_error::{say, tell},
    takeover::log_handover,
};

const NOTHING_REMOVED: &str = "nothing was removed";

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

/// Removes everything that shunt or kube-proxy wrote into the kernel, and logs every error. Removes
/// nothing while a shunt uses the pin directory.
pub(crate) fn cleanup(config: &Config) -> anyhow::Result<()> {
    capabilities::check_net_admin().context(NOTHING_REMOVED)?;
    let _locked = dataplane::lock_pins(config).context(NOTHING_REMOVED)?;
    if other_proxy::serves(config) {
        tracing::warn!(
            "a proxy runs on this node: --cleanup removes its rules too, and it may write them again only at its next \
             full sync; --cleanup-own removes only what is shunt's"
        );
    }
    check_removed(&dataplane::cleanup(config, &Launcher::default()))?;
    tracing::info!("removed everything that shunt or kube-proxy wrote into the kernel");
    Ok(())
}

/// `--cleanup-own`: once another proxy serves this node, hands the connections of shunt's programs
/// over to conntrack, as for a change of the mode, and removes programs, maps and shunt's own rules.
///
/// The rules of kube-proxy's modes stay. If shunt wrote them, the other proxy has taken them over
/// or removed them when it started.
pub(crate) fn cleanup_own(config: &Config) -> anyhow::Result<()> {
    capabilities::check_net_admin().context(NOTHING_REMOVED)?;
    // The lock keeps another shunt from starting meanwhile.
    let pins = other_proxy::wait_until_it_serves(config)?;
    if pins.is_some() {
        tracing::info!(
            "another proxy serves this node: removing shunt's programs, which served its last endpoints"
        );
        log_handover("eBPF programs", Ebpf::hand_over(&config.ebpf.pin_dir));
    }
    check_removed(&dataplane::cleanup_ebpf(config, &Launcher::default()))?;
    tracing::info!("removed what is shunt's from the kernel");
    Ok(())
}

/// Logs every error of a removal. Fails if there are any.
fn check_removed(errors: &[RenderError]) -> anyhow::Result<()> {
    for error in errors {
        tracing::error!(error = with_causes(error), "cannot remove something from the kernel");
    }
    anyhow::ensure!(errors.is_empty(), "the cleanup is incomplete: {} errors; run it again", errors.len());
    Ok(())
}

/// Prints what this machine offers to each mode.
pub(crate) fn probe(output: ProbeOutput) -> ExitCode {
    let pin_dir = Path::new(kernel::bpf::DEFAULT_PIN_DIR);
    let facts = kernel::probe::facts(&Launcher::default(), pin_dir);
    let evaluation = probe::evaluate(&facts);
    let text = match output {
        ProbeOutput::Table => Ok(probe::table(&facts, &evaluation)),
        ProbeOutput::Json => probe::json(&facts, &evaluation).map(|json| json + "\n"),
    };
    let printed = text.map_err(io::Error::from).and_then(|text| stdout().lock().write_all(text.as_bytes()));
    match printed {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            tell(format_args!("cannot write the report: {error}"));
            ExitCode::FAILURE
        }
        _ if evaluation.auto.is_some() => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    }
}

/// Reports what is wrong on this node.
pub(crate) fn doctor(arguments: &DoctorArguments) -> ExitCode {
    let Outcome { report, bundle } = doctor::run(arguments, &Launcher::default());
    match (bundle, &arguments.bundle) {
        (Some(Err(error)), _) => {
            tell(with_causes(&error));
            return ExitCode::from(doctor::CANNOT_REPORT);
        }
        // On standard error: the report goes to standard output, which a program may read.
        (Some(Ok(files)), Some(path)) => print_bundle(path, &files),
        _ => {}
    }
    let printed = print_one(&arguments.output, "DoctorReport", &report, &mut stdout().lock());
    match printed {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            tell(format_args!("cannot write the report: {error}"));
            ExitCode::from(doctor::CANNOT_REPORT)
        }
        _ => ExitCode::from(report.exit_code()),
    }
}

fn print_bundle(path: &Path, files: &[BundledFile]) {
    for BundledFile { name, bytes } in files {
        say(format_args!("{bytes:>9}  {name}"));
    }
    let path = path.display();
    say(format_args!("Wrote {path}. Look at it before you give it to others: see README.txt in it.\n"));
}

/// `completion` and `man`.
pub(crate) fn generate(generated: &Generated) -> ExitCode {
    match generated.write(&mut stdout().lock()) {
        Ok(()) => ExitCode::SUCCESS,
        // The reader of the output has enough, as with `| head`.
        Err(error) if error.kind() == ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            tell(error);
            ExitCode::FAILURE
        }
    }
}
