//! The settings of the log.

use tracing_subscriber::filter::{LevelFilter, Targets};

use super::Settings;
use crate::{
    config::{FeatureGate, FeatureGates, environment::Environment, resolved::LogFormat},
    kernel::bpf::LogLevel,
};

/// What a log filter is.
const FILTER: &str = "a level (error, warn, info, debug, trace, off) or targets with levels, such as \
                      info,proxy_userspace=debug";
/// The targets of the lines that are not of libraries.
const TARGETS: [&str; 3] = ["shunt", "proxy_userspace", "ebpf"];

/// Returns `logging.format`.
pub(super) fn format(settings: &Settings) -> LogFormat {
    if settings.text("logging.format") == Some("json") { LogFormat::Json } else { LogFormat::Text }
}

/// Makes upstream's checks of settings that shunt does not use
/// (`component-base/logs/api/v1/options.go`).
pub(super) fn check_options(settings: &mut Settings, gates: &FeatureGates) {
    if format(settings) == LogFormat::Json && settings.given("logging.vmodule").is_some() {
        settings.reject("logging.vmodule", "must not be set when logging.format is json");
    }
    if gates.is_on(FeatureGate::LoggingAlphaOptions) {
        return;
    }
    for path in [
        "logging.options.text.splitStream",
        "logging.options.text.infoBufferSize",
        "logging.options.json.splitStream",
        "logging.options.json.infoBufferSize",
    ] {
        if settings.is_not_default(path) {
            settings.reject(path, "must not be set unless the feature gate LoggingAlphaOptions is on");
        }
    }
}

/// Returns the log filter if one is set, or else the filter for the verbosity. kube-proxy is
/// commonly run at verbosity 2. Libraries are logged only at the highest.
pub(super) fn filter(settings: &mut Settings, environment: &Environment) -> String {
    if let Some(filter) = settings.text("shunt.logFilter") {
        let filter = filter.to_owned();
        if !is_filter(&filter) {
            settings.reject("shunt.logFilter", format!("must be {FILTER}"));
        }
        return filter;
    }
    let of_environment = environment.log_filter.as_deref().filter(|filter| !filter.is_empty());
    let verbosity = settings.integer("logging.verbosity");
    match of_environment {
        // A variable of the whole container must not stop a node's proxy.
        Some(filter) if !is_filter(filter) => {
            settings.add_ineffective("RUST_LOG", format!("{filter:?} is not {FILTER}"));
        }
        Some(filter) if verbosity == 0 && settings.given("logging.verbosity").is_none() => {
            return filter.into();
        }
        _ => {}
    }
    filter_at(verbosity, of_programs(settings))
}

/// Returns true for a list of levels, of targets with levels, and of targets of this program.
///
/// For [`Targets`], any other word is a target too, of which everything is logged, and nothing of
/// other targets. So a misspelt level would turn the log off.
fn is_filter(text: &str) -> bool {
    let is_own = |word: &str| word.split("::").next().is_some_and(|crate_name| TARGETS.contains(&crate_name));
    let is_item = |item: &str| item.contains('=') || item.parse::<LevelFilter>().is_ok() || is_own(item);
    let is_plain = |item: &str| !item.is_empty() && !item.contains(char::is_whitespace);
    text.split(',').all(|item| is_plain(item) && is_item(item)) && text.parse::<Targets>().is_ok()
}

/// Returns the filter for a verbosity. One setting is enough to see what the programs report.
pub fn filter_at(verbosity: u32, of_programs: LogLevel) -> String {
    let filter = match verbosity {
        0..=3 => "info",
        4..=5 => "info,shunt=debug,proxy_userspace=debug",
        6..=7 => "info,shunt=trace,proxy_userspace=trace",
        _ => "trace",
    };
    if of_programs == LogLevel::Debug { format!("{filter},ebpf=debug") } else { filter.into() }
}

/// Returns `shunt.ebpf.log`.
pub(super) fn of_programs(settings: &Settings) -> LogLevel {
    match settings.text("shunt.ebpf.log") {
        Some("debug") => LogLevel::Debug,
        Some("info") => LogLevel::Info,
        Some("error") => LogLevel::Error,
        _ => LogLevel::Off,
    }
}
