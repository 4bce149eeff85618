//! The command line.

mod conformance;
mod counts;
mod docs;
mod failures;
mod fuzz;
mod privilege;
mod progress;
mod setup;
mod steps;
mod summary;
mod test;
mod vm;

use std::path::PathBuf;
use std::process::ExitCode;
use std::thread;

use anyhow::{Context as _, Result};
use clap::{Args, Parser, Subcommand};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use xtask::{ebpf, run, workspace};

/// The build steps of shunt.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Make this machine able to build shunt and to run its demo and tests; the other commands do it by themselves.
    Setup {
        /// Only what building needs.
        #[arg(long)]
        build_only: bool,
    },
    /// Build the shunt binary.
    Build {
        /// Optimise: target/release/shunt instead of target/debug/shunt.
        #[arg(long)]
        release: bool,
    },
    /// Build the eBPF programs, and show what each takes of the kernel's limits: instructions, and the stack of its deepest calls.
    Programs,
    /// Show shunt at work in a small cluster made of network namespaces. Needs root.
    Demo {
        /// The dataplane to show.
        #[arg(long, default_value = "ebpf")]
        mode: String,
    },
    /// Check format and lints, run every test and the conformance cases; the kernel tests also on kernel 5.10. Needs root.
    Test {
        /// Run the kernel tests on every kernel that `cargo xtask vm` knows.
        #[arg(long)]
        all_kernels: bool,
    },
    /// Run the kernel tests, or COMMAND, on another kernel: in a virtual machine, without KVM and without root.
    ///
    /// The guest is of memory alone, has no network but lo and nothing on its standard input, and runs COMMAND as root. Its
    /// output, standard error included, is printed as it comes, and its exit status is passed on.
    ///
    /// COMMAND given by a path is copied into the guest with the libraries it loads; a name is looked for there. The guest
    /// has busybox, bash, kmod with all modules of the kernel's networking, ip, tc, ss, nft, iptables and ip6tables (-nft
    /// and -legacy too) and ipset, and where this machine has them also bpftool, conntrack, ethtool, ipvsadm, strace and
    /// tcpdump. proc, sysfs, devtmpfs, cgroup2, bpffs and tracefs are mounted where they belong.
    Vm(vm::Vm),
    /// Run the conformance cases: real packets through a real shunt. Needs root.
    ///
    /// Where this machine's kernel cannot work in mode ipvs, its cases run in a virtual machine that can.
    Conformance(Conformance),
    /// Try what holds for any packet on a link with packets that nobody thought of, on the host and in the kernel. Needs root.
    Fuzz {
        /// For how long, to the end of a round.
        #[arg(long, default_value_t = 60)]
        seconds: u64,
    },
    /// Measure what Services and changes cost, and the proxy's memory. Needs root, and a machine that does little else.
    Bench(Bench),
    /// Build the documents as a book in target/book, and check their links, paths and commands.
    Docs,
}

/// What `cargo xtask conformance` hands on to the conformance program.
#[derive(Debug, Default, Args)]
struct Conformance {
    /// The dataplane to test.
    #[arg(long)]
    mode: String,
    /// The iptables that the node shows to use: nft or legacy.
    #[arg(long)]
    iptables: Option<String>,
    /// Where the proxy has Services from: manifests, or api, a list-and-watch server. By default manifests.
    #[arg(long)]
    source: Option<String>,
    /// A folder of cases to run instead of tests/cases.
    #[arg(long, value_name = "DIR")]
    cases: Option<PathBuf>,
    /// Run in a virtual machine with this kernel; by default that of Debian 12 where the mode needs one.
    #[arg(long)]
    kernel: Option<vm::Kernel>,
    /// Run only the cases of these names, without .yaml.
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    only: Vec<String>,
    /// Run all cases but those of these names.
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    except: Vec<String>,
}

