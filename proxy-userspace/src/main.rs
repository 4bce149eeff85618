//! The `shunt` command: reads what the operator wants, sets up logs, and runs.

mod run;

use self::run::{End, LogFilter};

use std::{
    io::{IsTerminal, stderr},
    process::ExitCode,
};

use proxy_userspace::{
    causes::with_causes,
    config::{Config, Environment, Flags, LogFormat},
    kernel::{allocator, restart::restart},
};
use tracing_subscriber::{
    Layer as _, Registry, filter::Targets, fmt, layer::SubscriberExt as _, reload,
    util::SubscriberInitExt as _,
};

/// The sync loop has the main thread to itself; sources and endpoints share these, so that a long list does not keep a
/// probe waiting.
const WORKERS: usize = 2;

fn main() -> ExitCode {
    allocator::keep_little();
    let flags = match Flags::parse(std::env::args_os()) {
        Ok(flags) => flags,
        Err(error) => error.exit(),
    };
    if let Some(output) = flags.probe {
        return run::probe(output);
    }
    let (is_cleanup, init_only, write_config_to) =
        (flags.cleanup, flags.init_only, flags.write_config_to.clone());
    let chosen = match run::Chosen::new(flags, Environment::of_this_process()) {
        Ok(chosen) => chosen,
        Err(error) => {
            eprintln!("shunt: {}", with_causes(&error));
            return ExitCode::FAILURE;
        }
    };
    let set_log_filter = set_up_logs(&chosen.config);
    let done = if let Some(path) = write_config_to {
        run::write_config(&chosen.config, &path)
    } else if is_cleanup {
        run::cleanup(&chosen.config)
    } else if init_only {
        run::init_only(&chosen.config)
    } else {
        run_daemon(chosen, set_log_filter)
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(error = with_causes(error.as_ref()), "exiting");
            ExitCode::FAILURE
        }
    }
}

fn run_daemon(chosen: run::Chosen, set_log_filter: LogFilter) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(WORKERS).enable_all().build()?;
    let result = runtime.block_on(run::run(chosen, set_log_filter));
    // Whatever still reads a file or resolves a name must not hold up the end.
    runtime.shutdown_background();
    match result? {
        End::Signal => Ok(()),
        End::Restart => Err(restart().into()),
    }
}

/// Logs go to standard error, as kube-proxy's do. Returns what sets another filter.
fn set_up_logs(config: &Config) -> LogFilter {
    let layer = fmt::layer().with_writer(stderr).with_ansi(stderr().is_terminal());
    let layer: Box<dyn tracing_subscriber::Layer<Registry> + Send + Sync> = match config.log_format {
        LogFormat::Text => layer.boxed(),
        LogFormat::Json => layer.json().flatten_event(true).boxed(),
    };
    // --log-filter was checked; RUST_LOG was not, and a bad one must not keep a node's proxy from running.
    let targets =
        |text: &str| text.parse().unwrap_or_else(|_| Targets::new().with_default(tracing::Level::INFO));
    let (filter, handle) = reload::Layer::new(targets(&config.log_filter));
    tracing_subscriber::registry().with(layer.with_filter(filter)).init();
    Box::new(move |text| {
        if let Err(error) = handle.reload(targets(text)) {
            tracing::error!(%error, "the log filter stays as it is");
        }
    })
}
