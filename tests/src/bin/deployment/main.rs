//! Tests what the manifests promise: the listed capabilities are sufficient and each is needed, the
//! security modules that they switch off would deny eBPF, and shunt takes over a changed
//! configuration file while it serves traffic. With `--image`, tests the image of a release.

mod apparmor;
mod capabilities;
mod config_file;
mod container;
mod runtime;
mod test_node;

use std::{path::PathBuf, process::ExitCode};

use anyhow::{Context as _, Result, bail};
use clap::Parser;
use shunt_tests::{process, scenarios};

/// Runs the deployment scenarios with the real program. Needs root.
#[derive(Debug, Parser)]
struct Arguments {
    /// The binary of the proxy.
    #[arg(long, value_name = "PATH", required_unless_present = "image")]
    shunt: Option<PathBuf>,
    /// Run this image in containerd instead: an archive of an image layout.
    #[arg(long, value_name = "PATH", conflicts_with_all = ["shunt", "apparmor"])]
    image: Option<PathBuf>,
    /// Only these scenarios.
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    only: Vec<String>,
    /// Run the scenarios of AppArmor instead. They need a kernel with AppArmor and its parser.
    #[arg(long)]
    apparmor: bool,
}

type Scenario = fn(&std::path::Path) -> Result<()>;

const SCENARIOS: [(&str, Scenario); 12] = [
    ("capabilities-ebpf", |shunt| capabilities::capabilities_of_the_manifest_are_sufficient(shunt, "ebpf")),
    ("capabilities-nftables", |shunt| {
        capabilities::capabilities_of_the_manifest_are_sufficient(shunt, "nftables")
    }),
    ("capabilities-iptables", |shunt| {
        capabilities::capabilities_of_the_manifest_are_sufficient(shunt, "iptables")
    }),
    ("needed-capabilities", capabilities::each_mode_runs_with_the_capabilities_that_it_needs),
    ("read-only-cgroups", capabilities::ebpf_works_on_read_only_cgroups_of_either_layout),
    ("without-net-admin", capabilities::without_net_admin_no_mode_starts),
    ("without-sys-admin", capabilities::without_sys_admin_only_ebpf_does_not_start),
    ("without-net-raw", capabilities::without_net_raw_iptables_legacy_is_an_error),
    ("without-sys-resource", capabilities::without_sys_resource_the_oom_score_stays),
    ("init-only", capabilities::init_only_makes_the_settings_and_exits),
    ("config-in-place", config_file::settings_change_without_a_restart),
    ("config-restart", config_file::a_new_mode_restarts_and_a_bad_file_changes_nothing),
];

const APPARMOR: [(&str, Scenario); 4] = [
    ("apparmor-probe", apparmor::the_probe_names_the_profile),
    ("apparmor-auto", apparmor::auto_falls_back_and_names_the_profile),
    ("apparmor-ebpf", apparmor::ebpf_does_not_start_and_names_the_profile),
    ("apparmor-unconfined", apparmor::auto_uses_ebpf_without_a_profile),
];

const IMAGE: [(&str, Scenario); 4] = [
    ("image-ebpf", container::ebpf),
    ("image-nftables", container::nftables),
    ("image-iptables-nft", container::iptables_nft),
    ("image-iptables-legacy", container::iptables_legacy),
];

fn main() -> ExitCode {
    process::main("deployment", || run(&Arguments::parse()))
}

/// Returns true if all scenarios passed.
fn run(arguments: &Arguments) -> Result<bool> {
    let (of_kind, tested) = match (&arguments.image, &arguments.shunt) {
        (Some(image), _) => (&IMAGE[..], image),
        (None, Some(shunt)) if arguments.apparmor => (&APPARMOR[..], shunt),
        (None, Some(shunt)) => (&SCENARIOS[..], shunt),
        (None, None) => bail!("give --shunt or --image"),
    };
    let tested = tested.canonicalize().with_context(|| tested.display().to_string())?;
    let scenarios = scenarios::select(of_kind, &arguments.only)?;
    Ok(scenarios::run_all(scenarios, |scenario: Scenario| scenario(&tested)))
}
