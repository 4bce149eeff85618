//! Runs commands: the one place of the proxy that starts processes, with what they said, how they ended, and a time limit.
//!
//! When the process is to end, commands get a moment more. One that is killed then leaves the kernel whole: a table of iptables or
//! nftables is changed at once or not at all, and `ipset restore` goes line by line, in an order whose every beginning is safe. That
//! holds for what makes further changes after it only if it makes none any more: see [`is_ending`].

use std::{
    ffi::{OsStr, OsString},
    fmt,
    io::{self, Read, Write as _},
    os::unix::{fs::PermissionsExt as _, process::CommandExt as _},
    path::PathBuf,
    process::{self, Child, ExitStatus, Stdio},
    sync::{OnceLock, mpsc},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};

use super::KernelError;

/// How long a command may take unless it says otherwise.
const LIMIT: Duration = Duration::from_secs(10);
/// How often a command that has not closed its output is looked at.
const TICK: Duration = Duration::from_millis(50);
/// The first wait for one that has, and so is about to end; doubles up to [`TICK`].
const CLOSING_TICK: Duration = Duration::from_micros(200);
/// How long output may stay open after the command ended.
const DRAIN: Duration = Duration::from_secs(2);
/// What of its standard error an error carries, in characters from the end.
const KEPT_OF_STDERR: usize = 2000;
/// Where administrators' commands are; a service's `PATH` may lack them.
const SYSTEM_DIRECTORIES: [&str; 3] = ["/usr/local/sbin", "/usr/sbin", "/sbin"];

/// When the last command is to have ended; not set as long as the process goes on.
static END: OnceLock<Instant> = OnceLock::new();

/// This process is about to end, which cannot be taken back: commands that run have so long to end by themselves and are then
/// killed, and no other is begun but for those that undo something.
#[expect(clippy::disallowed_methods, reason = "the limit is kept by the clock")]
pub fn end_all_within(limit: Duration) {
    // Who says so twice has said so.
    let _ = END.set(Instant::now() + limit);
}

/// Whether this process is about to end. What then fails is not tried again, and what was to come after it must not be done: it may
/// rely on what failed.
pub fn is_ending() -> bool {
    END.get().is_some()
}

/// Where commands are looked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SearchPath {
    directories: Vec<PathBuf>,
}

impl SearchPath {
    /// Nothing but these directories.
    pub fn only(directories: impl IntoIterator<Item = PathBuf>) -> Self {
        Self { directories: directories.into_iter().collect() }
    }

    /// The program of this name; none where it is not installed.
    pub fn find(&self, program: &str) -> Option<PathBuf> {
        self.directories.iter().map(|directory| directory.join(program)).find(|path| {
            path.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
        })
    }

    fn join(&self) -> OsString {
        std::env::join_paths(&self.directories).unwrap_or_default()
    }
}

impl Default for SearchPath {
    /// This process's `PATH`, and the directories of administrators' commands.
    fn default() -> Self {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let system = SYSTEM_DIRECTORIES.map(PathBuf::from);
        Self { directories: std::env::split_paths(&path).chain(system).collect() }
    }
}

/// A command to run: in this thread's namespaces, with the environment of this process.
#[derive(Clone, Debug)]
pub struct Command {
    program: String,
    path: SearchPath,
    args: Vec<OsString>,
    stdin: Option<String>,
    limit: Duration,
    /// Set: it is run, and left to run, also while the process ends.
    undoes: bool,
}

/// What a command that ended had to say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// How it ended.
    pub status: ExitStatus,
    /// Its standard output; what is not UTF-8 is replaced.
    pub stdout: String,
    /// Its standard error, likewise.
    pub stderr: String,
}

impl Command {
    /// A program without arguments and input, for at most ten seconds.
    pub fn new(program: impl Into<String>, path: &SearchPath) -> Self {
        Self {
            program: program.into(),
            path: path.clone(),
            args: Vec::new(),
            stdin: None,
            limit: LIMIT,
            undoes: false,
        }
    }

