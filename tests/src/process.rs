//! Processes of the test world, started in a host's namespace and cgroup, and commands with a
//! timeout.

use std::{
    ffi::{CString, OsStr},
    fs::{self, File},
    io::{self, Read as _},
    os::{
        fd::{AsFd as _, IntoRawFd as _},
        unix::{fs::PermissionsExt as _, process::ExitStatusExt as _},
    },
    path::{Path, PathBuf},
    process::{Child, Command, ExitCode, ExitStatus, Stdio},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use clap::Parser;
use nix::{
    sched::{CloneFlags, setns},
    sys::{
        prctl,
        signal::{Signal, kill},
    },
    unistd::{Pid, dup2_stdin, execv},
};

use crate::{agent, deadline::Deadline, interrupt};

/// The first argument with which a program of this crate enters a host and executes another
/// program.
const ENTER_HOST: &str = "enter-host";
const AGENT: &str = "agent";

/// Writes an executable script. The text begins with `#!`.
pub fn write_script(path: &Path, text: &str) -> io::Result<()> {
    fs::write(path, text)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))
}

/// The environment of a process on a host.
#[derive(Clone, Debug)]
pub struct HostContext {
    /// A program that calls [`run_as_host_process`].
    pub program: PathBuf,
    /// The network namespace, under `/run/netns`.
    pub namespace: PathBuf,
    /// The directory of the cgroup.
    pub cgroup: PathBuf,
}

/// A process of the world. It is killed when this value is dropped, and by the kernel when the
/// thread that started it ends.
#[derive(Debug)]
pub struct ChildProcess {
    child: Child,
    name: String,
}

/// The result of a finished command.
#[derive(Debug)]
pub struct CommandOutput {
    /// The exit status.
    pub status: ExitStatus,
    /// Its standard output.
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
}

/// Enters a namespace and a cgroup, then executes another program.
#[derive(Debug, Parser)]
struct EnterArguments {
    #[arg(long)]
    namespace: PathBuf,
    #[arg(long)]
    cgroup: PathBuf,
    /// Closes standard input when the program begins, which then reads from /dev/null.
    #[arg(long)]
    close_stdin: bool,
    /// The program and its arguments.
    #[arg(last = true, required = true)]
    command: Vec<String>,
}

