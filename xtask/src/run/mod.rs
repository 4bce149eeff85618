//! Runs other programs: the one place that starts processes, with a time limit, kept output and no orphans.
//!
//! After [`take_signals`] a child gets a process group of its own, so that a signal sent with [`interrupt`] reaches it
//! and all it started exactly once, and so that a time limit ends all of them. Before it, as in a build script, children
//! stay in the group that the terminal or the outer cargo stops as a whole. Their standard input is empty: nothing can
//! wait for an answer.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;

use crate::search;

/// How many last lines of output an error carries.
const TAIL_LINES: usize = 100;
/// How often a running child is looked at while it prints nothing.
const TICK: Duration = Duration::from_millis(50);
/// The first wait for a child that has closed its output, which is about to end; doubles up to [`TICK`].
const CLOSING_TICK: Duration = Duration::from_millis(1);
/// How long output may stay open after the child ended (held by something it left running).
const DRAIN: Duration = Duration::from_secs(2);
/// How long a child has to clean up after it was asked to stop.
const STOP: Duration = Duration::from_secs(10);

/// The signal that asked us to stop, 0 while none did.
static INTERRUPTED: AtomicI32 = AtomicI32::new(0);
/// The process groups of the running children.
static CHILDREN: Mutex<Vec<i32>> = Mutex::new(Vec::new());

/// Whether children get groups of their own, because somebody passes signals on to them.
static OWN_GROUPS: AtomicBool = AtomicBool::new(false);

/// The current time; only measuring needs it.
#[expect(clippy::disallowed_methods, reason = "xtask measures how long steps take")]
pub fn now() -> Instant {
    Instant::now()
}

/// Promises that [`interrupt`] is called with every signal that asks us to stop; children then get groups of their own.
pub fn take_signals() {
    OWN_GROUPS.store(true, Ordering::SeqCst);
}

/// Notes that we were asked to stop and passes the signal on to the running children; every later run fails at once.
///
/// Call it from a signal-watching thread.
pub fn interrupt(signal: i32) {
    INTERRUPTED.store(signal, Ordering::SeqCst);
    if let Ok(signal) = Signal::try_from(signal) {
        children().iter().for_each(|group| signal_group(*group, signal));
    }
}

/// A list of numbers is whole whatever happened to a thread that had it.
fn children() -> MutexGuard<'static, Vec<i32>> {
    CHILDREN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The signal given to [`interrupt`], if any.
pub fn interrupted() -> Option<i32> {
    Some(INTERRUPTED.load(Ordering::SeqCst)).filter(|signal| *signal != 0)
}

/// A program to run.
#[derive(Debug, Clone)]
pub struct Run {
    program: OsString,
    args: Vec<OsString>,
    env: Vec<(OsString, Option<OsString>)>,
    dir: Option<PathBuf>,
    limit: Duration,
}

/// A run that ended.
#[derive(Debug)]
pub struct Finished {
    /// How it ended.
    pub status: ExitStatus,
    /// All of its standard output.
    pub stdout: String,
    /// The last lines of standard output and standard error, in the order they came.
    pub tail: String,
}

#[derive(Clone, Copy, PartialEq)]
enum Stream {
    Out,
    Err,
}

impl Run {
    /// Runs `program` in the current folder with the environment of this process, for at most a minute.
    pub fn new(program: impl AsRef<OsStr>) -> Self {
        Self {
            program: program.as_ref().to_owned(),
            args: Vec::new(),
            env: Vec::new(),
            dir: None,
            limit: Duration::from_mins(1),
        }
    }