    /// Adds arguments.
    pub fn args<A: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = A>) -> Self {
        self.args.extend(args.into_iter().map(|arg| arg.as_ref().to_owned()));
        self
    }

    /// Gives it this to read, and then the end of its input; without, its input is empty.
    pub fn stdin(mut self, text: impl Into<String>) -> Self {
        self.stdin = Some(text.into());
        self
    }

    /// Ends it, with all that it started, after so long.
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// It takes something back that must not be there any longer than this process: it is run also while that ends.
    pub fn undoing(mut self) -> Self {
        self.undoes = true;
        self
    }

    /// Runs it; [`KernelError::CommandFailed`] if it does not end with status 0.
    pub fn run(&self) -> Result<Output, KernelError> {
        let output = self.output()?;
        if output.status.success() {
            return Ok(output);
        }
        Err(KernelError::CommandFailed {
            command: self.to_string(),
            status: output.status,
            stderr: tail(output.stderr.trim()).to_owned(),
        })
    }

    /// Runs it to its end, whatever that is.
    pub fn output(&self) -> Result<Output, KernelError> {
        if is_ending() && !self.undoes {
            return Err(KernelError::CommandForsaken { command: self.to_string() });
        }
        let mut child = self.spawn()?;
        let (to, read) = mpsc::channel();
        let stdin = child.stdin.take().zip(self.stdin.clone());
        if let Some((mut pipe, text)) = stdin {
            // A program that does not read all of it says why in another way.
            thread::spawn(move || drop(pipe.write_all(text.as_bytes())));
        }
        forward(child.stdout.take(), Stream::Out, to.clone());
        forward(child.stderr.take(), Stream::Err, to);
        let mut said = Said::default();
        let status = self.wait(&mut child, &read, &mut said)?;
        Ok(Output { status, stdout: text(&said.out), stderr: text(&said.err) })
    }

    fn spawn(&self) -> Result<Child, KernelError> {
        let Some(program) = self.path.find(&self.program) else {
            return Err(KernelError::CommandNotFound { program: self.program.clone() });
        };
        #[expect(
            clippy::disallowed_methods,
            reason = "this is the proxy's wrapper: all its commands start here"
        )]
        let mut command = process::Command::new(program);
        let stdin = if self.stdin.is_some() { Stdio::piped() } else { Stdio::null() };
        // Messages are in English, for those that read them and for what is told by them. Programs that are one file under
        // many names go by the name.
        command.arg0(&self.program).args(&self.args).env("LC_ALL", "C").env("PATH", self.path.join());
        command.stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::piped());
        // What a signal or the limit ends is all of it, and not the proxy's own group.
        command.process_group(0);
        command.spawn().map_err(KernelError::call("run", self.to_string()))
    }

    #[expect(clippy::disallowed_methods, reason = "the limit is kept by the clock")]
    fn wait(
        &self,
        child: &mut Child,
        read: &mpsc::Receiver<Chunk>,
        said: &mut Said,
    ) -> Result<ExitStatus, KernelError> {
        let deadline = Instant::now() + self.limit;
        let (mut open, mut pause, mut ended) = (true, CLOSING_TICK, None);
        loop {
            if open {
                match read.recv_timeout(TICK) {
                    Ok(chunk) => said.take(chunk),
                    Err(mpsc::RecvTimeoutError::Timeout) => {}
                    Err(mpsc::RecvTimeoutError::Disconnected) => open = false,
                }
            }
            if ended.is_none() {
                let status = child.try_wait().map_err(KernelError::call("wait for", self.to_string()))?;
                ended = status.map(|status| (status, Instant::now()));
            }
            // Something it left running may keep its output open. On a busy machine it may also just not be read yet.
            if let Some((status, at)) = ended
                && (!open || at.elapsed() >= DRAIN)
            {
                return Ok(status);
            }
            if !open {
                thread::sleep(pause);
                pause = TICK.min(pause * 2);
            }
            if ended.is_none() && Instant::now() >= deadline {
                kill(child);
                return Err(KernelError::CommandTimedOut { command: self.to_string(), limit: self.limit });
            }
            if ended.is_none() && !self.undoes && END.get().is_some_and(|end| Instant::now() >= *end) {
                kill(child);
                return Err(KernelError::CommandForsaken { command: self.to_string() });
            }
        }
    }
}

