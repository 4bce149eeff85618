//! Captures what a test logs.

use std::{
    io::{self, PipeReader},
    sync::{Arc, LazyLock},
};

use tracing::{
    Dispatch,
    subscriber::{DefaultGuard, NoSubscriber},
};

/// A second dispatcher, which stays. While there is only one, tracing asks only the thread that
/// first reaches a log line whether anybody wants it. So another test could turn it off for all.
static OTHER: LazyLock<Dispatch> = LazyLock::new(|| Dispatch::new(NoSubscriber::new()));

/// The log of this thread, from [`CapturedLog::start`] on.
pub(crate) struct CapturedLog {
    log: PipeReader,
    logging: DefaultGuard,
}

impl CapturedLog {
    pub(crate) fn start() -> Self {
        LazyLock::force(&OTHER);
        let (log, writer) = io::pipe().expect("a pipe");
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(tracing::Level::INFO)
            .with_ansi(false)
            .with_writer(Arc::new(writer))
            .finish();
        Self { log, logging: tracing::subscriber::set_default(subscriber) }
    }

    /// Returns the text so far, and ends.
    pub(crate) fn end(self) -> String {
        drop(self.logging);
        io::read_to_string(self.log).expect("text")
    }
}

/// Returns what `act` logs.
pub(crate) fn logged(act: impl FnOnce()) -> String {
    let log = CapturedLog::start();
    act();
    log.end()
}
