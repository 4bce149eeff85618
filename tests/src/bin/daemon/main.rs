//! Scenarios of the daemon with an API server: outages, repairs, broken modes, settings of the
//! node, and what it logs and exposes.

mod auto;
mod bpffs;
mod browser;
mod bundle;
mod commands;
mod doctor;
mod explained;
mod give_back;
mod lifecycle;
mod lists;
mod missing;
mod monitoring;
mod outages;
mod pages;
mod repairs;
mod rights;
mod test_node;
mod top;
mod trace;
mod tracing;
mod ui;
mod verbs;

use std::{path::PathBuf, process::ExitCode};

use anyhow::{Context as _, Result};
use clap::Parser;
use shunt_tests::{process, scenarios};

use self::test_node::Setup;

/// Runs the scenarios of the daemon, with the API as source. Needs root.
#[derive(Debug, Parser)]
struct Arguments {
    /// The mode of the proxy.
    #[arg(long, default_value = "ebpf")]
    mode: String,
    /// The binary of the proxy.
    #[arg(long, value_name = "PATH")]
    shunt: PathBuf,
    /// Run no scenario, but load for some minutes, and write what the dashboards show to this file.
    #[arg(long, value_name = "FILE", conflicts_with = "only")]
    record: Option<PathBuf>,
    /// Run no scenario, but take the pictures of the pages for the documents into this directory.
    #[arg(long, value_name = "DIRECTORY", conflicts_with_all = ["only", "record"])]
    pictures: Option<PathBuf>,
    /// Only these scenarios.
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    only: Vec<String>,
}

type Scenario = fn(&Setup) -> Result<()>;

const SCENARIOS: &[(&str, Scenario)] = &[
    ("outages", outages::traffic_continues_whatever_the_api_server_does),
    ("repairs", repairs::drift_is_repaired),
    ("broken-mode", auto::a_broken_mode_is_replaced_and_traffic_continues),
    ("incomplete-mode", auto::other_modes_rules_stay_while_a_service_is_left_out),
    ("unstartable-mode", auto::a_mode_that_cannot_start_is_skipped),
    ("no-bpffs", bpffs::without_a_bpf_filesystem_the_proxy_ends_with_an_error),
    ("container-bpffs", bpffs::a_bpf_filesystem_of_the_container_only_is_refused_for_ebpf),
    ("lost-bpffs", bpffs::a_lost_bpf_filesystem_makes_the_proxy_unhealthy),
    ("shared-pins", bpffs::another_node_leaves_the_pins_of_a_running_proxy_alone),
    ("give-back", give_back::a_node_goes_to_shunt_and_back_without_a_failed_connection),
    ("replaced", give_back::programs_stay_until_another_proxy_serves_and_the_next_start_reports_them),
    ("cleanup-tables", give_back::cleanup_own_removes_what_kube_proxy_leaves_in_its_tables),
    ("cleanup-again", give_back::cleanup_own_waits_again_if_shunt_starts_in_the_ebpf_mode_meanwhile),
    ("cleanup-refused", give_back::cleanup_fails_at_once_while_shunt_runs_in_the_ebpf_mode),
    ("cleanup-refused-nftables", give_back::cleanup_fails_at_once_while_shunt_runs_in_the_nftables_mode),
    ("refused-nftables", missing::iptables_replaces_nftables_if_the_tables_are_refused),
    ("no-iptables", missing::without_iptables_the_error_names_what_is_missing),
    ("failed-restores", missing::a_failed_restore_is_retried_with_backoff),
    ("sysctls", lifecycle::the_nodes_settings_are_made),
    ("read-only-sysctls", lifecycle::settings_that_cannot_be_made_are_logged),
    ("late-node", lifecycle::the_proxy_waits_for_the_node_object),
    ("http-proxy", lifecycle::the_proxy_of_the_environment_is_used),
    ("events", lifecycle::events_report_the_start_and_refused_settings),
    ("hard-fail", lifecycle::an_address_that_cannot_be_used_ends_the_proxy_after_an_event),
    ("rights", rights::the_role_of_the_manifests_has_the_rights_that_are_needed_and_no_more),
    ("pages", pages::metrics_are_valid_and_configz_shows_the_configuration),
    ("statusz", pages::statusz_names_mode_link_path_and_socket_scope),
    ("link-path", pages::log_event_metric_and_page_say_why_a_node_has_its_link_path),
    ("impostor", verbs::an_answer_of_another_user_is_not_believed),
    ("verbs", verbs::get_and_explain_answer_on_the_node),
    ("commands", commands::commands_of_the_pages_work_on_a_node),
    ("affinity", lists::clients_with_affinity_are_listed),
    ("connections", lists::connections_and_flows_are_selected),
    ("drift", lists::drift_is_named),
    ("top", top::top_shows_what_happens_and_gives_the_terminal_back),
    ("ui", ui::pages_work_in_a_browser_with_and_without_scripts),
    ("explain-affinity", explained::the_holder_of_affinity_is_named),
    ("explain-others", explained::rules_of_others_on_the_way_are_named),
    ("explain-check", explained::a_check_names_where_the_kernel_differs),
    ("monitoring", monitoring::queries_have_data_and_alerts_react),
    ("bundle", bundle::a_bug_report_has_everything_but_secrets),
    ("doctor", doctor::doctor_finds_each_fault_and_none_on_a_healthy_node),
    ("trace", tracing::a_trace_is_what_clients_did_and_costs_nothing_otherwise),
    ("trace-links", tracing::a_trace_leaves_links_on_their_path),
    ("trace-netfilter", tracing::netfilter_is_traced_by_rules_that_are_removed),
    ("ebpf-log", trace::connections_are_logged_where_tracing_is_on),
    ("shutdown-in-restore", missing::sigterm_does_not_wait_for_a_hanging_restore),
    ("shutdown-in-restart", lifecycle::sigterm_ends_the_proxy_during_a_restart),
    ("shutdown", lifecycle::sigterm_does_not_affect_traffic),
];

fn main() -> ExitCode {
    process::main("daemon", || run(Arguments::parse()))
}

/// Returns true if all scenarios passed.
fn run(arguments: Arguments) -> Result<bool> {
    let shunt = arguments.shunt.canonicalize().context("--shunt")?;
    let setup = Setup { shunt, mode: arguments.mode };
    if let Some(file) = arguments.record {
        return monitoring::record(&setup, &file).map(|()| true);
    }
    if let Some(directory) = arguments.pictures {
        return ui::take_pictures(&setup, &directory).map(|()| true);
    }
    let scenarios = scenarios::select(SCENARIOS, &arguments.only)?;
    Ok(scenarios::run_all(scenarios, |scenario: Scenario| scenario(&setup)))
}
