//! Measures the proxy in a world of network namespaces.

use std::{fs, path::PathBuf, process::ExitCode};

use anyhow::{Context as _, Result, ensure};
use clap::Parser;
use shunt_tests::{
    bench::{self, Bench, Effort, Part, Path, Way, Workload},
    process,
    runner::IptablesVariant,
};

/// The numbers of Services, if the command line has none and nothing is checked.
const SIZES: [usize; 2] = [10, 10_000];

/// Measures the cost of Services compared with direct connections, the cost of a change, and the
/// memory of the proxy.
#[derive(Debug, Parser)]
struct Arguments {
    /// The proxy's mode.
    #[arg(long, default_value = "ebpf")]
    mode: String,
    /// The iptables variant that the node signals, as the kubelet does.
    #[arg(long)]
    iptables: Option<IptablesVariant>,
    /// Numbers of Services to measure with [default: 10,10000; with --check those of the promises].
    #[arg(long, value_name = "N,...", value_delimiter = ',')]
    services: Vec<usize>,
    /// Measure only these parts.
    #[arg(long, value_name = "PART,...", value_delimiter = ',')]
    only: Vec<Part>,
    /// Measure only these paths of the data path.
    #[arg(long = "path", value_name = "PATH,...", value_delimiter = ',')]
    paths: Vec<Path>,
    /// Measure only these ways of traffic from outside.
    #[arg(long = "way", value_name = "WAY,...", value_delimiter = ',')]
    ways: Vec<Way>,
    /// Measure the data path only with these operations.
    #[arg(long = "workload", value_name = "WORKLOAD,...", value_delimiter = ',')]
    workloads: Vec<Workload>,
    /// Measure everything briefly, to see that it works.
    #[arg(long)]
    quick: bool,
    /// Exit with an error if a promise of SPECIFICATION.md does not hold, or was not measured.
    /// Those of parts, paths and workloads that were not chosen do not count.
    #[arg(long)]
    check: bool,
    /// The binary of the proxy.
    #[arg(long, value_name = "PATH")]
    shunt: PathBuf,
    /// Write all figures to this file, as JSON.
    #[arg(long, value_name = "PATH")]
    json: Option<PathBuf>,
}

fn main() -> ExitCode {
    process::main("bench", || run(Arguments::parse()))
}

fn run(arguments: Arguments) -> Result<bool> {
    let services = match (arguments.services, arguments.check) {
        (given, _) if !given.is_empty() => given,
        (_, true) => bench::sizes(&arguments.mode),
        (_, false) => SIZES.to_vec(),
    };
    for services in &services {
        // Cluster IPs of the test world have 16 bits. There are four times as many pods, and they
        // do not all fit into the pod range. That does no harm, because only the pods of the
        // measured Service receive connections.
        ensure!((2..=60_000).contains(services), "--services {services}: the world has room for 2 to 60000");
    }
    let bench = Bench {
        shunt: arguments.shunt.canonicalize().context("--shunt")?,
        mode: arguments.mode,
        iptables: arguments.iptables,
        services,
        parts: chosen_or_all(arguments.only, &Part::ALL),
        paths: chosen_or_all(arguments.paths, &Path::ALL),
        ways: chosen_or_all(arguments.ways, &Way::ALL),
        workloads: chosen_or_all(arguments.workloads, &Workload::ALL),
        effort: if arguments.quick { Effort::QUICK } else { Effort::FULL },
    };
    let report = bench.run(&mut |operation| eprintln!("{operation}"))?;
    println!("{report}");
    if let Some(path) = &arguments.json {
        let text = serde_json::to_string_pretty(&report)?;
        fs::write(path, text).with_context(|| format!("write {}", path.display()))?;
        println!("All figures are in {}", path.display());
    }
    Ok(!arguments.check || report.meets_all_targets())
}

fn chosen_or_all<T: Clone>(chosen: Vec<T>, all: &[T]) -> Vec<T> {
    if chosen.is_empty() { all.to_vec() } else { chosen }
}
