//! What the manifests promise: that the capabilities they list are enough and each is needed, and that a changed configuration file
//! is taken on while traffic goes on.

mod capabilities;
mod config_file;
mod test_node;

use std::{path::PathBuf, process::ExitCode};

use anyhow::{Context as _, Result};
use clap::Parser;
use shunt_tests::{process, scenarios};

/// Runs the scenes of deployment with the real program; needs root.
#[derive(Debug, Parser)]
struct Arguments {
    /// The proxy's binary.
    #[arg(long, value_name = "PATH")]
    shunt: PathBuf,
    /// Only these scenes.
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    only: Vec<String>,
}

type Scene = fn(&std::path::Path) -> Result<()>;

const SCENES: [(&str, Scene); 10] = [
    ("capabilities-ebpf", |shunt| capabilities::those_of_the_manifest_are_enough(shunt, "ebpf")),
    ("capabilities-nftables", |shunt| capabilities::those_of_the_manifest_are_enough(shunt, "nftables")),
    ("capabilities-iptables", |shunt| capabilities::those_of_the_manifest_are_enough(shunt, "iptables")),
    ("without-net-admin", capabilities::without_net_admin_no_mode_starts_and_each_says_so),
    ("without-sys-admin", capabilities::without_sys_admin_ebpf_says_what_is_missing_and_the_others_run),
    ("without-net-raw", capabilities::without_net_raw_the_old_iptables_cannot_be_used_and_that_is_said),
    ("without-sys-resource", capabilities::without_sys_resource_the_oom_score_stays_and_that_is_said),
    ("init-only", capabilities::what_needs_privileges_is_done_ahead_and_the_program_ends),
    ("config-in-place", config_file::what_can_be_taken_on_in_place_is),
    ("config-restart", config_file::what_cannot_starts_the_program_anew_and_bad_files_change_nothing),
];

fn main() -> ExitCode {
    process::main("deployment", || run(&Arguments::parse()))
}

/// Whether all scenes went well.
fn run(arguments: &Arguments) -> Result<bool> {
    let shunt = arguments.shunt.canonicalize().context("--shunt")?;
    let scenes = scenarios::select(&SCENES, &arguments.only)?;
    Ok(scenarios::run_all(scenes, |scene: Scene| scene(&shunt)))
}
