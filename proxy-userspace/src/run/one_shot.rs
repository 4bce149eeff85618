//! Tasks after which shunt exits: `--write-config-to`, `--init-only`, `--cleanup`, `--cleanup-own`,
//! `probe`, `doctor`, `completion`, `man`.

use std::{
    io::{self, ErrorKind, Write, stderr, stdout},
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
    health,
    inspect::{self, print_one},
    kernel::{self, KernelError, capabilities, command::Launcher},
    node,
    output_file::{self, is_standard_output},
    probe, trace, yaml,
};
use tokio::runtime;

use super::{
    dataplane, leftovers, log_ineffective_settings, other_proxy, standard_error::tell, takeover::log_handover,
};

const NOTHING_REMOVED: &str = "nothing was removed";

/// Writes the configuration in effect, as kube-proxy does: kube-proxy's fields with their defaults,
/// and shunt's own fields if they were given.
pub(crate) fn write_config(config: &Config, path: &Path) -> anyhow::Result<()> {
    let text = yaml::to_string(&config.effective.document())?;
    std::fs::write(path, text).with_context(|| {
        format!("cannot write the configuration to {} (--write-config-to)", path.display())
    })?;
    log_ineffective_settings(config);
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
/// nothing while a shunt uses the pin directory, or runs in this network namespace.
pub(crate) fn cleanup(config: &Config) -> anyhow::Result<()> {
    capabilities::check_net_admin().context(NOTHING_REMOVED)?;
    let _locked = dataplane::lock_pins(config).context(NOTHING_REMOVED)?;
    check_alone().context(NOTHING_REMOVED)?;
    if other_proxy::serves(config) {
        tracing::warn!(
            "a proxy runs on this node: --cleanup removes its rules too, and it may write them again only at its next \
             full sync; --cleanup-own removes only what is shunt's"
        );
    }
    trace::remove_tables();
    check_removed(&dataplane::cleanup(config, &Launcher::default()))?;
    tracing::info!("removed everything that shunt or kube-proxy wrote into the kernel");
    Ok(())
}

/// `--cleanup-own`: once another proxy serves this node, removes what is shunt's. The rules of
/// kube-proxy's modes stay. If shunt wrote them, the other proxy has taken them over or removed
/// them when it started.
///
/// kube-proxy's nftables mode leaves chains and sets that only shunt has. They are removed too,
/// once no rule leads to them. So a run that has removed the programs, and each further run, waits
/// for the same: a shunt that serves in its nftables mode is not another proxy.
///
/// A shunt may start in the ebpf mode during that wait. It removes the table, and its programs
/// serve then: the command begins again.
pub(crate) fn cleanup_own(config: &Config) -> anyhow::Result<()> {
    capabilities::check_net_admin().context(NOTHING_REMOVED)?;
    loop {
        remove_own_programs(config)?;
        leftovers::remove()?;
        match dataplane::lock_pins(config) {
            // Pins of others keep the directory.
            Ok(pins) if pins.as_ref().is_none_or(|pins| !Ebpf::has_pins(pins)) => break,
            Ok(_) | Err(KernelError::PinsInUse { .. }) => {
                tracing::info!(
                    "a shunt started in the ebpf mode meanwhile: waiting again until another proxy serves this node"
                );
            }
            Err(error) => return Err(error.into()),
        }
    }
    tracing::info!("removed what is shunt's from the kernel");
    Ok(())
}

/// Hands the connections of shunt's programs over to conntrack, as for a change of the mode, once
/// another proxy serves this node. Removes programs, maps and the rules that work with them.
fn remove_own_programs(config: &Config) -> anyhow::Result<()> {
    // The lock keeps another shunt from starting meanwhile.
    let pins = other_proxy::wait_until_it_serves(config)?;
    if pins.is_some() {
        tracing::info!(
            "another proxy serves this node: removing shunt's programs, which served its last endpoints"
        );
        log_handover("eBPF programs", Ebpf::hand_over(&config.ebpf.pin_dir));
    }
    // A shunt in a mode without programs may be the other proxy, and trace.
    if check_alone().is_ok() {
        trace::remove_tables();
    }
    check_removed(&dataplane::cleanup_ebpf(config, &Launcher::default()))
}

/// Fails if a shunt runs in this network namespace. It would write again what is removed, and
/// connections would fail until then.
fn check_alone() -> anyhow::Result<()> {
    let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
    Ok(runtime.block_on(health::check_alone(inspect::SOCKET))?)
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
    let outcome = doctor::run(arguments, &Launcher::default());
    ExitCode::from(print_outcome(&outcome, arguments, &mut stdout().lock(), &mut stderr().lock()))
}

/// Prints the report and what is in the bug report. Returns the exit code. The report goes to
/// `output`, which a program may read, unless the bug report went there.
fn print_outcome(
    Outcome { report, bundle }: &Outcome,
    arguments: &DoctorArguments,
    output: &mut dyn Write,
    messages: &mut dyn Write,
) -> u8 {
    let path = arguments.bundle.as_deref().unwrap_or(Path::new(""));
    // Nobody may read the messages.
    let _ = match bundle {
        // The report is worth having all the same.
        Some(Err(error)) => writeln!(messages, "shunt: {}", with_causes(error)),
        Some(Ok(files)) => print_bundle(path, files, messages),
        None => Ok(()),
    };
    let to: &mut dyn Write = if is_standard_output(path) { &mut *messages } else { output };
    match print_one(&arguments.output, "DoctorReport", report, to) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            let _ = writeln!(messages, "shunt: cannot write the report: {error}");
            doctor::CANNOT_REPORT
        }
        _ if matches!(bundle, Some(Err(_))) => doctor::CANNOT_REPORT,
        _ => report.exit_code(),
    }
}

