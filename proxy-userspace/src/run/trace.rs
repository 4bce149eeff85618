//! `shunt trace`: prints what the daemon of this node traces.

use std::{
    io::{BufWriter, Write, stderr, stdout},
    process::ExitCode,
};

use anyhow::Context as _;
use proxy_userspace::{
    inspect::{API_VERSION, Client, Lines},
    output_file::{self, is_standard_output},
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

/// Where the lines and packets go.
struct Printer<'a> {
    arguments: &'a TraceArguments,
    /// When the time is over. `None` also while the trace has not begun.
    until: Option<Instant>,
    lines: Box<dyn Write>,
    capture: Option<CaptureFile<BufWriter<Box<dyn Write>>>>,
    packets: u64,
}

/// Runs until the time is over, a signal arrives, or the daemon ends it.
pub(super) async fn trace(arguments: &TraceArguments) -> anyhow::Result<ExitCode> {
    arguments.capture.as_deref().map(CaptureFile::check_new).transpose()?;
    let is_piped = arguments.capture.as_deref().is_some_and(is_standard_output);
    let lines: Box<dyn Write> = if is_piped { Box::new(stderr()) } else { Box::new(stdout()) };
    let mut client = Client::connect().await?;
    tell("prepares…");
    let records = client.trace(&arguments.filter).await?;
    // Only now: without a trace there is nothing to write.
    let capture = arguments.capture.as_deref().map(CaptureFile::create).transpose()?;
    let mut printer = Printer { arguments, until: None, lines, capture, packets: 0 };
    let followed = printer.follow(records).await;
    // Also after an error: what was captured before is worth having.
    if let (Some(file), Some(path)) = (&mut printer.capture, &arguments.capture) {
        file.flush()?;
        tell(format_args!("{} packets written to {}", printer.packets, output_file::name(path)));
    }
    followed
}

impl Printer<'_> {
    async fn follow(&mut self, mut lines: Lines<TraceRecord>) -> anyhow::Result<ExitCode> {
        let listen = |kind| signal(kind).context("cannot wait for signals");
        let (mut interrupt, mut terminate) =
            (listen(SignalKind::interrupt())?, listen(SignalKind::terminate())?);
        loop {
            let until = self.until;
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
            self.lines.flush()?;
            // Another program may show packets as they come.
            self.capture.as_mut().map(CaptureFile::flush).transpose()?;
        }
    }

    /// The time to trace begins.
    fn start(&mut self) {
        self.until = self.arguments.limit.map(|limit| Instant::now() + limit);
        tell(format_args!("traces {}", self.arguments.how_long()));
    }

    /// Prints a record. The end of the trace is an error.
    fn print(&mut self, record: &TraceRecord) -> anyhow::Result<()> {
        match record {
            TraceRecord::TraceStarted => self.start(),
            TraceRecord::TraceAlive => {}
            TraceRecord::TraceEnded { reason } => anyhow::bail!("the trace ended: {reason}"),
            TraceRecord::TracePacket(packet) => {
                if let Some(file) = &mut self.capture {
                    file.write(packet)?;
                    self.packets += 1;
                }
            }
            TraceRecord::TraceLost { records } if self.arguments.output == TraceOutput::Text => {
                tell(format_args!("{records} events or packets were lost: they came too fast"));
            }
            TraceRecord::TraceEvent(event) if self.arguments.output == TraceOutput::Text => {
                writeln!(self.lines, "{event}")?;
            }
            TraceRecord::TraceLost { .. } | TraceRecord::TraceEvent(_) => {
                let line = serde_json::to_string(&Versioned { api_version: API_VERSION, record })?;
                writeln!(self.lines, "{line}")?;
            }
        }
        Ok(())
    }
}
