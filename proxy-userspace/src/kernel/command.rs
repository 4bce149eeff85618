//! Runs commands. The proxy starts processes here and nowhere else.
//!
//! When the process shuts down, no command is started any more, and running commands get a moment
//! to end before they are killed. A killed command leaves the kernel in a good state: a table of
//! iptables or nftables changes at once or not at all, and `ipset restore` goes line by line, in an
//! order whose every prefix is safe. This holds only if nothing else is changed after that command:
//! see [`Launcher::is_shutting_down`].

use std::{
    ffi::{OsStr, OsString},
    fmt,
    io::{self, Read, Write as _},
    os::unix::{fs::PermissionsExt as _, process::CommandExt as _},
    path::PathBuf,
    process::{self, Child, ExitStatus, Stdio},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use tokio_util::sync::CancellationToken;

use super::KernelError;
use crate::process_group::ProcessGroup;

/// The default time limit of a command.
const LIMIT: Duration = Duration::from_secs(10);
/// How long a running command may go on after the shutdown began. iptables-restore waits for its
/// lock for less than that.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(8);
/// How often a command is polled while its output is open.
const TICK: Duration = Duration::from_millis(50);
/// The first pause between polls once the output is closed. It doubles up to [`TICK`].
const CLOSING_TICK: Duration = Duration::from_micros(200);
/// How long the output may stay open after the command ended.
const DRAIN: Duration = Duration::from_secs(2);
/// The same, while more output comes.
const MAX_DRAIN: Duration = Duration::from_secs(30);
/// How many characters of standard error an error message keeps, counted from the end.
const MAX_STDERR: usize = 2000;
/// Directories of administrators' commands. A service's `PATH` may lack them.
const SYSTEM_DIRECTORIES: [&str; 3] = ["/usr/local/sbin", "/usr/sbin", "/sbin"];

/// Finds commands, and allows them to start until the process shuts down.
#[derive(Clone, Debug)]
pub struct Launcher {
    directories: Vec<PathBuf>,
    shutdown: CancellationToken,
}

impl Launcher {
    /// Searches these directories only.
    pub fn only_in(directories: impl IntoIterator<Item = PathBuf>) -> Self {
        Self { directories: directories.into_iter().collect(), shutdown: CancellationToken::new() }
    }

    /// Starts no command any more once `shutdown` is cancelled, except commands that undo
    /// something.
    pub fn until(self, shutdown: CancellationToken) -> Self {
        Self { shutdown, ..self }
    }

    /// Returns true if commands are not started any more, because the process shuts down. Do not
    /// retry what fails then, and skip what would come after it: it may rely on the failed command.
    pub fn is_shutting_down(&self) -> bool {
        self.shutdown.is_cancelled()
    }

    /// Returns the path of a program, or `None` if it is not installed.
    pub fn find(&self, program: &str) -> Option<PathBuf> {
        self.directories.iter().map(|directory| directory.join(program)).find(|path| {
            path.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
        })
    }
}

/// Launchers are equal if they search the same directories.
impl PartialEq for Launcher {
    fn eq(&self, other: &Self) -> bool {
        self.directories == other.directories
    }
}

impl Eq for Launcher {}

impl Default for Launcher {
    /// Searches the `PATH` of this process and the directories of administrators' commands.
    fn default() -> Self {
        let path = std::env::var_os("PATH").unwrap_or_default();
        Self::only_in(std::env::split_paths(&path).chain(SYSTEM_DIRECTORIES.map(PathBuf::from)))
    }
}

/// A command to run, in this thread's namespaces and with this process's environment.
#[derive(Clone, Debug)]
pub struct Command {
    program: String,
    launcher: Launcher,
    args: Vec<OsString>,
    stdin: Option<String>,
    limit: Duration,
    /// The command also starts, and runs to its end, while the process shuts down.
    undoes: bool,
}

/// The result of a command that ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// The exit status.
    pub status: ExitStatus,
    /// Standard output. Bytes that are not UTF-8 are replaced.
    pub stdout: String,
    /// Standard error. Bytes that are not UTF-8 are replaced.
    pub stderr: String,
}

