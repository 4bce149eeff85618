//! The tests that run on every kernel: the programs with real sockets and links, and conformance
//! cases that use all programs.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, ensure};
use clap::ValueEnum;
use serde_json::Value;
use xtask::run::Run;
use xtask::workspace;

use super::guest::Guest;
use crate::cli::progress::Progress;
use crate::cli::release::Target;
use crate::cli::release::binaries::{self, Builder};
use crate::cli::steps;

/// Test targets that exercise the kernel.
const TARGETS: [&str; 4] = ["ebpf_sockets", "ebpf_frames", "ebpf_links", "netfilter"];
/// Conformance cases.
const CASES: [&str; 23] = [
    "clusterip-tcp",
    "clusterip-udp",
    "direct-path-over-a-bond",
    "direct-path-over-a-vlan",
    "dsr-whole",
    "fragmented-udp",
    "hairpin",
    "ingress-qdisc-of-others",
    "ipsec-to-the-client",
    "links-path-changes",
    "loadbalancer-source-ranges-node",
    "nodeport-cluster",
    "path-mtu-behind-other-node",
    "redirect-in-a-pod",
    "restart",
    "sctp",
    "sctp-association-stays",
    "udp-endpoint-replaced",
    "v6-clusterip",
    "v6-loadbalancer-source-ranges",
    "vlan",
    "xdp-beside-others",
    "xdp-generic",
];
/// Cases that only another architecture runs: what works alike on all kernels, but depends on the
/// layout of maps and packets.
const CASES_OF_ARCHITECTURES: [&str; 6] = [
    "affinity-clientip",
    "dual-stack",
    "externalip-cluster",
    "nodeport-udp",
    "outside-cgroup-cluster",
    "source-ranges-of-some-pods",
];
/// A component program for libxdp's dispatcher, which a case and a test load. Guests of other
/// architectures have no libxdp.
const FILTER: &str = "/usr/lib/x86_64-linux-gnu/bpf/xdpfilt_alw_all.o";
/// The program that these tests start.
const PROGRAM: &str = "conformance";
/// The program with the scenarios of AppArmor, which the host's kernel may lack.
const DEPLOYMENT: &str = "deployment";
const MODE: &str = "ebpf";
/// The cases of SCTP also run in this mode: most kernels of the host lack SCTP sockets. The step of
/// the ipvs mode has a case of its own.
const SCTP_MODE: &str = "iptables";
/// Makes cargo print the files that it builds.
const MESSAGES: [&str; 2] = ["--message-format", "json-render-diagnostics"];
/// The factor for timeouts of tests: guests run without KVM.
pub(crate) const PATIENCE: (&str, &str) = ("SHUNT_TEST_PATIENCE", "6");
const BUILD: Duration = Duration::from_mins(40);

/// A part of the tests that run on every kernel. Two guests run the parts at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Part {
    /// The programs with real sockets and links.
    Programs,
    /// Conformance cases, and AppArmor.
    Cases,
}

/// Builds the programs for an architecture. Returns a guest that runs a part of the tests, or both,
/// one test target or case after the other, except tests whose names contain one of `skip`.
pub(crate) fn guest(arch: Target, part: Option<Part>, skip: &[String]) -> Result<Guest> {
    let builds = Builds::of(arch)?;
    let mut built = Progress::during("build for the guest", |progress| {
        builds.world.check(&mut |line| progress.line(line))?;
        // Also for the cases, so that the guest of the other part builds nothing.
        build_tests(builds.tests, &mut |line| progress.line(line))
    })?;
    // A guest's file system is in memory, and programs with debug information are large.
    built.programs.retain(|program| program.ends_with(PROGRAM));
    if part == Some(Part::Cases) {
        built = Built::default();
    }
    let programs = ["shunt", PROGRAM, DEPLOYMENT].map(|name| builds.release.join(name));
    let cases = workspace::root().join("tests/cases");
    let script = script(arch, &builds.release, &built.tests, skip, part != Some(Part::Programs));
    let mut guest = Guest { arch, ..Guest::new(["bash", "-c", &script].map(Into::into).into())? };
    let filter = Some(PathBuf::from(FILTER)).filter(|filter| arch.is_host() && filter.is_file());
    let files = [cases].into_iter().chain(filter).collect();
    guest.copies = [built.tests, built.programs, programs.into(), files].concat();
    guest.environment = vec![PATIENCE, steps::SAME_CASES];
    Ok(guest)
}

/// The commands that build a guest's programs.
struct Builds {
    world: Run,
    tests: Run,
    /// The folder of shunt and of the programs of the test world.
    release: PathBuf,
}

impl Builds {
    fn of(arch: Target) -> Result<Self> {
        if !arch.is_host() {
            return Self::of_release(arch);
        }
        // Built for the whole workspace, as `cargo xtask test` does. So a test run builds nothing
        // again.
        let tests = steps::cargo_with_lints(BUILD).args(["test", "--no-run"]).args(MESSAGES);
        Ok(Self { world: steps::build_world()?, tests, release: steps::world() })
    }

    /// Builds the shunt of a release. The tests are optimised too, because they share most crates
    /// with it.
    fn of_release(arch: Target) -> Result<Self> {
        let builder = Builder::prepare(arch)?;
        let tests = builder.cargo("build").args(["--package", "shunt-tests"]).args(MESSAGES);
        let tests = [PROGRAM, DEPLOYMENT].iter().fold(tests, |run, program| run.args(["--bin", program]));
        let world = builder.cargo("build").args(binaries::SHUNT);
        Ok(Self { world, tests, release: binaries::release(arch) })
    }
}

