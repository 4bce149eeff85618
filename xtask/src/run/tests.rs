//! Tests of running programs, with a real shell.

use super::*;

fn shell(script: &str) -> Run {
    Run::new("sh").args(["-c", script])
}

#[test]
fn standard_output_is_returned_and_standard_error_is_not() {
    assert_eq!(shell("echo out; echo err >&2").read().unwrap(), "out\n");
}

#[test]
fn failing_program_is_an_error_with_its_last_lines() {
    let error = shell("echo first; echo no such thing >&2; exit 3").read().unwrap_err().to_string();
    assert!(error.contains("exit status: 3") && error.contains("no such thing"), "{error}");
}

#[test]
fn program_over_its_time_limit_is_stopped_with_its_children() {
    take_signals();
    let error = shell("sleep 300 & echo $!; wait").limit(Duration::from_secs(20));
    let mut started = String::new();
    let error = error.check(&mut |line| line.clone_into(&mut started)).unwrap_err();
    assert!(format!("{error:#}").contains("took longer than"), "{error:#}");
    assert!(started.parse::<u32>().is_ok(), "{started:?} is no pid");
    let deadline = now() + Duration::from_mins(1);
    while running(&started) {
        assert!(now() < deadline, "the sleep with pid {started} is still there");
        thread::sleep(CLOSING_TICK);
    }
}

/// Returns true if a process runs. A zombie does not run.
fn running(pid: &str) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| stat.rsplit(')').next().is_some_and(|rest| !rest.trim().starts_with('Z')))
}

#[test]
fn missing_program_is_named() {
    let error = format!("{:#}", Run::new("shunt-no-such-program").read().unwrap_err());
    assert!(error.contains("shunt-no-such-program"), "{error}");
}

#[test]
fn overwritten_progress_counts_as_its_last_state() {
    assert_eq!(shell("printf '10%%\\r99%%\\r100%%\\n'").read().unwrap(), "100%\n");
}

#[test]
fn environment_variables_can_be_added_and_removed() {
    let run = shell("echo $SHUNT_A-$HOME").env("SHUNT_A", "a").without_env("HOME");
    assert_eq!(run.read().unwrap(), "a-\n");
}
