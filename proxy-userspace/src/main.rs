//! The `shunt` command: reads what the operator wants, sets up logs, and runs.

mod run;

use self::run::{End, LogFilter, Stopping};

use std::{
    io::{IsTerminal, stderr},
    process::ExitCode,
};

use proxy_userspace::{
    causes::with_causes,
    config::{Config, Environment, Flags, LogFormat},
    kernel::{allocator, command, restart::restart},
};
use tokio::runtime::{self, Runtime};
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
    let daemon = match (!is_cleanup && !init_only && write_config_to.is_none()).then(Daemon::new).transpose()
    {
        Ok(daemon) => daemon,
        Err(error) => {
            eprintln!("shunt: cannot start threads or wait for signals: {}", with_causes(error.as_ref()));
            return ExitCode::FAILURE;
        }
    };
    let chosen = match run::Chosen::new(flags, Environment::of_this_process()) {
        Ok(chosen) => chosen,
        Err(error) => {
            eprintln!("shunt: {}", with_causes(&error));
            return ExitCode::FAILURE;
        }
    };
    let set_log_filter = set_up_logs(&chosen.config);
    let done = if let Some(daemon) = daemon {
        daemon.run(chosen, set_log_filter)
    } else if let Some(path) = write_config_to {
        run::write_config(&chosen.config, &path)
    } else if is_cleanup {
        run::cleanup(&chosen.config)
    } else {
        run::init_only(&chosen.config)
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(error = with_causes(error.as_ref()), "exiting");
            ExitCode::FAILURE
        }
    }
}

/// What the proxy runs on, and what ends it. It is there before anything takes a while: the first process of a container is not ended by a
/// signal that it does not wait for.
struct Daemon {
    runtime: Runtime,
    stopping: Stopping,
}

impl Daemon {
    fn new() -> anyhow::Result<Self> {
        let stopping = run::await_signals()?;
        let runtime = runtime::Builder::new_multi_thread().worker_threads(WORKERS).enable_all().build()?;
        Ok(Self { runtime, stopping })
    }

    fn run(self, chosen: run::Chosen, set_log_filter: LogFilter) -> anyhow::Result<()> {
        let Self { runtime, stopping } = self;
        let result = runtime.block_on(run::run(chosen, set_log_filter, stopping));
        // Whatever still reads a file or resolves a name must not hold up the end.
        runtime.shutdown_background();
        match result? {
            End::Signal => Ok(()),
            // A signal came since; one that comes later is the next process's.
            End::Restart if command::is_ending() => Ok(()),
            End::Restart => Err(restart().into()),
        }
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