impl Command {
    /// A program without arguments and input, with a time limit of ten seconds.
    pub fn new(program: impl Into<String>, launcher: &Launcher) -> Self {
        Self {
            program: program.into(),
            launcher: launcher.clone(),
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

    /// Sets the standard input. It is empty by default.
    pub fn stdin(mut self, text: impl Into<String>) -> Self {
        self.stdin = Some(text.into());
        self
    }

    /// Sets the time limit. A command that takes longer is killed with all processes it started.
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Marks a command that removes something which must not outlive this process. It runs to its
    /// end, also while the process shuts down.
    pub fn undoing(mut self) -> Self {
        self.undoes = true;
        self
    }

    /// Runs the command. Returns [`KernelError::CommandFailed`] if its status is not 0.
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

    /// Runs the command and returns its output, whatever its status is.
    pub fn output(&self) -> Result<Output, KernelError> {
        if self.is_cancelled() {
            return Err(KernelError::CommandCancelled(self.to_string()));
        }
        let mut child = self.spawn()?;
        let (to, chunks) = mpsc::channel();
        if let Some((mut pipe, text)) = child.stdin.take().zip(self.stdin.clone()) {
            // A program that does not read all of its input reports the reason in another way.
            thread::spawn(move || drop(pipe.write_all(text.as_bytes())));
        }
        forward(child.stdout.take(), Stream::Out, to.clone());
        forward(child.stderr.take(), Stream::Err, to);
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let status = self.wait(&mut child, &chunks, |(stream, bytes)| match stream {
            Stream::Out => out.extend(bytes),
            Stream::Err => err.extend(bytes),
        })?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ok(Output { status, stdout: text(&out), stderr: text(&err) })
    }

    fn is_cancelled(&self) -> bool {
        !self.undoes && self.launcher.is_shutting_down()
    }

    fn spawn(&self) -> Result<Child, KernelError> {
        let Some(program) = self.launcher.find(&self.program) else {
            return Err(KernelError::CommandNotFound(self.program.clone()));
        };
        #[expect(clippy::disallowed_methods, reason = "all commands of the proxy start here")]
        let mut command = process::Command::new(program);
        let stdin = if self.stdin.is_some() { Stdio::piped() } else { Stdio::null() };
        // Messages are in English, for people and because shunt parses some of them. A program that
        // is one file under many names acts by the name in arg0.
        command.arg0(&self.program).args(&self.args);
        let path = std::env::join_paths(&self.launcher.directories).unwrap_or_default();
        command.env("LC_ALL", "C").env("PATH", path);
        command.stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::piped());
        // A signal or the limit kills the whole group. It must not be the proxy's own group.
        command.process_group(0);
        command.spawn().map_err(KernelError::call("run", self.to_string()))
    }

    #[expect(clippy::disallowed_methods, reason = "the limit needs a clock")]
    fn wait(
        &self,
        child: &mut Child,
        chunks: &mpsc::Receiver<Chunk>,
        mut keep: impl FnMut(Chunk),
    ) -> Result<ExitStatus, KernelError> {
        let deadline = Instant::now() + self.limit;
        let (mut open, mut pause, mut ended, mut cancelled_at) = (true, CLOSING_TICK, None, None);
        loop {
            // If the machine stood still for this time, the readers get another tick.
            let is_over = ended.is_some_and(|(_, at): (_, Instant)| at.elapsed() >= DRAIN);
            let mut is_silent = false;
            if open {
                match chunks.recv_timeout(TICK) {
                    Ok(chunk) => keep(chunk),
                    Err(mpsc::RecvTimeoutError::Timeout) => is_silent = true,
                    Err(mpsc::RecvTimeoutError::Disconnected) => open = false,
                }
            }
            if ended.is_none() {
                let status = child.try_wait().map_err(KernelError::call("wait for", self.to_string()))?;
                ended = status.map(|status| (status, Instant::now()));
            }
            if let Some((status, at)) = ended {
                // A process that the command left running may keep the output open.
                let is_late = is_over && (is_silent || self.is_cancelled());
                if !open || is_late || at.elapsed() >= MAX_DRAIN {
                    return Ok(status);
                }
            } else if Instant::now() >= deadline {
                kill(child);
                return Err(KernelError::CommandTimedOut { command: self.to_string(), limit: self.limit });
            } else if self.is_cancelled()
                && cancelled_at.get_or_insert_with(Instant::now).elapsed() >= SHUTDOWN_LIMIT
            {
                kill(child);
                return Err(KernelError::CommandCancelled(self.to_string()));
            }
            if !open {
                thread::sleep(pause);
                pause = TICK.min(pause * 2);
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

/// Reads a pipe to its end in a thread of its own.
fn forward(pipe: Option<impl Read + Send + 'static>, stream: Stream, to: mpsc::Sender<Chunk>) {
    let Some(mut pipe) = pipe else { return };
    thread::spawn(move || {
        let mut buffer = [0; 16 * 1024];
        loop {
            match pipe.read(&mut buffer) {
                Ok(length @ 1..) if to.send((stream, buffer[..length].to_vec())).is_ok() => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(_) | Err(_) => return,
            }
        }
    });
}

fn kill(child: &mut Child) {
    let group = ProcessGroup::led_by(child.id());
    group.into_iter().for_each(ProcessGroup::kill);
    // One that had just ended by itself still has to be reaped.
    drop(child.wait());
    group.into_iter().for_each(ProcessGroup::collect);
}

fn tail(text: &str) -> &str {
    text.char_indices().rev().nth(MAX_STDERR).map_or(text, |(at, _)| &text[at..])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(script: &str) -> Command {
        Command::new("sh", &Launcher::default()).args(["-c", script])
    }

    #[test]
    fn a_command_gets_its_input_and_its_output_is_returned() {
        let input = "line\n".repeat(100_000);
        let output = sh("cat; echo warned >&2").stdin(&input).run().expect("ends well");
        assert_eq!((output.stdout, output.stderr.as_str()), (input, "warned\n"));
    }

    #[test]
    fn a_failed_command_is_reported_with_status_and_stderr() {
        let error = sh("echo no such table >&2; exit 3").run().expect_err("status 3").to_string();
        assert_eq!(error, "`sh -c echo no such table >&2; exit 3` ended with exit status: 3: no such table");
        let loud = sh("head -c 100000 /dev/zero | tr '\\0' x >&2; exit 1").run().expect_err("status 1");
        assert!(loud.to_string().len() < 3000);
    }

    #[test]
    fn a_command_that_is_not_installed_has_its_own_error() {
        let missing = Command::new("shunt-no-such-program", &Launcher::default()).run();
        assert!(
            matches!(missing, Err(KernelError::CommandNotFound(program)) if program == "shunt-no-such-program")
        );
        let elsewhere = Command::new("sh", &Launcher::only_in([])).run();
        assert!(matches!(elsewhere, Err(KernelError::CommandNotFound { .. })));
    }

    #[test]
    fn a_command_past_its_limit_is_killed_with_its_children() {
        let limit = Duration::from_millis(300);
        let error = sh("sleep 60 & sleep 60").limit(limit).run().expect_err("too long");
        assert!(matches!(error, KernelError::CommandTimedOut { .. }), "{error}");
        let error = sh("while :; do echo talking; done").limit(limit).run().expect_err("too long");
        assert!(matches!(error, KernelError::CommandTimedOut { .. }), "{error}");
    }

    /// As the first process of a container, this process inherits what its children leave.
    #[test]
    fn what_a_killed_command_leaves_does_not_stay_a_zombie() {
        nix::sys::prctl::set_child_subreaper(true).expect("allowed");
        let number = tempfile::NamedTempFile::new().expect("a file");
        let script = format!("sleep 60 & echo $! > {}; wait", number.path().display());
        let error = sh(&script).limit(Duration::from_secs(10)).run().expect_err("too long");
        assert!(matches!(error, KernelError::CommandTimedOut { .. }), "{error}");
        let left = std::fs::read_to_string(number.path()).expect("a number");
        assert!(left.ends_with('\n'), "sh was too slow");
        let status = std::fs::read_to_string(format!("/proc/{}/status", left.trim()));
        assert!(status.is_err(), "{status:?}");
    }

    #[test]
    fn output_that_a_child_keeps_open_delays_nothing() {
        let output = sh("sleep 5 & echo done").run().expect("ends well");
        assert_eq!(output.stdout, "done\n");
    }
    #[test]
    fn after_the_shutdown_began_only_undoing_commands_run() {
        let shutdown = CancellationToken::new();
        let launcher = Launcher::default().until(shutdown.clone());
        let command = |script| Command::new("sh", &launcher).args(["-c", script]);
        command("exit 0").run().expect("the shutdown has not begun");
        shutdown.cancel();
        let error = command("exit 0").run().expect_err("it is not started");
        assert!(matches!(error, KernelError::CommandCancelled { .. }), "{error}");
        let output = command("sleep 0.2; echo done").undoing().run().expect("it runs");
        assert_eq!(output.stdout, "done\n");
    }
}