impl fmt::Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.program)?;
        self.args.iter().try_for_each(|arg| write!(f, " {}", arg.display()))
    }
}

#[derive(Clone, Copy)]
enum Stream {
    Out,
    Err,
}

type Chunk = (Stream, Vec<u8>);

#[derive(Default)]
struct Said {
    out: Vec<u8>,
    err: Vec<u8>,
}

impl Said {
    fn take(&mut self, (stream, bytes): Chunk) {
        match stream {
            Stream::Out => self.out.extend(bytes),
            Stream::Err => self.err.extend(bytes),
        }
    }
}

fn forward(pipe: Option<impl Read + Send + 'static>, stream: Stream, to: mpsc::Sender<Chunk>) {
    let Some(mut pipe) = pipe else { return };
    thread::spawn(move || {
        let mut buffer = [0; 16 * 1024];
        loop {
            match pipe.read(&mut buffer) {
                Ok(0) => return,
                Ok(length) => {
                    if to.send((stream, buffer[..length].to_vec())).is_err() {
                        return;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    });
}

fn kill(child: &mut Child) {
    // It may have ended this very moment; then there is nothing left to do but to reap it.
    if let Ok(group) = i32::try_from(child.id()) {
        let _gone = killpg(Pid::from_raw(group), Signal::SIGKILL);
    }
    drop(child.wait());
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn tail(text: &str) -> &str {
    text.char_indices().rev().nth(KEPT_OF_STDERR).map_or(text, |(at, _)| &text[at..])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(script: &str) -> Command {
        Command::new("sh", &SearchPath::default()).args(["-c", script])
    }

    #[test]
    fn what_a_command_reads_and_says_is_passed_on() {
        let input = "line\n".repeat(100_000);
        let output = sh("cat; echo warned >&2").stdin(&input).run().expect("ends well");
        assert_eq!((output.stdout, output.stderr.as_str()), (input, "warned\n"));
    }

    #[test]
    fn a_failing_command_is_named_with_its_status_and_what_it_said_last() {
        let error = sh("echo no such table >&2; exit 3").run().expect_err("status 3").to_string();
        assert_eq!(error, "`sh -c echo no such table >&2; exit 3` ended with exit status: 3: no such table");
        let loud = sh("head -c 100000 /dev/zero | tr '\\0' x >&2; exit 1").run().expect_err("status 1");
        assert!(loud.to_string().len() < 3000);
    }

    #[test]
    fn a_command_that_is_not_installed_is_told_apart() {
        let missing = Command::new("shunt-no-such-program", &SearchPath::default()).run();
        assert!(
            matches!(missing, Err(KernelError::CommandNotFound { program }) if program == "shunt-no-such-program")
        );
        let elsewhere = Command::new("sh", &SearchPath::only([])).run();
        assert!(matches!(elsewhere, Err(KernelError::CommandNotFound { .. })));
    }

    #[test]
    fn a_command_past_its_limit_is_killed_with_what_it_started() {
        let limit = Duration::from_millis(300);
        let error = sh("sleep 60 & sleep 60").limit(limit).run().expect_err("too long");
        assert!(matches!(error, KernelError::CommandTimedOut { .. }), "{error}");
        let error = sh("while :; do echo talking; done").limit(limit).run().expect_err("too long");
        assert!(matches!(error, KernelError::CommandTimedOut { .. }), "{error}");
    }

    #[test]
    fn output_that_something_else_keeps_open_holds_nothing_up() {
        let output = sh("sleep 5 & echo done").run().expect("ends well");
        assert_eq!(output.stdout, "done\n");
    }
}
