//! The `shunt` command: reads the command line and the configuration, sets up the log, and runs.
#![deny(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "they panic if nobody reads: write to stdout, and use run::tell for standard error"
)]

mod run;

use self::run::{Exit, ModeChoice, SetLogFilter, tell};

use std::{
    io::{IsTerminal, stderr},
    process::ExitCode,
    sync::Arc,
};

use proxy_userspace::{
    causes::with_causes,
    config::{Config, Environment, Flags, LogFormat},
    kernel::{command::Launcher, hangup::Hangups, process_memory, restart::restart},
};
use tokio::runtime::{self, Runtime};
use tokio_util::sync::CancellationToken;
use tracing_subscriber::{
    Layer as _, Registry, filter::Targets, fmt, layer::SubscriberExt as _, reload,
    util::SubscriberInitExt as _,
};

/// Threads of sources and HTTP endpoints. The sync loop has the main thread to itself.
///
/// One is enough: other threads read files, and a page of a list takes milliseconds. A second one
/// would be woken for each object of a list. That costs about as much as decoding it.
const WORKERS: usize = 1;

fn main() -> ExitCode {
    process_memory::limit_free_memory();
    let flags = match Flags::parse(std::env::args_os()) {
        Ok(flags) => flags,
        Err(error) => error.exit(),
    };
    run_subcommand(&flags).unwrap_or_else(|| run_proxy(flags))
}

/// Runs the subcommand. `None` if there is none.
fn run_subcommand(flags: &Flags) -> Option<ExitCode> {
    if let Some(output) = flags.probe {
        Some(run::probe(output))
    } else if let Some(verb) = &flags.verb {
        Some(run::verb(verb))
    } else if let Some(arguments) = &flags.doctor {
        Some(run::doctor(arguments))
    } else if let Some(arguments) = &flags.top {
        Some(run::top(arguments))
    } else {
        flags.generated.as_ref().map(run::generate)
    }
}

/// Runs the proxy, or one of its tasks after which it exits.
fn run_proxy(flags: Flags) -> ExitCode {
    let once = flags.clone();
    let shutdown = CancellationToken::new();
    let runtime = match once.runs().then(|| start_runtime(&shutdown)).transpose() {
        Ok(runtime) => runtime,
        Err(error) => {
            tell(format_args!("cannot start threads or wait for signals: {}", with_causes(error.as_ref())));
            return ExitCode::FAILURE;
        }
    };
    let launcher = Launcher::default().until(shutdown.clone());
    let choice = match ModeChoice::new(flags, Environment::of_this_process(), launcher) {
        Ok(choice) => choice,
        Err(error) => {
            tell(with_causes(&error));
            return ExitCode::FAILURE;
        }
    };
    let set_log_filter = set_up_log(&choice.config);
    let done = if let Some(runtime) = runtime {
        run_daemon(runtime, choice, set_log_filter, &shutdown)
    } else if let Some(path) = once.write_config_to {
        run::write_config(&choice.config, &path)
    } else if once.cleanup {
        run::cleanup(&choice.config)
    } else if once.cleanup_own {
        run::cleanup_own(&choice.config)
    } else {
        run::init_only(&choice.config)
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let error = with_causes(error.as_ref());
            tracing::error!(error, "exiting");
            // The filter of the log may leave out everything.
            if !tracing::enabled!(tracing::Level::ERROR) {
                tell(error);
            }
            ExitCode::FAILURE
        }
    }
}

/// Starts to wait for signals, and then the runtime. This comes before anything that takes time:
/// the kernel drops a signal to the first process of a container unless the process waits for it.
fn start_runtime(shutdown: &CancellationToken) -> anyhow::Result<Runtime> {
    run::cancel_on_signal(shutdown.clone())?;
    let runtime = runtime::Builder::new_multi_thread().worker_threads(WORKERS).enable_all().build()?;
    // A SIGHUP must not end the process before something waits for it.
    runtime.block_on(async { Hangups::listen() })?;
    Ok(runtime)
}

fn run_daemon(
    runtime: Runtime,
    choice: ModeChoice,
    set_log_filter: SetLogFilter,
    shutdown: &CancellationToken,
) -> anyhow::Result<()> {
    let result = runtime.block_on(run::run(choice, set_log_filter, shutdown.clone()));
    // A task that still reads a file or resolves a name must not delay the exit.
    runtime.shutdown_background();
    match result? {
        Exit::Shutdown => Ok(()),
        // A signal arrived meanwhile. A later one is for the next process.
        Exit::Restart if shutdown.is_cancelled() => Ok(()),
        Exit::Restart => Err(restart().into()),
    }
}

/// Sets up the log on standard error, as with kube-proxy. Returns a function that sets another
/// filter.
fn set_up_log(config: &Config) -> SetLogFilter {
    let layer = fmt::layer().with_writer(stderr).with_ansi(stderr().is_terminal());
    // It would report that standard error is broken there, and panic.
    let layer = layer.log_internal_errors(false);
    let layer: Box<dyn tracing_subscriber::Layer<Registry> + Send + Sync> = match config.log_format {
        LogFormat::Text => layer.boxed(),
        LogFormat::Json => layer.json().flatten_event(true).boxed(),
    };
    // Every filter was checked. If one is wrong all the same, that must not stop a node's proxy.
    let targets =
        |text: &str| text.parse().unwrap_or_else(|_| Targets::new().with_default(tracing::Level::INFO));
    let (filter, handle) = reload::Layer::new(targets(&config.log_filter));
    tracing_subscriber::registry().with(layer.with_filter(filter)).init();
    Arc::new(move |text| {
        if let Err(error) = handle.reload(targets(text)) {
            tracing::error!(%error, "cannot change the log filter: it stays the same");
        }
    })
}
