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
fn a_failing_program_is_an_error_with_what_it_last_said() {
    let error = shell("echo first; echo no such thing >&2; exit 3").read().unwrap_err().to_string();
    assert!(error.contains("exit status: 3") && error.contains("no such thing"), "{error}");
}

#[test]
fn a_program_that_takes_too_long_is_stopped_with_all_it_started() {
    take_signals();
    let error = shell("sleep 300 & echo $!; wait").limit(Duration::from_secs(2));
    let mut started = String::new();
    let error = error.check(&mut |line| line.clone_into(&mut started)).unwrap_err();
    assert!(format!("{error:#}").contains("took longer than"), "{error:#}");
    assert!(started.parse::<u32>().is_ok(), "{started:?} is no pid");
    let deadline = now() + Duration::from_secs(10);
    while running(&started) {
        assert!(now() < deadline, "the sleep with pid {started} is still there");
        thread::sleep(CLOSING_TICK);
    }
}

/// A zombie that its new parent has not reaped yet is not running.
fn running(pid: &str) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| stat.rsplit(')').next().is_some_and(|rest| !rest.trim().starts_with('Z')))
}

#[test]
fn a_missing_program_is_named() {
    let error = format!("{:#}", Run::new("shunt-no-such-program").read().unwrap_err());
    assert!(error.contains("shunt-no-such-program"), "{error}");
}

#[test]
fn overdrawn_progress_counts_as_its_last_drawing() {
    assert_eq!(shell("printf '10%%\\r99%%\\r100%%\\n'").read().unwrap(), "100%\n");
}

#[test]
fn the_environment_can_be_added_to_and_taken_from() {
    let run = shell("echo $SHUNT_A-$HOME").env("SHUNT_A", "a").without_env("HOME");
    assert_eq!(run.read().unwrap(), "a-\n");
}
