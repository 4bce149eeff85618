//! Boots a kernel with a guest's file system in qemu, without KVM, and reads the exit code of its
//! command.

use std::fs;
use std::io;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use xtask::run::Run;
use xtask::workspace;

use super::guest::{Guest, MARKER};
use super::kernel::{Fetched, Kernel};
use super::userland::Userland;
use crate::cli::release::Target;

/// Memory in MiB. It holds the file system twice while the kernel starts.
const MEMORY: &str = "2048";
const CONSOLE_LINES: usize = 40;

/// Runs a guest for at most `limit`, and calls `each` with every line of output. Returns the exit
/// code of the command.
pub(crate) fn run(
    kernel: Kernel,
    fetched: &Fetched,
    guest: &Guest,
    limit: Duration,
    each: &mut dyn FnMut(&str),
) -> Result<u8> {
    let work = tempfile::tempdir_in(workspace::vm()).context("cannot create a folder for the guest")?;
    let (initrd, console) = (work.path().join("initrd"), work.path().join("console"));
    let machine = Machine::of(guest.arch, kernel);
    let userland = Userland::of(guest.arch)?;
    guest.write(&initrd, &userland, machine.output).context("cannot write the guest's file system")?;
    append(&initrd, &fetched.modules)?;
    let mut code = None;
    let ended = command(&machine, &fetched.vmlinuz, &initrd, &console).limit(limit).watch(&mut |line| {
        let (output, marked) = parse(line);
        code = marked.or(code);
        if marked.is_none() || !output.is_empty() {
            each(output);
        }
    });
    let said = || format!("its kernel's last messages:\n{}", last_lines(&console));
    let ended = ended.map_err(|error| anyhow!("{}; {}", error.root_cause(), said()))?;
    match code {
        Some(code) => Ok(code),
        None => bail!(
            "the guest stopped before its command ended (qemu: {}); {}\n{}",
            ended.status,
            said(),
            ended.tail
        ),
    }
}

/// What differs between architectures.
struct Machine {
    program: &'static str,
    /// The value of qemu's `-accel`.
    accelerator: &'static str,
    /// The machine, its CPU and the device for the command's output.
    arguments: Vec<&'static str>,
    /// The serial port of the kernel's messages.
    console: &'static str,
    /// The serial port of the command's output.
    output: &'static str,
    /// More arguments of the kernel.
    kernel: &'static str,
}

impl Machine {
    fn of(arch: Target, kernel: Kernel) -> Self {
        match arch {
            Target::Amd64 => Self {
                program: "qemu-system-x86_64",
                // One thread for all CPUs. With a thread each, a CPU sometimes runs an instruction
                // that another CPU is patching (jump labels), and the kernel dies of a breakpoint.
                accelerator: "tcg,thread=single",
                arguments: vec!["-cpu", kernel.cpu(), "-serial", "chardev:output"],
                console: "ttyS0",
                output: "ttyS1",
                // On a busy machine the kernel's timer check fails.
                kernel: "no_timer_check",
            },
            // This machine has one serial port of its own. The CPU is an early one, because the
            // authentication of pointers of later ones is slow to emulate.
            Target::Arm64 => Self {
                program: "qemu-system-aarch64",
                // A thread for each CPU. An arm64 CPU may run a branch or a nop while another CPU
                // patches it, so the reason above does not apply.
                accelerator: "tcg,thread=multi",
                arguments: vec![
                    "-machine",
                    "virt",
                    "-cpu",
                    "cortex-a57",
                    "-device",
                    "pci-serial,chardev=output",
                ],
                console: "ttyAMA0",
                output: "ttyS0",
                kernel: "",
            },
        }
    }
}

fn command(machine: &Machine, vmlinuz: &Path, initrd: &Path, console: &Path) -> Run {
    Run::new(machine.program)
        .args(["-accel", machine.accelerator, "-smp", "2", "-m", MEMORY])
        .args(["-nodefaults", "-no-user-config", "-no-reboot", "-nographic", "-monitor", "none"])
        .arg("-serial")
        .arg(format!("file:{}", console.display()))
        .args(["-chardev", "stdio,id=output"])
        .args(&machine.arguments)
        .arg("-kernel")
        .arg(vmlinuz)
        .arg("-initrd")
        .arg(initrd)
        // Without oops=panic a broken kernel hangs until the time limit.
        .arg("-append")
        .arg(format!("console={} panic=-1 oops=panic quiet {}", machine.console, machine.kernel))
        // A guest only computes.
        .behind_others()
}

fn append(archive: &Path, more: &Path) -> Result<()> {
    let failed = || format!("cannot append {}", more.display());
    let mut archive = fs::File::options().append(true).open(archive).with_context(failed)?;
    let mut more = fs::File::open(more).with_context(failed)?;
    io::copy(&mut more, &mut archive).with_context(failed).map(drop)
}

/// Splits a line into output of the command, and the exit code if it is the last line.
fn parse(line: &str) -> (&str, Option<u8>) {
    let marked =
        line.rsplit_once(MARKER).and_then(|(output, code)| Some((output, code.trim().parse().ok()?)));
    marked.map_or((line, None), |(output, code)| (output, Some(code)))
}

fn last_lines(console: &Path) -> String {
    let text = fs::read(console).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(CONSOLE_LINES)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marker_holds_the_exit_code_also_after_a_partial_line() {
        assert_eq!(parse("shunt-vm: exit 3"), ("", Some(3)));
        assert_eq!(parse("half a lineshunt-vm: exit 0"), ("half a line", Some(0)));
    }

    #[test]
    fn output_of_the_command_has_a_serial_port_of_its_own() {
        for arch in [Target::Amd64, Target::Arm64] {
            let machine = Machine::of(arch, Kernel::V6_1);
            assert_ne!(machine.console, machine.output);
            let shown = command(&machine, "/k".as_ref(), "/i".as_ref(), "/c".as_ref()).to_string();
            assert!(shown.contains("-serial file:/c -chardev stdio,id=output"), "{shown}");
            assert!(shown.contains(&format!("-append console={} ", machine.console)), "{shown}");
        }
    }

    #[test]
    fn other_lines_are_output() {
        for line in ["", "test a ... ok", "shunt-vm: exit", "shunt-vm: exit 300", "shunt-vm: exit no"] {
            assert_eq!(parse(line), (line, None));
        }
    }
}
