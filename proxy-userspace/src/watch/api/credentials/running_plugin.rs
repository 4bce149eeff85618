//! A process of a credential plugin: its output, and its end.

use std::{
    io,
    process::{Output, Stdio},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncReadExt as _},
    pin,
    process::{Child, Command},
    select,
    task::spawn_blocking,
    time::timeout,
};

use crate::process_group::ProcessGroup;

/// How long its output may stay open after it ended. client-go waits until it is closed.
const DRAIN: Duration = Duration::from_secs(2);

/// How long a killed plugin may take to end. One in uninterruptible sleep ends later.
const END: Duration = Duration::from_secs(1);

/// A plugin that runs. If this is dropped before the plugin has ended, the plugin is killed with
/// its process group, if it has its own: a plugin is often a script that waits for another program.
pub(super) struct RunningPlugin {
    child: Child,
    /// The plugin has a process group of its own.
    has_group: bool,
}

impl RunningPlugin {
    /// Starts it. One that asks its user stays in the process group of the terminal's foreground:
    /// any other may not read from it.
    pub(super) fn start(mut command: Command, is_interactive: bool) -> io::Result<Self> {
        command.stdin(if is_interactive { Stdio::inherit() } else { Stdio::null() });
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        if !is_interactive {
            command.process_group(0);
        }
        Ok(Self { child: command.spawn()?, has_group: !is_interactive })
    }

    /// Waits for its end, and returns its output. A process that it left running may keep the
    /// output open: that does not count.
    pub(super) async fn output(&mut self) -> io::Result<Output> {
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        let pipes = (self.child.stdout.take(), self.child.stderr.take());
        let status = {
            let reading = async { tokio::try_join!(read(pipes.0, &mut stdout), read(pipes.1, &mut stderr)) };
            pin!(reading);
            select! {
                read = &mut reading => {
                    read?;
                    self.child.wait().await?
                }
                status = self.child.wait() => {
                    // The rest of the output may not be read yet.
                    timeout(DRAIN, reading).await.unwrap_or(Ok(((), ())))?;
                    status?
                }
            }
        };
        Ok(Output { status, stdout, stderr })
    }

    /// Kills it, and collects what it leaves. If it does not end in time, tokio collects it later.
    pub(super) async fn end(&mut self) {
        let group = self.group();
        group.into_iter().for_each(ProcessGroup::kill);
        // Killing it fails only if its status was collected.
        let has_ended = timeout(END, self.child.kill()).await.is_ok();
        if let Some(group) = group.filter(|_| has_ended) {
            // This fails only if the runtime is shutting down.
            drop(spawn_blocking(move || group.collect()).await);
        }
    }

    /// Returns its group, if it has its own and its status was not collected. Until then, the
    /// kernel gives its number to no other process.
    fn group(&self) -> Option<ProcessGroup> {
        self.child.id().filter(|_| self.has_group).and_then(ProcessGroup::led_by)
    }
}

impl Drop for RunningPlugin {
    fn drop(&mut self) {
        self.group().into_iter().for_each(ProcessGroup::kill);
    }
}

/// Reads a pipe to its end. If this is dropped before, `bytes` has what was read.
async fn read(pipe: Option<impl AsyncRead + Unpin>, bytes: &mut Vec<u8>) -> io::Result<()> {
    let Some(mut pipe) = pipe else { return Ok(()) };
    while pipe.read_buf(bytes).await? > 0 {}
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// As the first process of a container, this process inherits what its children leave.
    #[tokio::test]
    async fn what_a_killed_plugin_leaves_does_not_stay_a_zombie() {
        nix::sys::prctl::set_child_subreaper(true).expect("allowed");
        let directory = tempfile::TempDir::new().expect("a directory");
        let number = directory.path().join("number");
        let mut command = Command::new("sh");
        command.args(["-c", &format!("sleep 1000 & echo $! > {}; wait", number.display())]);
        let mut running = RunningPlugin::start(command, false).expect("it starts");
        let read = || std::fs::read_to_string(&number).unwrap_or_default();
        while !read().ends_with('\n') {
            std::thread::sleep(Duration::from_millis(10));
        }
        running.end().await;
        assert!(!Path::new("/proc").join(read().trim()).exists());
    }
}
