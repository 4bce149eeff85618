//! Runs the conformance cases against a proxy in a world of network namespaces.

use std::{path::PathBuf, process::ExitCode};

use anyhow::{Context as _, Result};
use clap::Parser;
use shunt_tests::{
    case::Case,
    deadline::Stopwatch,
    process,
    runner::{
        IptablesVariant, LinkFlags, ObjectSourceKind, Runner, Selection, Summary, adapt_to_mode,
        cases_directory,
    },
    world::{Host, World},
};

/// Runs the conformance cases: the proxy runs on a node made of network namespaces, and pods, nodes
/// and a client make real connections.
#[derive(Debug, Parser)]
struct Arguments {
    /// The mode of the proxy: ebpf, nftables, iptables or ipvs.
    #[arg(long)]
    mode: String,
    /// The iptables variant that node1 signals, as the kubelet does.
    #[arg(long)]
    iptables: Option<IptablesVariant>,
    /// The source of the proxy's objects: manifests, or an API server on node1.
    #[arg(long, value_name = "manifests|api", default_value = "manifests")]
    source: ObjectSourceKind,
    /// The proxy's flag --backstop, in mode ebpf.
    #[arg(long, value_name = "auto|always|never")]
    backstop: Option<String>,
    #[command(flatten)]
    links: LinkFlags,
    /// The proxy's flag --sockets-scope, in mode ebpf.
    #[arg(long, value_name = "auto|all|node")]
    sockets_scope: Option<String>,
    /// A directory of cases.
    #[arg(long, value_name = "DIR", default_value = cases_directory().as_os_str())]
    cases: PathBuf,
    /// Only these cases.
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    only: Vec<String>,
    /// Not these cases.
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    except: Vec<String>,
    /// The binary of the proxy.
    #[arg(long, value_name = "PATH", required_unless_present = "no_proxy")]
    shunt: Option<PathBuf>,
    /// Run without a proxy, to see that the checks fail.
    #[arg(long, conflicts_with = "shunt")]
    no_proxy: bool,
    /// Do not skip cases that need a feature that this kernel lacks. They fail then.
    #[arg(long)]
    whole: bool,
    /// Print one JSON document instead of text.
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    process::main("conformance", || run(Arguments::parse()))
}

/// Returns true if nothing failed.
fn run(arguments: Arguments) -> Result<bool> {
    let began = Stopwatch::start();
    let mut cases = Case::read_directory(&arguments.cases, &arguments.only)?;
    cases.retain(|case| !arguments.except.contains(&case.name));
    let cases: Vec<Case> = cases.into_iter().map(|case| adapt_to_mode(case, &arguments.mode)).collect();
    let shunt = arguments
        .shunt
        .map(|path| path.canonicalize().with_context(|| format!("--shunt {}", path.display())));
    let shunt = shunt.transpose()?;
    let program = std::env::current_exe().context("find the runner's own program")?;
    let mut world = World::build(&Host::ALL, &program)?;
    let links = arguments.links;
    links.prepare(&mut world)?;
    let iptables = arguments.iptables;
    iptables.map_or(Ok(()), |iptables| iptables.write_hint(&world))?;
    let selection = Selection::new(&arguments.mode)
        .with_iptables(iptables.unwrap_or(IptablesVariant::Nft))
        .with_links(links.clone());
    let selection = if arguments.whole { selection } else { selection.without_unsupported(&world) };
    let (mode, source) = (arguments.mode, arguments.source);
    let flags = [("--backstop", arguments.backstop), ("--sockets-scope", arguments.sockets_scope)];
    let flags = flags.into_iter().filter_map(|(flag, value)| Some((flag, value?))).collect();
    let mut runner = Runner { world, shunt, mode, source, selection, iptables, links, flags };
    let mut reports = Vec::new();
    for case in &cases {
        let report = runner.run(case);
        if !arguments.json {
            println!("{report}");
        }
        reports.push(report);
    }
    drop(runner);
    let summary = Summary::new(&reports, began.elapsed());
    if arguments.json {
        println!("{}", serde_json::to_string_pretty(&summary)?);
    } else {
        println!("\n{summary}");
    }
    Ok(summary.is_success())
}
