//! The scenario of the commands that the pages show for a node: each of them works there.

use std::{fs, os::unix::fs::symlink, path::Path, time::Duration};

use anyhow::{Context as _, Result, ensure};
use shunt_tests::{
    small_cluster::{NODE, SERVICES, Slices},
    world::Host,
};

use super::test_node::{Setup, TestNode};

const TIMEOUT: Duration = Duration::from_secs(30);
const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
/// Pages with commands for a node in the mode ebpf, and those for the mode nftables.
const EBPF: [&str; 11] = [
    "README.md",
    "docs/alerts.md",
    "docs/debugging.md",
    "docs/doctor.md",
    "docs/inspect.md",
    "docs/maglev.md",
    "docs/maps.md",
    "docs/metrics.md",
    "docs/migration.md",
    "docs/top.md",
    "docs/xdp.md",
];
const NFTABLES: [&str; 1] = ["docs/nftables.md"];
/// The first words of commands for a node. Other commands are for another machine.
const PROGRAMS: [&str; 9] = ["shunt", "curl", "bpftool", "nft", "iptables-save", "ls", "sysctl", "tar", "tc"];
/// The scenario `top` gives it a terminal, the object is on the machine that built it, Debian's
/// bpftool has no disassembler, and the table is of another mode.
const ELSEWHERE: [&str; 4] = [
    "shunt top",
    "bpftool btf dump file \"$object\"",
    "bpftool prog dump jited name shunt_connect4",
    "nft list table ip kube-proxy",
];
/// Parts of commands that run until somebody stops them.
const ENDLESS: [&str; 3] = ["shunt trace", "--watch", "nft monitor"];
/// What stands for something of the reader's node, and what it is here. Long measurements are
/// short.
const HERE: [(&str, &str); 6] = [
    ("/sys/fs/bpf/shunt/links/shunt_in_2", "$(ls -d $PINS/links/shunt_in* | head -n 1)"),
    ("/sys/fs/bpf/shunt", "$PINS"),
    ("192.0.2.11", "192.168.57.11"),
    ("--manifests DIR", "--manifests manifests"),
    ("--interval 10s", "--interval 1s"),
    ("seconds=10", "seconds=1"),
];
/// The objects that the pages name.
const OBJECTS: &str = "apiVersion: v1\nkind: Service\nmetadata: {name: web, namespace: shop}\n\
     spec: {clusterIP: 10.96.0.90, externalIPs: [198.51.100.7], ports: [{name: http, port: 80}]}\n---\n\
     apiVersion: v1\nkind: Service\nmetadata: {name: dns, namespace: kube-system}\n\
     spec: {clusterIP: 10.96.0.10, ports: [{name: dns, port: 53, protocol: UDP}]}\n---\n\
     apiVersion: v1\nkind: Pod\nmetadata: {name: web-0, namespace: shop}\n\
     spec: {nodeName: node1}\nstatus: {podIPs: [{ip: 10.244.1.13}]}\n";

pub(crate) fn commands_of_the_pages_work_on_a_node(setup: &Setup) -> Result<()> {
    run_all(setup, "ebpf", &EBPF, &ELSEWHERE)?;
    run_all(setup, "nftables", &NFTABLES, &[])
}

/// Runs the commands of pages on a node in a mode. The error has all that fail.
fn run_all(setup: &Setup, mode: &str, pages: &[&str], except: &[&str]) -> Result<()> {
    let mut node = TestNode::new(setup, mode, "{enableProfiling: true}")?;
    node.cluster.apply_all(OBJECTS)?;
    node.set_endpoints(&[Host::A1, Host::A2, Host::A3])?;
    node.proxy.start(&mut node.world)?;
    node.wait_until_served(&[Host::A1, Host::A2, Host::A3], TIMEOUT)?;
    let folder = prepare_folder(node.world.directory())?;
    let mut failures = Vec::new();
    for page in pages {
        let text = fs::read_to_string(Path::new(ROOT).join(page)).with_context(|| (*page).to_owned())?;
        let commands = commands(&text);
        ensure!(!commands.is_empty(), "{page} has no commands for a node");
        for command in commands.iter().filter(|command| !except.contains(&&***command)) {
            let line = line_of(command, setup, &folder);
            if let Err(error) = node.world.run(Host::Node1, &line) {
                failures.push(format!("{page}: {command}: {error:#}"));
            }
        }
    }
    ensure!(failures.is_empty(), "{}", failures.join("\n"));
    node.end()
}

/// Makes the folder in which commands run, with the files that they read.
fn prepare_folder(world: &Path) -> Result<String> {
    let folder = world.join("commands");
    let manifests = folder.join("manifests");
    fs::create_dir_all(&manifests)?;
    fs::write(manifests.join("node.yaml"), NODE)?;
    fs::write(manifests.join("services.yaml"), SERVICES)?;
    fs::write(manifests.join("slices.yaml"), Slices::for_all_services(&[Host::A1]).text())?;
    symlink(Path::new(ROOT).join("deploy"), folder.join("deploy"))?;
    Ok(folder.display().to_string())
}

/// Returns the shell's line for a command, which must not fail. Endless commands must still run
/// when they are stopped.
fn line_of(command: &str, setup: &Setup, folder: &str) -> String {
    let here = HERE.iter().fold(command.to_owned(), |line, (there, here)| line.replace(there, here));
    let programs = setup.shunt.parent().unwrap_or(Path::new("/")).display();
    let start = format!("cd {folder}; export PATH={programs}:$PATH");
    if ENDLESS.iter().any(|part| command.contains(part)) {
        format!("{start}; timeout 2 {here} || [ $? = 124 ]")
    } else {
        format!("{start}; {here}")
    }
}

/// Returns the commands for a node in the blocks of a page that are marked `sh`.
fn commands(page: &str) -> Vec<String> {
    let (mut is_command, mut found) = (false, Vec::new());
    for line in page.lines() {
        if line.starts_with("```") {
            is_command = line == "```sh";
            continue;
        }
        let command = line.split(" #").next().unwrap_or_default().trim();
        let program = command.split(' ').next().unwrap_or_default();
        if is_command && PROGRAMS.contains(&program) {
            found.push(command.to_owned());
        }
    }
    found
}
