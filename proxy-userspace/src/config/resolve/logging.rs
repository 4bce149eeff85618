//! The settings of the log.

use super::Settings;
use crate::{
    config::{FeatureGate, FeatureGates, environment::Environment, resolved::LogFormat},
    kernel::bpf::LogLevel,
};

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
        if filter.parse::<tracing_subscriber::filter::Targets>().is_err() {
            settings.reject(
                "shunt.logFilter",
                "must be a level or targets with levels, such as info,proxy_userspace=debug",
            );
        }
        return filter;
    }
    let of_environment = environment.log_filter.as_deref().filter(|filter| !filter.is_empty());
    let verbosity = settings.integer("logging.verbosity");
    match of_environment {
        Some(filter) if verbosity == 0 && settings.given("logging.verbosity").is_none() => filter.into(),
        _ => filter_at(verbosity, of_programs(settings)),
    }
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
