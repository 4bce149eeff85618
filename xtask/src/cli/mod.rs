//! The command line of `cargo xtask`.

#[cfg(test)]
mod chart;
mod checks;
mod conformance;
mod counts;
#[cfg(test)]
mod dependencies;
mod docs;
mod failures;
mod fuzz;
mod monitoring;
mod plot;
mod privilege;
mod progress;
mod release;
mod setup;
#[cfg(test)]
mod specification;
mod steps;
mod summary;
mod test;
mod vm;
#[cfg(test)]
mod workflows;

use std::path::PathBuf;
use std::process::ExitCode;
use std::thread;

use anyhow::{Context as _, Result};
use clap::{Args, Parser, Subcommand, ValueEnum};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use xtask::{ebpf, run, workspace};

use self::release::Target;
use self::steps::Unoptimised;
use self::test::Extent;

/// The build steps of shunt.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Install what is needed to build shunt and to run its demo and tests. The other commands run
    /// this when needed.
    Setup {
        /// Install only what the build needs.
        #[arg(long)]
        build_only: bool,
    },
    /// Build the shunt binary.
    Build {
        /// Build with optimisation: target/release/shunt instead of target/debug/shunt.
        #[arg(long)]
        release: bool,
        /// Build the static program of a release for this architecture instead:
        /// target/static/shunt-TARGET.
        #[arg(long, conflicts_with = "release")]
        target: Option<Target>,
    },
    /// Build the eBPF programs, and show the instructions and the deepest stack of each.
    Programs,
    /// Show shunt in a small cluster of network namespaces. Needs root.
    Demo {
        /// The dataplane to show.
        #[arg(long, default_value = "ebpf")]
        mode: String,
    },
    /// Check format, lints and documents, run all tests and conformance cases, and the kernel tests
    /// also on 5.10. Needs root.
    Test {
        /// Run only the checks that find most mistakes: format, lints, documents, unit tests, the
        /// programs with frames, and some cases. Nothing is optimised. For use before each commit.
        #[arg(long, conflicts_with = "all_kernels")]
        quick: bool,
        /// Run the kernel tests on all kernels that `cargo xtask vm` knows.
        #[arg(long)]
        all_kernels: bool,
    },
    /// Run the kernel tests, or COMMAND, on another kernel: in a virtual machine, without KVM and
    /// without root.
    ///
    /// The guest has its file system in memory, no network except lo, and no standard input. It
    /// runs COMMAND as root, prints its output (standard error included) as it comes, and returns
    /// its exit status.
    ///
    /// If COMMAND is a path, the program and its libraries are copied into the guest. A name is
    /// looked up there. The guest has busybox, bash, kmod with all networking modules of the
    /// kernel, ip, tc, ss, nft, iptables and ip6tables (also -nft and -legacy) and ipset. If this
    /// machine has them, it also has bpftool, conntrack, ethtool, ipvsadm, strace, tcpdump and
    /// xdp-loader. proc, sysfs, devtmpfs, cgroup2, bpffs and tracefs are mounted as usual.
    ///
    /// A guest for arm64 has the same programs, unpacked from packages of Debian.
    Vm(vm::Vm),
    /// Run the conformance cases: real packets through a real shunt. Needs root.
    ///
    /// If this kernel does not support mode ipvs, its cases run in a virtual machine.
    Conformance(Conformance),
    /// Run the fuzz targets with coverage, and check properties of packet decisions with generated
    /// packets, on the host and in the kernel. The properties need root.
    Fuzz {
        /// The target, a folder of tests/fuzz/corpus, or properties [default: all of them].
        target: Option<String>,
        /// How long to run each target, in seconds. The last round of the properties is completed.
        #[arg(long, default_value_t = 60)]
        seconds: u64,
    },
    /// Measure the data path, changes and memory. Needs root, and a machine without other load.
    Bench(Bench),
    /// Keep connections going while everything that can happen to shunt happens, in random order:
    /// restarts, changes, outages of the API server, other modes, floods, failing system calls.
    /// Needs root.
    ///
    /// At the end, no connection was lost, and shunt holds as much memory and as many files,
    /// threads and kernel objects as at the start.
    Soak {
        /// How long to run. The last round, which takes some two minutes, is completed.
        #[arg(long, default_value_t = 20)]
        minutes: u64,
        /// The seed for the order, as a run prints it [default: random].
        #[arg(long)]
        seed: Option<u64>,
    },
    /// Make a release: binaries, the image, the chart, manifests, and what proves where they come
    /// from. Nothing is published.
    Release(release::Release),
    /// Build the documents as a book in target/book, and check their links, paths and commands.
    Docs,
    /// Write the generated files of deploy/monitoring: dashboards, and rules for the Prometheus
    /// operator.
    Monitoring {
        /// Also draw pictures of the dashboards into docs/dashboards, from what
        /// `target/release/daemon --record FILE` wrote.
        #[arg(long, value_name = "FILE")]
        recording: Option<PathBuf>,
    },
}