/// What `cargo xtask bench` hands on to the bench program.
#[derive(Debug, Args)]
struct Bench {
    /// The dataplane to measure.
    #[arg(long, default_value = "ebpf")]
    mode: String,
    /// The iptables that the node shows to use: nft or legacy.
    #[arg(long)]
    iptables: Option<String>,
    /// Numbers of Services to measure with; by default 10 and 10000.
    #[arg(long, value_name = "N", value_delimiter = ',')]
    services: Vec<usize>,
    /// Measure only these parts: data, foreign, changes, memory.
    #[arg(long, value_name = "PART", value_delimiter = ',')]
    only: Vec<String>,
    /// Measure only these ways of the data path: pod-to-cluster-ip, node-to-cluster-ip, client-to-node-port,
    /// client-masqueraded, client-to-kernel-nat.
    #[arg(long, value_name = "PATH", value_delimiter = ',')]
    path: Vec<String>,
    /// Measure the data path only with these operations: connect-request-close, request-response, udp-request-response.
    #[arg(long, value_name = "WORKLOAD", value_delimiter = ',')]
    workload: Vec<String>,
    /// Measure a little of everything, to see that it works.
    #[arg(long)]
    quick: bool,
    /// Fail when a target is missed.
    #[arg(long)]
    check: bool,
}

/// Runs the command line; the exit code is that of the command, or 128 plus the signal that stopped it.
pub(crate) fn main() -> ExitCode {
    let cli = Cli::parse();
    match forward_signals().and_then(|()| dispatch(&cli.command)) {
        Ok(code) => code,
        Err(error) => {
            // Not `{:?}`: RUST_BACKTRACE would bury the message.
            eprintln!("error: {error:#}");
            let stopped = run::interrupted().and_then(|signal| u8::try_from(128 + signal).ok());
            stopped.map_or(ExitCode::FAILURE, ExitCode::from)
        }
    }
}

fn dispatch(command: &Command) -> Result<ExitCode> {
    match command {
        Command::Setup { build_only: true } => setup::ensure_build()?,
        Command::Setup { build_only: false } => setup::run()?,
        Command::Build { release } => {
            setup::ensure_build()?;
            steps::build(*release).show()?;
        }
        Command::Programs => {
            setup::ensure_build()?;
            for program in ebpf::build_ebpf(&workspace::bpf_target())?.programs {
                println!("{program}");
            }
        }
        Command::Demo { mode } => {
            privilege::require("demo")?;
            setup::ensure()?;
            return Err(conformance::demo(mode)?);
        }
        Command::Fuzz { seconds } => {
            setup::ensure()?;
            fuzz::run(*seconds)?;
        }
        Command::Conformance(what) => {
            privilege::require("conformance")?;
            setup::ensure()?;
            return conformance::conformance(what);
        }
        Command::Bench(what) => {
            privilege::require("bench")?;
            setup::ensure()?;
            return Err(conformance::bench(what)?);
        }
        Command::Test { all_kernels } => {
            privilege::require("test")?;
            return test::run(*all_kernels);
        }
        Command::Docs => docs::run()?,
        Command::Vm(what) => return vm::run(what),
    }
    Ok(ExitCode::SUCCESS)
}

/// Passes signals that ask us to stop on to the program that is running, so that it cleans up and is not orphaned.
fn forward_signals() -> Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("cannot watch for signals")?;
    thread::spawn(move || signals.forever().for_each(run::interrupt));
    run::take_signals();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory as _;
        Cli::command().debug_assert();
    }

    #[test]
    fn a_machines_command_keeps_its_own_flags() {
        let cli = Cli::parse_from(["cargo xtask", "vm", "--kernel", "5.10", "--", "ip", "--kernel", "x"]);
        assert!(matches!(cli.command, Command::Vm(_)));
    }

    #[test]
    fn only_takes_names_separated_by_commas() {
        let cli =
            Cli::parse_from(["cargo xtask", "conformance", "--mode", "ebpf", "--only", "hairpin,dual-stack"]);
        let Command::Conformance(what) = cli.command else { panic!("not conformance") };
        assert_eq!(what.only, ["hairpin", "dual-stack"]);
    }
}
