//! Runs other programs, with a time limit, recorded output and no orphans. No other module starts
//! processes.
//!
//! After [`take_signals`] each child gets its own process group. A signal sent with [`interrupt`]
//! then reaches the child and its descendants exactly once, and a time limit ends all of them.
//! Before that, for example in a build script, children stay in the group that the terminal or the
//! outer cargo stops as a whole. Standard input is empty, so no program waits for an answer.

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
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::search;

/// The number of last output lines in an error.
const TAIL_LINES: usize = 100;
/// The interval of checks of a child that prints nothing.
const TICK: Duration = Duration::from_millis(50);
/// The first wait for a child that closed its output and is about to end. It doubles up to
/// [`TICK`].
const CLOSING_TICK: Duration = Duration::from_millis(1);
/// How long output may stay open after the child ended, because a process that it started still
/// holds it.
const DRAIN: Duration = Duration::from_secs(2);
/// The same, if more output still comes.
const MAX_DRAIN: Duration = Duration::from_secs(30);
/// How long a child may clean up after a request to stop.
const STOP: Duration = Duration::from_secs(10);

/// The signal that requested the end of this process, or 0.
static INTERRUPTED: AtomicI32 = AtomicI32::new(0);
/// The process groups of the running children.
static CHILDREN: Mutex<Vec<i32>> = Mutex::new(Vec::new());

/// True if children get their own process groups, because signals are passed on to them.
static OWN_GROUPS: AtomicBool = AtomicBool::new(false);

/// Returns the current time, for measurements only.
#[expect(clippy::disallowed_methods, reason = "xtask measures how long steps take")]
pub fn now() -> Instant {
    Instant::now()
}

/// Declares that [`interrupt`] is called with every termination signal. Children then get their own
/// process groups.
pub fn take_signals() {
    OWN_GROUPS.store(true, Ordering::SeqCst);
}

/// Records a termination signal and passes it on to the running children. Every later run fails at
/// once.
///
/// Call it from a thread that waits for signals.
pub fn interrupt(signal: i32) {
    INTERRUPTED.store(signal, Ordering::SeqCst);
    if let Ok(signal) = Signal::try_from(signal) {
        children().iter().for_each(|group| send(-group, signal));
    }
}

/// Locks the list. A panic of another thread leaves it intact.
fn children() -> MutexGuard<'static, Vec<i32>> {
    CHILDREN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the signal that was passed to [`interrupt`], if any.
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
    /// The last lines of standard output and standard error, in order.
    pub tail: String,
}

#[derive(Clone, Copy, PartialEq)]
enum Stream {
    Out,
    Err,
}

impl Run {
    /// Returns a run of `program` in the current folder, with this process's environment and a
    /// limit of one minute.
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

    /// Returns the program and its arguments.
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

    /// Removes an environment variable.
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

    /// Sets the time limit.
    #[must_use]
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Lets other programs go first: those that wait for packets and deadlines.
    #[must_use]
    pub fn behind_others(mut self) -> Self {
        let words = self.words();
        self.program = "nice".into();
        self.args = ["-n", "5"].map(Into::into).into_iter().chain(words).collect();
        self
    }

    /// Runs the program and returns its standard output. A failing exit status is an error with the
    /// last lines of output.
    pub fn read(self) -> Result<String> {
        self.check(&mut |_| ()).map(|finished| finished.stdout)
    }

    /// Runs the program and calls `each` with every line of output. A failing exit status is an
    /// error with the last lines.
    pub fn check(self, each: &mut dyn FnMut(&str)) -> Result<Finished> {
        let shown = self.to_string();
        let finished = self.watch(each)?;
        if !finished.status.success() {
            bail!("`{shown}` ended with {}:\n{}", finished.status, finished.tail);
        }
        Ok(finished)
    }

    /// Runs the program to its end, and calls `each` with every line of standard output and
    /// standard error.
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

    /// Runs the program with this process's standard output and error, for programs that show their
    /// own progress.
    pub fn show(self) -> Result<()> {
        let command = self.command();
        let mut child = self.spawn(command)?;
        let status = self.wait(&mut child, None, &mut |_, _| ())?;
        if !status.success() {
            bail!("`{self}` ended with {status}");
        }
        Ok(())
    }

    /// Replaces this process by the program (`exec`). Returns only if that fails.
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
            children().push(pid(&child));
        }
        // A signal between the check above and this entry did not reach the group.
        if let Some(signal) = interrupted() {
            interrupt(signal);
        }
        Ok(child)
    }

    /// Waits for the child's end. Afterwards no signal is passed on to its group.
    fn wait(
        &self,
        child: &mut Child,
        lines: Option<&Receiver<(Stream, String)>>,
        each: &mut dyn FnMut(Stream, &str),
    ) -> Result<ExitStatus> {
        let status = self.wait_for_end(child, lines, each);
        let group = pid(child);
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
            let mut is_silent = true;
            // If this thread got no time for a while, lines still wait to be read.
            let is_over = ended.is_some_and(|(_, at)| at.elapsed() > DRAIN);
            match lines.map(|lines| lines.recv_timeout(TICK)) {
                Some(Ok((stream, line))) => {
                    is_silent = false;
                    each(stream, &line);
                }
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
                && (lines.is_none() || is_over && is_silent || at.elapsed() > MAX_DRAIN)
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

/// The recorded output of a child.
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
            // Progress bars overwrite themselves with carriage returns. The last state is the line.
            let line = text.trim_end().rsplit('\r').next().unwrap_or_default().to_owned();
            if lines.send((stream, line)).is_err() {
                return;
            }
            bytes.clear();
        }
    });
}

/// Asks the child, with its group if it has one, to stop, and kills it if it does not.
fn stop(child: &mut Child) {
    let id = if OWN_GROUPS.load(Ordering::SeqCst) { -pid(child) } else { pid(child) };
    send(id, Signal::SIGTERM);
    let asked = now();
    while asked.elapsed() < STOP && matches!(child.try_wait(), Ok(None)) {
        thread::sleep(TICK);
    }
    send(id, Signal::SIGKILL);
    // Reaps the child, which may have ended already.
    drop(child.wait());
}

/// Sends a signal to a process, or to the process group with the number `-id` if `id` is negative.
fn send(id: i32, signal: Signal) {
    // The process or the group may have ended at this moment.
    let _gone = kill(Pid::from_raw(id), signal);
}

fn pid(child: &Child) -> i32 {
    // Linux pids are below 2^22.
    i32::try_from(child.id()).unwrap_or(i32::MAX)
}

#[cfg(test)]
mod tests;
