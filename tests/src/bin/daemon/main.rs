//! What the daemon does beside serving: what it does without its API server, when its mode breaks, to the node's settings, and what
//! it tells.

mod auto;
mod bpffs;
mod lifecycle;
mod missing;
mod outages;
mod pages;
mod repairs;
mod test_node;
mod trace;

use std::{path::PathBuf, process::ExitCode};

use anyhow::{Context as _, Result};
use clap::Parser;
use shunt_tests::{process, scenarios};

use self::test_node::Setup;

/// Runs the scenes of the daemon, with the API as source; needs root.
#[derive(Debug, Parser)]
struct Arguments {
    /// The proxy's mode.
    #[arg(long, default_value = "ebpf")]
    mode: String,
    /// The proxy's binary.
    #[arg(long, value_name = "PATH")]
    shunt: PathBuf,
    /// Only these scenes.
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    only: Vec<String>,
}

type Scene = fn(&Setup) -> Result<()>;

const SCENES: [(&str, Scene); 19] = [
    ("outages", outages::the_api_server_may_do_anything_while_traffic_goes_on),
    ("repairs", repairs::what_others_change_by_hand_is_put_right),
    ("broken-mode", auto::a_mode_that_breaks_is_followed_by_the_next_with_traffic_kept),
    ("incomplete-mode", auto::a_mode_that_leaves_a_service_out_leaves_others_their_rules),
    ("unstartable-mode", auto::a_mode_that_cannot_start_is_passed_over),
    ("no-bpffs", bpffs::a_proxy_without_a_bpf_filesystem_says_so_and_ends),
    ("lost-bpffs", bpffs::a_bpf_filesystem_that_goes_makes_it_unhealthy_until_it_is_back),
    ("refused-nftables", missing::nftables_that_is_refused_is_followed_by_iptables),
    ("no-iptables", missing::a_node_without_iptables_is_told_what_is_missing),
    ("failed-restores", missing::a_restore_that_fails_is_tried_again_later_and_later),
    ("sysctls", lifecycle::settings_of_the_node_are_made),
    ("read-only-sysctls", lifecycle::settings_that_cannot_be_made_are_told_and_no_reason_to_stop),
    ("late-node", lifecycle::the_node_object_is_waited_for),
    ("events", lifecycle::events_tell_of_a_start_and_of_what_is_refused),
    ("pages", pages::metrics_are_valid_and_the_configuration_is_shown),
    ("ebpf-log", trace::connections_are_logged_where_tracing_is_on),
    ("shutdown-in-restore", missing::sigterm_waits_for_no_restore_that_does_not_end),
    ("shutdown-in-restart", lifecycle::sigterm_is_heard_while_the_program_starts_anew),
    ("shutdown", lifecycle::sigterm_leaves_traffic_alone),
];

fn main() -> ExitCode {
    process::main("daemon", || run(Arguments::parse()))
}

/// Whether all scenes went well.
fn run(arguments: Arguments) -> Result<bool> {
    let shunt = arguments.shunt.canonicalize().context("--shunt")?;
    let setup = Setup { shunt, mode: arguments.mode };
    let scenes = scenarios::select(&SCENES, &arguments.only)?;
    Ok(scenarios::run_all(scenes, |scene: Scene| scene(&setup)))
}