    /// Adds an argument.
    #[must_use]
    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.args.push(arg.as_ref().to_owned());
        self
    }

    /// The program and its arguments.
    pub fn words(&self) -> Vec<OsString> {
        std::iter::once(&self.program).chain(&self.args).cloned().collect()
    }

    /// Adds arguments.
    #[must_use]
    pub fn args<A: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = A>) -> Self {
        self.args.extend(args.into_iter().map(|arg| arg.as_ref().to_owned()));
        self
    }

    /// Sets an environment variable.
    #[must_use]
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.env.push((name.as_ref().to_owned(), Some(value.as_ref().to_owned())));
        self
    }

    /// Leaves an environment variable out.
    #[must_use]
    pub fn without_env(mut self, name: impl AsRef<OsStr>) -> Self {
        self.env.push((name.as_ref().to_owned(), None));
        self
    }

    /// Sets the folder to run in.
    #[must_use]
    pub fn dir(mut self, dir: impl AsRef<Path>) -> Self {
        self.dir = Some(dir.as_ref().to_owned());
        self
    }

    /// Sets how long it may take.
    #[must_use]
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Runs it and returns its standard output; a failing exit status is an error with the last lines it printed.
    pub fn read(self) -> Result<String> {
        self.check(&mut |_| ()).map(|finished| finished.stdout)
    }

    /// Runs it, calling `each` with every line it prints; a failing exit status is an error with the last lines.
    pub fn check(self, each: &mut dyn FnMut(&str)) -> Result<Finished> {
        let shown = self.to_string();
        let finished = self.watch(each)?;
        if !finished.status.success() {
            bail!("`{shown}` ended with {}:\n{}", finished.status, finished.tail);
        }
        Ok(finished)
    }

    /// Runs it to its end, calling `each` with every line it prints, standard output and error alike.
    pub fn watch(self, each: &mut dyn FnMut(&str)) -> Result<Finished> {
        let mut command = self.command();
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = self.spawn(command)?;
        let (sender, lines) = channel();
        read_lines(child.stdout.take(), Stream::Out, sender.clone());
        read_lines(child.stderr.take(), Stream::Err, sender);
        let mut kept = Kept::default();
        let status = self.wait(&mut child, Some(&lines), &mut |stream, line| {
            kept.take(stream, line);
            each(line);
        });
        let status = status.with_context(|| kept.tail())?;
        Ok(Finished { status, tail: kept.tail(), stdout: kept.stdout })
    }

    /// Runs it with our own standard output and error, for programs that show their progress themselves.
    pub fn show(self) -> Result<()> {
        let command = self.command();
        let mut child = self.spawn(command)?;
        let status = self.wait(&mut child, None, &mut |_, _| ())?;
        if !status.success() {
            bail!("`{self}` ended with {status}");
        }
        Ok(())
    }

    /// Becomes the program: terminal, signals and exit status are then its own. Returns only if that fails.
    pub fn exec(self) -> anyhow::Error {
        let error = self.command().exec();
        anyhow::Error::new(error).context(format!("cannot run `{self}`"))
    }

    fn command(&self) -> Command {
        #[expect(clippy::disallowed_methods, reason = "this is the wrapper")]
        let mut command = Command::new(&self.program);
        command.args(&self.args).env("PATH", search::path());
        for (name, value) in &self.env {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        if let Some(dir) = &self.dir {
            command.current_dir(dir);
        }
        command
    }

    fn spawn(&self, mut command: Command) -> Result<Child> {
        if let Some(signal) = interrupted() {
            bail!("stopped by signal {signal}");
        }
        let own_group = OWN_GROUPS.load(Ordering::SeqCst);
        if own_group {
            command.process_group(0);
        }
        let child = command.stdin(Stdio::null()).spawn().with_context(|| format!("cannot run `{self}`"))?;
        if own_group {
            children().push(pid(&child).as_raw());
        }
        // A signal between the check above and the entry had no group to go to yet.
        if let Some(signal) = interrupted() {
            interrupt(signal);
        }
        Ok(child)
    }

    /// Waits for the child's end, after which no signal is passed on to its group.
    fn wait(
        &self,
        child: &mut Child,
        lines: Option<&Receiver<(Stream, String)>>,
        each: &mut dyn FnMut(Stream, &str),
    ) -> Result<ExitStatus> {
        let status = self.wait_for_end(child, lines, each);
        let group = pid(child).as_raw();
        children().retain(|running| *running != group);
        status
    }

    fn wait_for_end(
        &self,
        child: &mut Child,
        mut lines: Option<&Receiver<(Stream, String)>>,
        each: &mut dyn FnMut(Stream, &str),
    ) -> Result<ExitStatus> {
        let started = now();
        let mut ended: Option<(ExitStatus, Instant)> = None;
        let mut pause = CLOSING_TICK;
        loop {
            match lines.map(|lines| lines.recv_timeout(TICK)) {
                Some(Ok((stream, line))) => each(stream, &line),
                Some(Err(RecvTimeoutError::Disconnected)) => lines = None,
                Some(Err(RecvTimeoutError::Timeout)) => {}
                None => {
                    thread::sleep(pause);
                    pause = TICK.min(pause * 2);
                }
            }
            if ended.is_none() {
                ended = child.try_wait()?.map(|status| (status, now()));
            }
            if let Some((status, at)) = ended
                && (lines.is_none() || at.elapsed() > DRAIN)
            {
                return match interrupted() {
                    Some(signal) => bail!("`{self}` was stopped by signal {signal}"),
                    None => Ok(status),
                };
            }
            if started.elapsed() > self.limit {
                stop(child);
                bail!("`{self}` took longer than {} s and was stopped", self.limit.as_secs());
            }
        }
    }
}

