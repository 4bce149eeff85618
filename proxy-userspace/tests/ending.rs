//! What commands do once this process is about to end, which cannot be taken back: hence a test, and a process, of its own.

use std::time::Duration;

use proxy_userspace::kernel::{
    KernelError,
    command::{self, Command, SearchPath},
};

#[test]
fn once_the_process_is_to_end_only_commands_that_undo_something_are_run_and_those_to_their_end() {
    let command = |script| Command::new("sh", &SearchPath::default()).args(["-c", script]);
    command("exit 0").run().expect("nothing ends yet");
    command::end_all_within(Duration::ZERO);
    let error = command("exit 0").run().expect_err("it is not begun");
    assert!(matches!(error, KernelError::CommandForsaken { .. }), "{error}");
    let output = command("sleep 0.2; echo done").undoing().run().expect("it is run");
    assert_eq!(output.stdout, "done\n");
}
