//! `shunt trace`: prints what the daemon of this node traces.

use std::{
    fs::File,
    io::{BufWriter, Write as _, stdout},
    process::ExitCode,
};

use proxy_userspace::{
    inspect::{API_VERSION, Client, Lines},
    trace::{CaptureFile, TraceArguments, TraceOutput, TraceRecord},
};
use serde::Serialize;
use tokio::{
    signal::unix::{SignalKind, signal},
    time::{Instant, sleep_until},
};

use super::standard_error::tell;

/// A line of JSON, with the version of its fields.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Versioned<'a> {
    api_version: &'static str,
    #[serde(flatten)]
    record: &'a TraceRecord,
}

/// Where the lines go.
struct Printer {
    output: TraceOutput,
    capture: Option<CaptureFile<BufWriter<File>>>,
    packets: u64,
}

/// Runs until the time is over, a signal arrives, or the daemon ends it.
pub(super) async fn trace(arguments: &TraceArguments) -> anyhow::Result<ExitCode> {
    let capture = arguments.capture.as_deref().map(CaptureFile::create).transpose()?;
    let mut printer = Printer { output: arguments.output, capture, packets: 0 };
    let mut client = Client::connect().await?;
    let lines = client.trace(&arguments.filter).await?;
    let until = arguments.limit.map(|limit| Instant::now() + limit);
    let followed = printer.follow(lines, until).await;
    // Also after an error: what was captured before is worth having.
    if let (Some(file), Some(path)) = (&mut printer.capture, &arguments.capture) {
        file.flush()?;
        tell(format_args!("{} packets written to {}", printer.packets, path.display()));
    }
    followed
}

impl Printer {
    async fn follow(
        &mut self,
        mut lines: Lines<TraceRecord>,
        until: Option<Instant>,
    ) -> anyhow::Result<ExitCode> {
        let (mut interrupt, mut terminate) =
            (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
        loop {
            let records = tokio::select! {
                records = lines.next() => records?,
                _ = interrupt.recv() => return Ok(ExitCode::SUCCESS),
                _ = terminate.recv() => return Ok(ExitCode::SUCCESS),
                () = sleep_until(until.unwrap_or_else(Instant::now)), if until.is_some() => {
                    return Ok(ExitCode::SUCCESS);
                }
            };
            let Some(records) = records else { anyhow::bail!("shunt ended the connection") };
            for record in &records {
                self.print(record)?;
            }
            stdout().flush()?;
        }
    }

    /// Prints a record. The end of the trace is an error.
    fn print(&mut self, record: &TraceRecord) -> anyhow::Result<()> {
        match record {
            TraceRecord::TraceStarted => tell("traces until interrupted"),
            TraceRecord::TraceAlive => {}
            TraceRecord::TraceEnded { reason } => anyhow::bail!("the trace ended: {reason}"),
            TraceRecord::TracePacket(packet) => {
                if let Some(file) = &mut self.capture {
                    file.write(packet)?;
                    self.packets += 1;
                }
            }
            TraceRecord::TraceLost { records } if self.output == TraceOutput::Text => {
                tell(format_args!("{records} events or packets were lost: they came too fast"));
            }
            TraceRecord::TraceEvent(event) if self.output == TraceOutput::Text => {
                writeln!(stdout(), "{event}")?;
            }
            TraceRecord::TraceLost { .. } | TraceRecord::TraceEvent(_) => {
                let line = serde_json::to_string(&Versioned { api_version: API_VERSION, record })?;
                writeln!(stdout(), "{line}")?;
            }
        }
        Ok(())
    }
}