/// The `main` of every program that builds a world. Runs `run` with logs on standard error, and
/// removes the worlds when a signal arrives. If the program was started as an agent or to enter a
/// host, does that instead.
pub fn main(name: &str, run: impl FnOnce() -> Result<bool>) -> ExitCode {
    if let Some(code) = run_as_host_process() {
        return code;
    }
    tracing_subscriber::fmt().with_writer(io::stderr).init();
    match interrupt::remove_worlds_on_signal().and_then(|()| run()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{name}: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// If the program was started as an agent or to enter a host, does that and returns the exit code.
pub fn run_as_host_process() -> Option<ExitCode> {
    let mut arguments = std::env::args();
    let result = match arguments.nth(1).as_deref() {
        Some(ENTER_HOST) => enter(&EnterArguments::parse_from(std::env::args().skip(1))),
        Some(AGENT) => agent::serve(&arguments.next().unwrap_or_default()),
        _ => return None,
    };
    Some(match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    })
}

impl HostContext {
    /// Starts a program and appends its output to `log`. Returns when the program is in its host
    /// and begins: joining a cgroup alone can take 10 ms.
    pub fn spawn(&self, program: &Path, arguments: &[String], log: &File) -> Result<ChildProcess> {
        let mut command = self.command_with(&["--close-stdin"], program, arguments);
        let (mut begun, open_until_then) = io::pipe().context("create a pipe")?;
        command.stdin(open_until_then).stdout(log.try_clone()?).stderr(log.try_clone()?);
        let running = ChildProcess::start(command, program)?;
        begun.read_to_end(&mut Vec::new()).context("wait for the program to begin")?;
        Ok(running)
    }

    /// Starts the agent of a host, with pipes for its requests and responses.
    pub fn spawn_agent(&self, host: &str) -> Result<ChildProcess> {
        let arguments = [AGENT.to_owned(), host.to_owned()];
        let mut command = self.command(&self.program, &arguments);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        ChildProcess::start(command, &self.program)
    }

    /// Runs a command to its end or for at most `limit`, and keeps its output.
    pub fn run_with_timeout(
        &self,
        program: &Path,
        arguments: &[&str],
        limit: Duration,
    ) -> Result<CommandOutput> {
        finish(self.command(program, arguments), program, limit)
    }

    fn command(&self, program: &Path, arguments: &[impl AsRef<OsStr>]) -> Command {
        self.command_with(&[], program, arguments)
    }

    fn command_with(&self, flags: &[&str], program: &Path, arguments: &[impl AsRef<OsStr>]) -> Command {
        let mut command = command(&self.program);
        command.arg(ENTER_HOST).arg("--namespace").arg(&self.namespace).arg("--cgroup").arg(&self.cgroup);
        command.args(flags).arg("--").arg(program).args(arguments);
        command
    }
}

impl ChildProcess {
    fn start(mut command: Command, program: &Path) -> Result<Self> {
        let name = program.display().to_string();
        let child = command.spawn().with_context(|| format!("start {name}"))?;
        Ok(Self { child, name })
    }

    /// Returns the process itself, for its pipes.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// Returns the process identifier.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Returns the exit status. None while the process runs.
    pub fn exit_status(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait().with_context(|| format!("wait for {}", self.name))
    }

    /// Sends SIGTERM and waits for the end. After `timeout`, kills the process and returns an
    /// error.
    pub fn terminate(mut self, timeout: Duration) -> Result<ExitStatus> {
        self.signal(Signal::SIGTERM)?;
        match self.wait(timeout)? {
            Some(status) => Ok(status),
            None => bail!("{} did not exit within {timeout:?} of SIGTERM and was killed", self.name),
        }
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let pid = i32::try_from(self.child.id()).context("a process id")?;
        kill(Pid::from_raw(pid), signal).with_context(|| format!("send {signal} to {}", self.name))
    }

    /// Waits until the process ends. Returns None if it still runs after `timeout`.
    pub fn wait(&mut self, timeout: Duration) -> Result<Option<ExitStatus>> {
        Deadline::after(timeout).poll(|| self.exit_status().transpose()).transpose()
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        // The process may have ended already. wait() removes the zombie.
        let _killed = self.child.kill();
        let _status = self.child.wait();
    }
}

/// Runs a command to its end or for at most `limit`, and keeps its output.
pub fn run_with_timeout(program: &Path, arguments: &[&str], limit: Duration) -> Result<CommandOutput> {
    let mut command = command(program);
    command.args(arguments);
    finish(command, program, limit)
}

fn finish(mut command: Command, program: &Path, limit: Duration) -> Result<CommandOutput> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut running = ChildProcess::start(command, program)?;
    let stdout = running.child.stdout.take().map(|pipe| thread::spawn(move || read_all(pipe)));
    let stderr = running.child.stderr.take().map(|pipe| thread::spawn(move || read_all(pipe)));
    let Some(status) = running.wait(limit)? else {
        bail!("{} did not end within {limit:?} and was killed", program.display());
    };
    let text =
        |reader: Option<thread::JoinHandle<String>>| reader.and_then(|r| r.join().ok()).unwrap_or_default();
    Ok(CommandOutput { status, stdout: text(stdout), stderr: text(stderr) })
}

/// Returns a number of `/proc/PID/status`, such as `VmRSS` in KiB.
pub fn status_field(process: u32, name: &str) -> Result<u64> {
    let path = format!("/proc/{process}/status");
    let text = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let number = value.and_then(|value| value.split_whitespace().next()?.parse().ok());
    number.with_context(|| format!("no {name} in {path}"))
}

/// Describes an exit status as "exit code 1" or "signal 15".
pub fn describe_status(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => status.to_string(),
    }
}

fn read_all(mut pipe: impl io::Read) -> String {
    let mut bytes = Vec::new();
    // If the pipe breaks, the output up to that point is returned.
    let _end = pipe.read_to_end(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

#[expect(clippy::disallowed_methods, reason = "this is the tests' wrapper: all commands start here")]
fn command(program: &Path) -> Command {
    Command::new(program)
}

fn enter(arguments: &EnterArguments) -> Result<()> {
    // The process must die with the runner, even if the runner is killed with SIGKILL.
    prctl::set_pdeathsig(Signal::SIGKILL).context("set the parent death signal")?;
    let procs = arguments.cgroup.join("cgroup.procs");
    fs::write(&procs, "0").with_context(|| format!("join {}", procs.display()))?;
    let namespace = File::open(&arguments.namespace)
        .with_context(|| format!("open {}", arguments.namespace.display()))?;
    setns(&namespace, CloneFlags::CLONE_NEWNET)
        .with_context(|| format!("enter {}", arguments.namespace.display()))?;
    if arguments.close_stdin {
        close_stdin_on_exec().context("give the program another standard input")?;
    }
    let words: Vec<_> =
        arguments.command.iter().map(|word| CString::new(word.as_str())).collect::<Result<_, _>>()?;
    let program = words.first().context("no program given")?;
    execv(program, &words).with_context(|| format!("run {}", program.to_string_lossy()))?;
    Ok(())
}

/// Moves standard input to a descriptor that the next exec closes.
fn close_stdin_on_exec() -> io::Result<()> {
    let _until_exec = io::stdin().as_fd().try_clone_to_owned()?.into_raw_fd();
    dup2_stdin(File::open("/dev/null")?)?;
    Ok(())
}