fn print_bundle(path: &Path, files: &[BundledFile], to: &mut dyn Write) -> io::Result<()> {
    for BundledFile { name, bytes } in files {
        writeln!(to, "{bytes:>9}  {name}")?;
    }
    let target = output_file::name(path);
    writeln!(to, "Wrote {target}. Look at it before you give it to others: see README.txt in it.\n")
}

/// `completion` and `man`.
pub(crate) fn generate(generated: &Generated) -> ExitCode {
    match generated.write(&mut stdout().lock()) {
        Ok(()) => ExitCode::SUCCESS,
        // The reader of the output has enough, as with `| head`.
        Err(error) if error.kind() == ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            tell(format_args!("cannot write to standard output: {error}"));
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use proxy_userspace::{
        doctor::{BundleError, Report},
        inspect::Output,
    };

    use super::*;

    /// Returns the exit code, the output and the messages.
    fn printed(path: &str, bundle: Result<Vec<BundledFile>, BundleError>) -> (u8, String, String) {
        let arguments = DoctorArguments {
            output: Output::Table,
            bundle: Some(path.into()),
            pin_directory: PathBuf::new(),
        };
        let report = Report { mode: None, watches: Vec::new(), findings: Vec::new() };
        let outcome = Outcome { report, bundle: Some(bundle) };
        let (mut output, mut messages) = (Vec::new(), Vec::new());
        let code = print_outcome(&outcome, &arguments, &mut output, &mut messages);
        let text = |bytes| String::from_utf8(bytes).expect("text");
        (code, text(output), text(messages))
    }

    #[test]
    fn a_report_is_printed_although_the_bug_report_cannot_be_written() {
        let (code, output, messages) = printed("a", Err(BundleError::Exists("a".into())));
        assert_eq!(code, doctor::CANNOT_REPORT);
        assert!(output.starts_with("Mode: none."), "{output}");
        assert!(messages.contains("a exists already"), "{messages}");
    }

    #[test]
    fn nothing_but_the_bug_report_goes_to_the_output_if_that_is_where_it_goes() {
        let files = || Ok(vec![BundledFile { name: "doctor.json".to_owned(), bytes: 7 }]);
        let (code, output, messages) = printed("-", files());
        assert_eq!((code, &*output), (0, ""));
        assert!(messages.contains("7  doctor.json\nWrote standard output."), "{messages}");
        assert!(messages.contains("\nMode: none."), "{messages}");
        let (_, output, messages) = printed("a", files());
        assert!(output.starts_with("Mode: none.") && !messages.contains("Mode"), "{output}");
    }
}