/// Returns a script that runs these test programs, and the cases if they are wanted.
fn script(arch: Target, release: &Path, tests: &[PathBuf], skip: &[String], with_cases: bool) -> String {
    let more = if arch.is_host() { &[][..] } else { &CASES_OF_ARCHITECTURES };
    let all = [&CASES[..], more].concat();
    let sctp: Vec<&str> = CASES.into_iter().filter(|case| case.starts_with("sctp")).collect();
    let conformance = [(MODE, &all), (SCTP_MODE, &sctp)].map(|(mode, cases)| {
        let run = steps::with_shunt_in(release, PROGRAM).args(["--mode", mode]);
        run.args(["--whole", "--only", &cases.join(",")]).words()
    });
    let apparmor = steps::with_shunt_in(release, DEPLOYMENT).arg("--apparmor").words();
    let skip: Vec<OsString> = skip.iter().flat_map(|text| ["--skip".into(), text.into()]).collect();
    let tests = tests.iter().map(|test| [&[test.into()][..], &skip].concat());
    let cases = conformance.into_iter().chain([apparmor]).filter(|_| with_cases);
    one_after_the_other(&tests.chain(cases).collect::<Vec<_>>())
}

/// Returns a shell script that runs all commands, also after one that fails.
pub(crate) fn one_after_the_other(commands: &[Vec<OsString>]) -> String {
    let commands = commands.iter().map(|words| format!("{} || failed=1", quote(words)));
    let lines = ["uname -r; failed=0".into()].into_iter().chain(commands).chain(["exit $failed".into()]);
    lines.collect::<Vec<String>>().join("\n")
}

/// Quotes words for a shell.
fn quote(words: &[OsString]) -> String {
    let quote = |word: &OsString| format!("'{}'", word.display().to_string().replace('\'', r"'\''"));
    words.iter().map(quote).collect::<Vec<_>>().join(" ")
}

/// The programs that cargo built.
#[derive(Debug, Default, PartialEq, Eq)]
struct Built {
    tests: Vec<PathBuf>,
    /// Programs that the tests start.
    programs: Vec<PathBuf>,
}

fn build_tests(build: Run, each: &mut dyn FnMut(&str)) -> Result<Built> {
    let build = TARGETS.iter().fold(build, |build, target| build.args(["--test", target]));
    let mut said = Vec::new();
    let finished = build.watch(&mut |line| {
        if !line.starts_with('{') {
            said.push(line.to_owned());
            each(line);
        }
    })?;
    ensure!(finished.status.success(), "the tests for the guest cannot be built:\n{}", said.join("\n"));
    let programs = executables(&finished.stdout);
    let tests = &programs.tests;
    ensure!(tests.len() == TARGETS.len(), "cargo built {tests:?} instead of {TARGETS:?}");
    Ok(programs)
}

/// Reads the programs from cargo's messages, one JSON document a line.
fn executables(messages: &str) -> Built {
    let mut built = Built::default();
    for message in messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
        let Some(path) = message["executable"].as_str() else { continue };
        let is_test = message["profile"]["test"] == true;
        if is_test { &mut built.tests } else { &mut built.programs }.push(path.into());
    }
    built
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::conformance::is_case;

    #[test]
    fn tests_and_their_programs_are_read_from_messages() {
        let messages = r#"{"reason":"compiler-artifact","profile":{"test":false},"executable":"/target/debug/conformance"}
{"reason":"compiler-artifact","profile":{"test":true},"executable":"/target/debug/deps/ebpf_sockets-1"}
{"reason":"compiler-artifact","profile":{"test":false},"executable":null}
{"reason":"build-finished","success":true}
"#;
        let expected = Built {
            tests: vec!["/target/debug/deps/ebpf_sockets-1".into()],
            programs: vec!["/target/debug/conformance".into()],
        };
        assert_eq!(executables(messages), expected);
    }

    #[test]
    fn commands_run_after_one_that_fails() {
        let skip = ["slow_".into()];
        let tests = ["/a".into(), "/b".into()];
        assert_eq!(
            script(Target::Amd64, Path::new("/release"), &tests, &skip, false)
                .matches(" || failed=1")
                .count(),
            2
        );
        let script = script(Target::Amd64, Path::new("/release"), &tests, &skip, true);
        assert!(script.contains("'/a' '--skip' 'slow_' ||"), "{script}");
        assert_eq!(script.matches(" || failed=1").count(), 5, "{script}");
        assert!(script.ends_with("exit $failed"));
    }

    #[test]
    fn another_architecture_runs_more_cases() {
        let other = [Target::Amd64, Target::Arm64].into_iter().find(|arch| !arch.is_host()).unwrap();
        let script = script(other, Path::new("/release"), &[], &[], true);
        assert!(script.contains("xdp-generic,affinity-clientip,"), "{script}");
    }

    #[test]
    fn a_path_stays_one_word() {
        assert_eq!(quote(&["/a b/it's".into(), "c".into()]), r"'/a b/it'\''s' 'c'");
    }

    #[test]
    fn every_case_exists() -> Result<()> {
        for case in CASES.iter().chain(&CASES_OF_ARCHITECTURES) {
            ensure!(is_case(case), "there is no {case}.yaml");
        }
        Ok(())
    }
}