impl std::fmt::Display for Run {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.program.display())?;
        for arg in &self.args {
            write!(f, " {}", arg.display())?;
        }
        Ok(())
    }
}

/// What is remembered of a child's output.
#[derive(Default)]
struct Kept {
    stdout: String,
    tail: VecDeque<String>,
}

impl Kept {
    fn take(&mut self, stream: Stream, line: &str) {
        if stream == Stream::Out {
            self.stdout.push_str(line);
            self.stdout.push('\n');
        }
        if self.tail.len() == TAIL_LINES {
            self.tail.pop_front();
        }
        self.tail.push_back(line.to_owned());
    }

    fn tail(&self) -> String {
        self.tail.iter().map(String::as_str).collect::<Vec<_>>().join("\n")
    }
}

fn read_lines(source: Option<impl Read + Send + 'static>, stream: Stream, lines: Sender<(Stream, String)>) {
    let Some(source) = source else { return };
    thread::spawn(move || {
        let mut source = BufReader::new(source);
        let mut bytes = Vec::new();
        while source.read_until(b'\n', &mut bytes).is_ok_and(|read| read > 0) {
            let text = String::from_utf8_lossy(&bytes);
            // Progress is drawn over itself with carriage returns: the last drawing is the line.
            let line = text.trim_end().rsplit('\r').next().unwrap_or_default().to_owned();
            if lines.send((stream, line)).is_err() {
                return;
            }
            bytes.clear();
        }
    });
}

/// Asks the child, with its group if it has one, to stop, and insists when it does not.
fn stop(child: &mut Child) {
    let whole = if OWN_GROUPS.load(Ordering::SeqCst) { signal_group } else { signal_one };
    let id = pid(child).as_raw();
    whole(id, Signal::SIGTERM);
    let asked = now();
    while asked.elapsed() < STOP && matches!(child.try_wait(), Ok(None)) {
        thread::sleep(TICK);
    }
    whole(id, Signal::SIGKILL);
    // Reaps it; a child that is gone already is what was wanted.
    drop(child.wait());
}

fn signal_group(group: i32, signal: Signal) {
    // It may have ended this very moment; there is nothing left to signal then.
    let _gone = killpg(Pid::from_raw(group), signal);
}

fn signal_one(id: i32, signal: Signal) {
    let _gone = kill(Pid::from_raw(id), signal);
}

fn pid(child: &Child) -> Pid {
    // Linux pids are below 2^22.
    Pid::from_raw(i32::try_from(child.id()).unwrap_or(i32::MAX))
}

#[cfg(test)]
mod tests;