/// Arguments that `cargo xtask conformance` passes on to the conformance runner.
#[derive(Clone, Debug, Default, Args)]
struct Conformance {
    /// The dataplane to test.
    #[arg(long)]
    mode: String,
    /// The iptables that the node uses: nft or legacy.
    #[arg(long)]
    iptables: Option<String>,
    /// The source of objects: manifests, or api (a list-and-watch server) [default: manifests].
    #[arg(long)]
    source: Option<String>,
    /// The flag --backstop of the proxy, in mode ebpf: auto, always or never [default: auto].
    #[arg(long)]
    backstop: Option<String>,
    /// The flag --links-path of the proxy, in mode ebpf: auto, programs, direct or
    /// netfilter [default: auto].
    #[arg(long)]
    links_path: Option<String>,
    /// The flag --links-masquerade of the proxy, in mode ebpf: netfilter or programs
    /// [default: netfilter].
    #[arg(long)]
    links_masquerade: Option<String>,
    /// The flag --links-direct of the proxy, in mode ebpf: learned or whole [default: learned].
    #[arg(long)]
    links_direct: Option<String>,
    /// The flag --links-xdp of the proxy, in mode ebpf: off, generic or native
    /// [default: off].
    #[arg(long)]
    links_xdp: Option<String>,
    /// The flag --sockets-scope of the proxy, in mode ebpf: auto, all or node [default: auto].
    #[arg(long)]
    sockets_scope: Option<String>,
    /// Run the cases of this folder instead of tests/cases.
    #[arg(long, value_name = "DIR")]
    cases: Option<PathBuf>,
    /// Run in a virtual machine with this kernel [default: 6.1 if the mode needs a virtual
    /// machine].
    #[arg(long)]
    kernel: Option<vm::Kernel>,
    /// Run only the cases with these names, without .yaml.
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    only: Vec<String>,
    /// Run all cases except those with these names.
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    except: Vec<String>,
}

