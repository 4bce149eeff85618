//! Removes the world when the program is interrupted: on ctrl-C, SIGTERM and SIGHUP.

use std::{process, sync::PoisonError, thread};

use anyhow::{Context as _, Result};
use tokio::signal::unix::{SignalKind, signal};

use crate::world::{BUILD_LOCK, remove_live_runs};

/// Starts a thread that waits for a signal, removes all worlds of this process, and exits with 128
/// + the signal's number.
pub fn remove_worlds_on_signal() -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let signals = {
        let _inside = runtime.enter();
        let kinds = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()];
        kinds.map(|kind| signal(kind).map(|stream| (kind, stream)))
    };
    let mut signals = signals.into_iter().collect::<Result<Vec<_>, _>>().context("wait for signals")?;
    thread::spawn(move || {
        let waits = signals.iter_mut().map(|(kind, stream)| {
            Box::pin(async move {
                stream.recv().await;
                *kind
            })
        });
        let (kind, ..) = runtime.block_on(futures::future::select_all(waits));
        // Nothing new is created from here on, because the lock is held until the process exits.
        let _nothing_new = BUILD_LOCK.write().unwrap_or_else(PoisonError::into_inner);
        eprintln!("\nstopped by signal {}: removing the test world", kind.as_raw_value());
        for error in remove_live_runs() {
            eprintln!("cannot remove all of the test world: {error:#}");
        }
        process::exit(128 + kind.as_raw_value());
    });
    Ok(())
}
