//! What the daemon does beside serving: what it does without its API server, when its mode breaks, to the node's settings, and what
//! it tells.

mod auto;
mod bed;
mod node;
mod outages;
mod repairs;

use std::{path::PathBuf, process::ExitCode};

use anyhow::{Context as _, Result, ensure};
use clap::Parser;
use shunt_tests::{deadline::Stopwatch, process};

use self::bed::Setting;

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

type Scene = fn(&Setting) -> Result<()>;

const SCENES: [(&str, Scene); 9] = [
    ("outages", outages::the_api_server_may_do_anything_while_traffic_goes_on),
    ("repairs", repairs::what_others_change_by_hand_is_put_right),
    ("broken-mode", auto::a_mode_that_breaks_is_followed_by_the_next_with_traffic_kept),
    ("unstartable-mode", auto::a_mode_that_cannot_start_is_passed_over),
    ("sysctls", node::settings_of_the_node_are_made),
    ("read-only-sysctls", node::settings_that_cannot_be_made_are_told_and_no_reason_to_stop),
    ("late-node", node::the_node_object_is_waited_for),
    ("events", node::events_tell_of_a_start_and_of_what_is_refused),
    ("shutdown", node::sigterm_leaves_traffic_alone),
];

fn main() -> ExitCode {
    process::main("daemon", || run(Arguments::parse()))
}

/// Whether all scenes went well.
fn run(arguments: Arguments) -> Result<bool> {
    let shunt = arguments.shunt.canonicalize().context("--shunt")?;
    let setting = Setting { shunt, mode: arguments.mode };
    let is_known = |name: &String| SCENES.iter().any(|(scene, _)| scene == name);
    ensure!(
        arguments.only.iter().all(is_known),
        "--only: scenes are {}",
        SCENES.map(|(name, _)| name).join(", ")
    );
    let chosen = SCENES
        .iter()
        .filter(|(name, _)| arguments.only.is_empty() || arguments.only.iter().any(|only| only == name));
    let (mut passed, mut failed) = (0, 0);
    for (name, scene) in chosen {
        let began = Stopwatch::start();
        let ended = scene(&setting);
        let took = began.elapsed().as_secs_f32();
        match ended {
            Ok(()) => {
                passed += 1;
                println!("PASS    {name} ({took:.1} s)");
            }
            Err(error) => {
                failed += 1;
                println!("FAIL    {name} ({took:.1} s)\n    {error:#}");
            }
        }
    }
    println!("{passed} passed, {failed} failed");
    Ok(failed == 0)
}
