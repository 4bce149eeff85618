//! The runner as a program: it reports success and failure, and always removes what it created.
//! Needs root.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::{
    fs,
    os::unix::{fs::PermissionsExt as _, process::ExitStatusExt as _},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::Duration,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use shunt_tests::{
    deadline::Deadline,
    process::write_script,
    world::{leftover_paths, remove_leftovers},
};

/// A flow from a pod to another pod's address. It works without a proxy.
const DIRECT: &str = "{from: a1, to: '10.244.2.11:8080', proto: tcp, n: 3, reach: [b1], source: client}";
/// A flow to a cluster IP. It needs a proxy.
const CLUSTER_IP: &str = "{from: a1, to: '10.96.0.10:80', proto: tcp, n: 2, reach: [b1]}";

fn cases(flows: &str) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let case = format!("{{name: tiny, about: a tiny case, steps: [{{flows: [{flows}]}}]}}");
    fs::write(directory.path().join("tiny.yaml"), case).unwrap();
    directory
}

#[expect(clippy::disallowed_methods, reason = "the runner's own binary, which is bounded in time itself")]
fn conformance(cases: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_conformance"));
    command.args(["--mode", "ebpf", "--cases"]).arg(cases).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// Writes a proxy that never becomes healthy, so that the runner waits for it.
fn stuck_proxy(directory: &Path) -> PathBuf {
    let path = directory.join("stuck");
    write_script(&path, "#!/bin/sh\necho I do nothing\nexec sleep 600\n").unwrap();
    path
}

/// Starts a runner that waits for its proxy. Returns it with the name of its run.
fn waiting_runner(directory: &Path) -> (Child, String) {
    let child = conformance(directory).arg("--shunt").arg(stuck_proxy(directory)).spawn().unwrap();
    let name = format!("shunt-test-{}-0", child.id());
    let log = Path::new("/run").join(&name).join("proxy.log");
    let started = Deadline::after(Duration::from_mins(2))
        .poll(|| fs::read_to_string(&log).is_ok_and(|text| text.contains("I do nothing")).then_some(()));
    assert!(started.is_some(), "the runner has not started its proxy; there is {:?}", leftover_paths(&name));
    (child, name)
}

fn signal(child: &Child, signal: Signal) {
    kill(Pid::from_raw(i32::try_from(child.id()).unwrap()), signal).unwrap();
}

#[test]
fn flow_without_service_passes_without_a_proxy() {
    let cases = cases(DIRECT);
    let output = conformance(cases.path()).arg("--no-proxy").output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    assert!(text(&output).ends_with("1 passed, 0 failed\n"), "{}", text(&output));
}

#[test]
fn flow_to_a_service_fails_without_a_proxy_with_a_reason() {
    let cases = cases(&format!("{DIRECT}, {CLUSTER_IP}"));
    let output = conformance(cases.path()).arg("--no-proxy").output().unwrap();
    let text = text(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    for wanted in
        ["FAIL    tiny", "step 1, flow 2: a1 tcp 10.96.0.10:80 x2", "expected: reach b1", "timed out"]
    {
        assert!(text.contains(wanted), "{wanted:?} is not in:\n{text}");
    }
    assert!(text.ends_with("1 passed, 1 failed\n"), "{text}");
}

#[test]
fn case_for_another_mode_is_named_and_not_counted() {
    let cases = cases(DIRECT);
    let path = cases.path().join("other.yaml");
    let other = fs::read_to_string(cases.path().join("tiny.yaml")).unwrap();
    fs::write(path, other.replacen("name: tiny", "name: other, modes: [ipvs]", 1)).unwrap();
    let output = conformance(cases.path()).arg("--no-proxy").output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    assert!(text(&output).contains("skipped, for ipvs: other\n"), "{}", text(&output));
    assert!(text(&output).ends_with("1 passed, 0 failed\n"), "{}", text(&output));
}

#[test]
fn proxy_that_ends_at_once_fails_the_case_with_its_log() {
    let cases = cases(DIRECT);
    let proxy = stuck_proxy(cases.path());
    fs::write(&proxy, "#!/bin/sh\necho no such flag: $1\nexit 3\n").unwrap();
    let output = conformance(cases.path()).arg("--shunt").arg(proxy).output().unwrap();
    let text = text(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    for wanted in ["ended with exit code 3 before it was healthy", "| no such flag: --mode"] {
        assert!(text.contains(wanted), "{wanted:?} is not in:\n{text}");
    }
}

#[test]
fn case_with_an_unknown_key_is_refused_first() {
    let cases = cases("{from: a1, too: '10.96.0.10:80'}");
    let output = conformance(cases.path()).arg("--no-proxy").output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output).contains("tiny.yaml: steps[0].flows[0]"), "{}", text(&output));
}

#[test]
fn stopped_runner_leaves_nothing() {
    for stop in [Signal::SIGINT, Signal::SIGTERM] {
        let cases = cases(DIRECT);
        let (child, name) = waiting_runner(cases.path());
        signal(&child, stop);
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(128 + stop as i32), "{}", text(&output));
        assert_eq!(leftover_paths(&name), Vec::<PathBuf>::new(), "{}", text(&output));
    }
}

#[test]
fn next_run_removes_what_a_killed_runner_left() {
    let cases = cases(DIRECT);
    let (mut child, name) = waiting_runner(cases.path());
    signal(&child, Signal::SIGKILL);
    assert_eq!(child.wait().unwrap().signal(), Some(Signal::SIGKILL as i32));
    // Another test's runner may have removed it already.
    let (_, errors) = remove_leftovers().unwrap();
    assert!(errors.is_empty(), "{errors:?}");
    assert_eq!(leftover_paths(&name), Vec::<PathBuf>::new());
}

#[test]
fn runner_without_root_says_what_it_needs() {
    use std::os::unix::process::CommandExt as _;
    let cases = cases(DIRECT);
    fs::set_permissions(cases.path(), fs::Permissions::from_mode(0o755)).unwrap();
    // Other users may not read the build directory, but they can read the copy.
    let program = cases.path().join("conformance");
    fs::copy(env!("CARGO_BIN_EXE_conformance"), &program).unwrap();
    #[expect(clippy::disallowed_methods, reason = "the runner's own binary, which ends at once")]
    let output = Command::new(&program)
        .args(["--mode", "ebpf", "--no-proxy", "--cases"])
        .arg(cases.path())
        .uid(65_534)
        .gid(65_534)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output).contains("needs root"), "{}", text(&output));
}