/// Arguments that `cargo xtask bench` passes on to the bench program.
#[derive(Clone, Debug, Args)]
struct Bench {
    /// The dataplane to measure.
    #[arg(long, default_value = "ebpf")]
    mode: String,
    /// The iptables that the node uses: nft or legacy.
    #[arg(long)]
    iptables: Option<String>,
    /// Numbers of Services to measure with [default: 10,10000; with --check those of the promises,
    /// 10,10000,30000].
    #[arg(long, value_name = "N", value_delimiter = ',')]
    services: Vec<usize>,
    /// Measure only these parts: data, outside, time-wait, packets, maglev, foreign, changes,
    /// memory, restart, floods, rollout.
    #[arg(long, value_name = "PART", value_delimiter = ',')]
    only: Vec<String>,
    /// Measure only these paths: pod-to-cluster-ip, node-to-cluster-ip, client-to-node-port,
    /// client-masqueraded, client-to-kernel-nat.
    #[arg(long, value_name = "PATH", value_delimiter = ',')]
    path: Vec<String>,
    /// Measure only these ways of traffic from outside: routed, masquerading, direct, whole,
    /// kernel-nat, nftables, programs, dsr, dsr-whole, dsr-return.
    #[arg(long, value_name = "WAY", value_delimiter = ',')]
    way: Vec<String>,
    /// Measure the data path only with these workloads: connect-request-close, request-response,
    /// udp-request-response, bulk. Also for traffic from outside.
    #[arg(long, value_name = "WORKLOAD", value_delimiter = ',')]
    workload: Vec<String>,
    /// Measure briefly, to see that everything works.
    #[arg(long)]
    quick: bool,
    /// Fail if a promise of SPECIFICATION.md for this mode does not hold, or was not measured.
    /// Those of parts, paths and workloads that were not chosen do not count.
    #[arg(long)]
    check: bool,
    /// Measure changes, memory and restarts in the modes ebpf and nftables with 10, 1,000, 10,000
    /// and 30,000 Services, or with those of --services. Write the figures and their curves to
    /// docs/curves. With =redraw, measure nothing and draw the curves of the figures there.
    #[arg(
        long, value_name = "HOW", num_args = 0..=1, require_equals = true, default_missing_value = "measure",
        conflicts_with_all = ["mode", "iptables", "only", "path", "way", "workload"]
    )]
    plot: Option<Plot>,
}

/// The source of the figures of curves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Plot {
    /// New measurements.
    Measure,
    /// The figures in docs/curves.
    Redraw,
}

/// Runs the command line. Returns the exit code of the command, or 128 plus the signal that stopped
/// it.
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
        Command::Build { target: Some(target), .. } => {
            let program = release::binaries::build(*target, &workspace::target().join("static"))?;
            println!("{}", program.display());
        }
        Command::Build { release, target: None } => {
            setup::ensure_build()?;
            steps::build(*release).show()?;
        }
        Command::Programs => {
            setup::ensure_build()?;
            for program in ebpf::build_ebpf(&workspace::bpf_target(), ebpf::OBJECT)?.programs {
                println!("{program}");
            }
        }
        Command::Demo { mode } => {
            privilege::require("demo")?;
            setup::ensure()?;
            Unoptimised::Quick.build("demo").show()?;
            return Err(Unoptimised::Quick.program("demo", mode).exec());
        }
        Command::Fuzz { target, seconds } => {
            setup::ensure()?;
            fuzz::run(target.as_deref(), *seconds)?;
        }
        Command::Conformance(what) => {
            prepare_world("conformance")?;
            return conformance::run(what);
        }
        Command::Bench(what) => bench(what)?,
        Command::Soak { minutes, seed } => {
            prepare_world("soak")?;
            return Err(steps::soak(*minutes, *seed).exec());
        }
        Command::Test { quick, all_kernels } => {
            privilege::require("test")?;
            return test::run(match (quick, all_kernels) {
                (true, _) => Extent::Quick,
                (_, true) => Extent::AllKernels,
                _ => Extent::Whole,
            });
        }
        Command::Release(what) => release::run(what)?,
        Command::Docs => docs::run()?,
        Command::Monitoring { recording } => monitoring::run(recording.as_deref())?,
        Command::Vm(what) => return vm::run(what),
    }
    Ok(ExitCode::SUCCESS)
}

/// Measures, and draws curves if they are wanted.
fn bench(what: &Bench) -> Result<()> {
    if what.plot == Some(Plot::Redraw) {
        return plot::redraw();
    }
    prepare_world("bench")?;
    if what.plot == Some(Plot::Measure) {
        return plot::run(what);
    }
    let json = workspace::target().join(format!("bench-{}.json", what.mode));
    Err(steps::bench(what, &json).exec())
}

/// Sets up and builds for a command that replaces this process by a program of the test world
/// (`exec`). The program then owns the terminal, the signals and the exit status, and cleans up
/// after ctrl-C.
fn prepare_world(command: &str) -> Result<()> {
    privilege::require(command)?;
    setup::ensure()?;
    setup::ensure_world()?;
    steps::build_world()?.show()
}

/// Passes termination signals on to the running programs, so that they clean up.
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
    fn vm_command_keeps_its_own_flags() {
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
