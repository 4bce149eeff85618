//! `cargo xtask conformance`: runs the cases on this machine, or in a virtual machine.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::Value;
use xtask::run::Run;
use xtask::workspace;

use super::vm::{self, Guest, Kernel, PATIENCE};
use super::{Conformance, steps};

/// The mode that not every kernel supports.
const IPVS: &str = "ipvs";
/// The program with scenarios of the daemon, and those that show what mode ipvs holds in the
/// kernel.
const DAEMON: &str = "daemon";
const SCENARIOS: &str = "affinity,drift,explain-affinity,explain-check,explain-others";
/// The certificates without which the scenarios' client of an API server does not start.
const CERTIFICATES: &str = "/etc/ssl/certs/ca-certificates.crt";
/// The guest's kernel if this machine's kernel has no IPVS and no kernel was chosen.
const KERNEL: Kernel = Kernel::V6_1;
/// A guest is many times slower than this machine.
const LIMIT: Duration = Duration::from_hours(1);

/// Replaces this process by the conformance runner. If this kernel does not support the mode, runs
/// it in a virtual machine.
pub(crate) fn run(what: &Conformance) -> Result<ExitCode> {
    let Some(kernel) = kernel(what)? else { return Err(steps::conformance(what).exec()) };
    vm::boot(kernel, &guest(what)?, LIMIT, &mut |line| println!("{line}")).map(ExitCode::from)
}

/// Returns the kernel of the virtual machine to run in. `None` means this machine.
fn kernel(what: &Conformance) -> Result<Option<Kernel>> {
    if what.kernel.is_some() || what.mode != IPVS || has_ipvs()? {
        return Ok(what.kernel);
    }
    println!("this kernel does not support mode ipvs: the cases run in a virtual machine");
    Ok(Some(KERNEL))
}

/// Returns true if `shunt probe` finds everything that mode ipvs needs.
fn has_ipvs() -> Result<bool> {
    // The exit status is an error if no mode works. The report is printed anyway.
    let probe = Run::new(steps::world().join("shunt")).args(["probe", "--output", "json"]);
    let printed = probe.watch(&mut |_| ())?.stdout;
    works(&printed).context("`shunt probe --output json` has no entry for mode ipvs")
}

/// Reads from a report of `shunt probe` whether mode ipvs works.
fn works(report: &str) -> Option<bool> {
    let report: Value = serde_json::from_str(report).ok()?;
    let mode = report["modes"].as_array()?.iter().find(|mode| mode["mode"] == IPVS)?;
    Some(mode["missing"].as_array()?.is_empty())
}

/// Returns a guest that runs the cases. Unless cases were chosen, it also runs the other kernel
/// tests of mode ipvs.
fn guest(what: &Conformance) -> Result<Guest> {
    let cases = what.cases.clone().unwrap_or_else(|| workspace::root().join("tests/cases"));
    let programs = ["shunt", "conformance", IPVS, DAEMON].map(|name| steps::world().join(name));
    let mut commands = vec![steps::conformance(what).words()];
    if what.mode == IPVS && what.only.is_empty() && what.cases.is_none() {
        commands.push(steps::with_shunt(IPVS).words());
        commands.push(steps::world_program(DAEMON, IPVS).args(["--only", SCENARIOS]).words());
    }
    let mut guest =
        Guest::new(["bash".into(), "-c".into(), vm::one_after_the_other(&commands).into()].into())?;
    let certificates = Some(PathBuf::from(CERTIFICATES)).filter(|path| path.is_file());
    guest.copies = programs.into_iter().chain([cases]).chain(certificates).collect();
    guest.environment = vec![PATIENCE];
    Ok(guest)
}

/// Returns true if there is a case of this name, shared or shunt's own.
#[cfg(test)]
pub(crate) fn is_case(name: &str) -> bool {
    let folders = ["tests/cases", "tests/cases/shunt"].map(|folder| workspace::root().join(folder));
    folders.iter().any(|folder| folder.join(name).with_extension("yaml").is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probe_report_says_whether_the_mode_works() {
        let report = |missing: &str| {
            format!(r#"{{"modes":[{{"mode":"ebpf","missing":[]}},{{"mode":"ipvs","missing":[{missing}]}}]}}"#)
        };
        assert_eq!(works(&report("")), Some(true));
        assert_eq!(works(&report(r#"{"anyOf":["ipvs"]}"#)), Some(false));
        assert_eq!(works("{}"), None);
    }

    #[test]
    fn chosen_kernel_is_booted_in_any_mode() {
        for mode in ["ebpf", IPVS] {
            let what =
                Conformance { mode: mode.into(), kernel: Some(Kernel::V5_10), ..Conformance::default() };
            assert_eq!(kernel(&what).unwrap(), Some(Kernel::V5_10));
        }
        let what = Conformance { mode: "ebpf".into(), ..Conformance::default() };
        assert_eq!(kernel(&what).unwrap(), None);
    }

    #[test]
    fn guest_gets_proxy_and_cases_and_runner_gets_its_flags() {
        let what = Conformance { mode: IPVS.into(), only: vec!["hairpin".into()], ..Conformance::default() };
        let guest = guest(&what).unwrap();
        let script = guest.command[2].to_string_lossy();
        assert!(script.contains("/release/conformance' '--shunt'"), "{script}");
        assert!(script.contains("'--only' 'hairpin' || failed=1\nexit"), "{script}");
        let copied = |end| guest.copies.iter().any(|copy| copy.ends_with(end));
        assert!(copied("tests/cases") && copied("shunt"));
        let all = super::guest(&Conformance { only: Vec::new(), ..what }).unwrap();
        let script = all.command[2].to_string_lossy();
        assert!(script.contains("/release/ipvs' '--shunt' "), "{script}");
        assert!(script.contains("'--mode' 'ipvs' '--only' 'affinity,drift,"), "{script}");
    }
}
