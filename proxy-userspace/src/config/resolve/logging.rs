//! What the settings of logs come to.

use super::{Environment, LogFormat, Settings};
use crate::kernel::bpf::LogLevel;

/// Upstream's feature gate for `logging.options`.
const ALPHA_OPTIONS: &str = "LoggingAlphaOptions";

/// `logging.format`.
pub(super) fn format(settings: &Settings) -> LogFormat {
    if settings.text("logging.format") == Some("json") { LogFormat::Json } else { LogFormat::Text }
}

/// Upstream's checks of what this program does not use (`component-base/logs/api/v1/options.go`).
pub(super) fn check_options(settings: &mut Settings) {
    if format(settings) == LogFormat::Json && settings.is_given("logging.vmodule") {
        settings.refuse("logging.vmodule", "must not be set when logging.format is json");
    }
    if settings.gate(ALPHA_OPTIONS) || settings.gate("AllAlpha") {
        return;
    }
    for path in [
        "logging.options.text.splitStream",
        "logging.options.text.infoBufferSize",
        "logging.options.json.splitStream",
        "logging.options.json.infoBufferSize",
    ] {
        if settings.is_set_apart_from_default(path) {
            settings.refuse(path, format!("must not be set unless the feature gate {ALPHA_OPTIONS} is on"));
        }
    }
}

/// A filter if one is set, else the level that the verbosity stands for; kube-proxy is commonly run at 2. What libraries
/// say comes only at the highest.
pub(super) fn filter(settings: &mut Settings, environment: &Environment) -> String {
    if let Some(filter) = settings.text("shunt.logFilter") {
        let filter = filter.to_owned();
        if filter.parse::<tracing_subscriber::filter::Targets>().is_err() {
            settings.refuse(
                "shunt.logFilter",
                "must be a level or targets with levels, such as info,proxy_userspace=debug",
            );
        }
        return filter;
    }
    let of_environment = environment.log_filter.as_deref().filter(|filter| !filter.is_empty());
    let filter = match (settings.integer::<u32>("logging.verbosity"), of_environment) {
        (0, Some(filter)) if !settings.is_given("logging.verbosity") => return filter.into(),
        (0..=3, _) => "info",
        (4..=5, _) => "info,shunt=debug,proxy_userspace=debug",
        (6..=7, _) => "info,shunt=trace,proxy_userspace=trace",
        _ => "trace",
    };
    // What programs are asked to tell is not to be asked for twice.
    if of_programs(settings) == LogLevel::Debug { format!("{filter},ebpf=debug") } else { filter.into() }
}

/// `shunt.ebpf.log`.
pub(super) fn of_programs(settings: &Settings) -> LogLevel {
    match settings.text("shunt.ebpf.log") {
        Some("debug") => LogLevel::Debug,
        Some("info") => LogLevel::Info,
        Some("error") => LogLevel::Error,
        _ => LogLevel::Off,
    }
}
