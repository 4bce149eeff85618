//! Scenarios of a node that goes from kube-proxy to shunt and back.
//!
//! Another shunt, in a netfilter mode, stands in for kube-proxy, whose rules it writes. It finds
//! neither shunt's pins nor the command that would remove shunt's rules, which kube-proxy does not
//! know.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use serde_yaml_ng::Mapping;
use shunt_tests::{
    deadline::Deadline,
    kube_proxy::{SERVICE_CHAIN, nftables_rules},
    process::{ChildProcess, write_script},
    traffic::{ClientResult, Clients},
    world::Host,
};

use super::test_node::{Setup, TestNode};

const TIMEOUT: Duration = Duration::from_secs(30);
/// How often the node goes to shunt and back.
const ROUNDS: usize = 3;
const ENDPOINTS: [[Host; 2]; 3] = [[Host::A1, Host::A2], [Host::A2, Host::A3], [Host::A1, Host::A3]];
const REPLACED: &str = "another proxy wrote rules behind shunt's programs";
const WAITS_FOR_TABLE: &str = "waiting until another proxy takes the table kube-proxy over";

/// A node whose proxy is kube-proxy or shunt.
struct SharedNode {
    node: TestNode,
    shunt: PathBuf,
    /// The mode of kube-proxy.
    mode: &'static str,
    _folder: tempfile::TempDir,
}

impl SharedNode {
    fn new(setup: &Setup, mode: &'static str) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let (program, shunt) = (folder.path().join("proxy"), setup.shunt.display());
        let hide = "mount --bind /dev/null \"$(readlink -f \"$(command -v nft)\")\" && exec \"$@\"";
        let script = format!(
            "#!/bin/bash\ncase \" $* \" in\n  *' --mode ebpf '*) exec {shunt} \"$@\" ;;\n\
             esac\nexec unshare --mount bash -c '{hide}' hide {shunt} \"$@\"\n"
        );
        write_script(&program, &script)?;
        let node = TestNode::new(&Setup { shunt: program, mode: setup.mode.clone() }, mode, "{}")?;
        Ok(Self { node, shunt: setup.shunt.clone(), mode, _folder: folder })
    }

    fn start(&mut self, mode: &str, pins: &Path) -> Result<()> {
        let proxy = &mut self.node.proxy;
        proxy.set_mode(mode, &Mapping::new())?;
        proxy.set_flag("--bpf-pin-dir", &pins.display().to_string());
        proxy.start(&mut self.node.world)
    }

    fn start_kube_proxy(&mut self) -> Result<()> {
        self.start(self.mode, &self.node.world.pin_directory().with_file_name("none"))
    }

    fn start_shunt(&mut self) -> Result<()> {
        self.start("ebpf", &self.node.world.pin_directory())
    }

    /// Starts `shunt --cleanup-own`, with the flags of the shunt that started last.
    fn spawn_cleanup(&self) -> Result<ChildProcess> {
        let log = File::options().create(true).append(true).open(self.cleanup_log())?;
        let arguments = [self.node.proxy.arguments(), &["--cleanup-own".to_owned()]].concat();
        self.node.world.spawn(Host::Node1, &self.shunt, &arguments, &log)
    }

    fn cleanup_log(&self) -> PathBuf {
        self.node.world.directory().join("cleanup.log")
    }

    fn wait_for_cleanup_log(&self, text: &str) -> Result<()> {
        let read = || fs::read_to_string(self.cleanup_log()).unwrap_or_default();
        let found = Deadline::after(TIMEOUT).poll(|| read().contains(text).then_some(()));
        found.with_context(|| format!("{text:?} is not in the log of the cleanup:\n{}", read()))
    }

    /// Waits until shunt has removed kube-proxy's rules.
    fn wait_until_taken_over(&self) -> Result<()> {
        let list = "nft list tables; iptables-save -t nat";
        let is_gone = || {
            let listed = self.node.world.run(Host::Node1, list).ok()?;
            (!listed.contains("kube-proxy") && !listed.contains("KUBE-SERVICES")).then_some(())
        };
        Deadline::after(TIMEOUT).poll(is_gone).context("kube-proxy's rules are still there")
    }

    /// Gives the node to shunt, and back. The endpoints change after each step.
    fn go_to_shunt_and_back(&mut self, round: usize) -> Result<()> {
        self.node.proxy.stop()?;
        self.start_shunt()?;
        self.wait_until_taken_over()?;
        self.serve(&ENDPOINTS[round % ENDPOINTS.len()])?;
        let mut cleanup = self.spawn_cleanup()?;
        self.wait_for_cleanup_log("shunt still runs on this node")?;
        self.node.proxy.stop()?;
        self.start_kube_proxy()?;
        if self.mode == "nftables" {
            // The stand-in has shunt's chains, as a shunt in the nftables mode, which has not left.
            self.wait_for_cleanup_log(WAITS_FOR_TABLE)?;
        } else {
            let status = cleanup.wait(TIMEOUT)?.context("the cleanup does not end")?;
            ensure!(status.success(), "the cleanup fails");
        }
        drop(cleanup);
        let log = fs::read_to_string(self.cleanup_log())?;
        ensure!(!log.contains("WARN") && !log.contains("ERROR"), "the cleanup: {log}");
        println!("{}", log.lines().filter(|line| line.contains("handed")).collect::<Vec<_>>().join("\n"));
        fs::remove_file(self.cleanup_log())?;
        ensure!(!self.node.world.pin_directory().exists(), "there are pins");
        let left = self.node.world.run(Host::Node1, "nft list tables; bpftool net list")?;
        ensure!(!left.contains("shunt"), "shunt's rules or programs stay: {left}");
        self.serve(&ENDPOINTS[(round + 1) % ENDPOINTS.len()])
    }

    fn serve(&mut self, pods: &[Host]) -> Result<()> {
        self.node.set_endpoints(pods)?;
        self.node.wait_until_served(pods, TIMEOUT)
    }

    fn end(mut self) -> Result<()> {
        self.node.proxy.set_flag("--bpf-pin-dir", &self.node.world.pin_directory().display().to_string());
        self.node.proxy.set_mode("ebpf", &Mapping::new())?;
        self.node.end()
    }
}

/// Endpoints keep serving after they left, so a connection to a frozen endpoint is found by
/// [`SharedNode::serve`].
pub(crate) fn a_node_goes_to_shunt_and_back_without_a_failed_connection(setup: &Setup) -> Result<()> {
    for mode in ["nftables", "iptables"] {
        let mut shared = SharedNode::new(setup, mode)?;
        // The link programs translate the connections of a2.
        shared.node.world.move_out_of_cgroup(Host::A2)?;
        shared.start_kube_proxy()?;
        let mut clients = Clients::from_world(&mut shared.node.world)?;
        clients.tolerate_deleted_flows();
        clients.tolerate_mode_changes();
        let rounds = || (0..ROUNDS).try_for_each(|round| shared.go_to_shunt_and_back(round));
        let results = clients.connect_during(rounds);
        let results = results.with_context(|| shared.node.proxy.log_tail(30))?;
        println!("kube-proxy in the mode {mode}, {ROUNDS} times to shunt and back:");
        ensure!(ClientResult::report(&results), "connections failed:\n{}", shared.node.proxy.log_tail(30));
        clients.check_open_connections()?;
        shared.end()?;
    }
    Ok(())
}

/// Nothing serves the node but shunt's programs, or kube-proxy serves it beside them.
pub(crate) fn programs_stay_until_another_proxy_serves_and_the_next_start_reports_them(
    setup: &Setup,
) -> Result<()> {
    let mut shared = SharedNode::new(setup, "iptables")?;
    shared.start_shunt()?;
    shared.node.proxy.stop()?;
    let cleanup = shared.spawn_cleanup()?;
    shared.wait_for_cleanup_log("waiting until another proxy serves this node")?;
    drop(cleanup);
    shared.node.wait_until_served(&ENDPOINTS[0], TIMEOUT)?;
    shared.start_shunt()?;
    ensure!(!shared.node.proxy.log().contains(REPLACED), "nothing replaced it");
    shared.node.proxy.stop()?;
    shared.start_kube_proxy()?;
    shared.node.proxy.stop()?;
    shared.start_shunt()?;
    shared.node.wait_for_log(REPLACED, TIMEOUT)?;
    shared.wait_until_taken_over()?;
    shared.end()
}

/// In a mode without programs, the socket for commands says that shunt runs.
pub(crate) fn cleanup_fails_at_once_while_shunt_runs_in_the_nftables_mode(setup: &Setup) -> Result<()> {
    cleanup_fails_at_once(setup, "nftables", "runs in this network namespace")
}

/// In the nftables mode, kube-proxy takes the tables over. Its rules are written by nft.
pub(crate) fn cleanup_own_removes_what_kube_proxy_leaves_in_its_tables(setup: &Setup) -> Result<()> {
    let mut shared = SharedNode::new(setup, "nftables")?;
    shared.start_kube_proxy()?;
    shared.serve(&ENDPOINTS[0])?;
    let mut waiting = shared.spawn_cleanup()?;
    shared.wait_for_cleanup_log(WAITS_FOR_TABLE)?;
    shared.serve(&ENDPOINTS[1])?;
    shared.node.proxy.stop()?;
    let script = shared.node.world.directory().join("kube-proxy.nft");
    fs::write(&script, nftables_rules())?;
    shared.node.world.run(Host::Node1, &format!("nft -f {}", script.display()))?;
    for process in [&mut waiting, &mut shared.spawn_cleanup()?] {
        let status = process.wait(TIMEOUT)?.context("the cleanup does not end")?;
        ensure!(status.success(), "the cleanup: {}", fs::read_to_string(shared.cleanup_log())?);
    }
    shared.wait_for_cleanup_log("removed nftables chains, sets and maps that kube-proxy does not have")?;
    let left = shared.node.world.run(Host::Node1, "nft list ruleset")?;
    let is_kube_proxys = left.contains(SERVICE_CHAIN) && left.contains("vmap @service-ips");
    ensure!(is_kube_proxys && !left.contains("endpoints-4 {"), "kube-proxy's rules: {left}");
    ensure!(!left.contains("chain policy-local") && !left.contains("set service-ips-1"), "shunt's: {left}");
    shared.end()
}

/// A shunt that starts in the ebpf mode removes the table that the command waits for.
pub(crate) fn cleanup_own_waits_again_if_shunt_starts_in_the_ebpf_mode_meanwhile(
    setup: &Setup,
) -> Result<()> {
    let mut shared = SharedNode::new(setup, "iptables")?;
    shared.start("nftables", &shared.node.world.pin_directory())?;
    shared.serve(&ENDPOINTS[0])?;
    let mut cleanup = shared.spawn_cleanup()?;
    shared.wait_for_cleanup_log(WAITS_FOR_TABLE)?;
    shared.node.proxy.stop()?;
    shared.start_shunt()?;
    shared.wait_until_taken_over()?;
    shared.wait_for_cleanup_log("shunt still runs on this node")?;
    shared.serve(&ENDPOINTS[1])?;
    shared.node.proxy.stop()?;
    shared.start_kube_proxy()?;
    let status = cleanup.wait(TIMEOUT)?.context("the cleanup does not end")?;
    ensure!(status.success(), "the cleanup: {}", fs::read_to_string(shared.cleanup_log())?);
    ensure!(!shared.node.world.pin_directory().exists(), "there are pins");
    shared.serve(&ENDPOINTS[2])?;
    shared.end()
}

/// The programs of a running shunt are in use, so nothing of it is removed.
pub(crate) fn cleanup_fails_at_once_while_shunt_runs_in_the_ebpf_mode(setup: &Setup) -> Result<()> {
    cleanup_fails_at_once(setup, "ebpf", "uses ")
}

fn cleanup_fails_at_once(setup: &Setup, mode: &str, what_it_does: &str) -> Result<()> {
    let mut node = TestNode::started(setup, mode, "{}")?;
    let list = format!(
        "nft list tables; bpftool net list; ls -R {} 2>&1 || true",
        node.world.pin_directory().display()
    );
    let before = node.world.run(Host::Node1, &list)?;
    let process = node.proxy.process_id().context("it does not run")?;
    node.under_load(|node| {
        let started = Deadline::after(Duration::from_secs(15));
        ensure!(node.proxy.clean_up(&node.world).is_err(), "it succeeds");
        ensure!(!started.passed(), "it takes too long");
        let error = format!("nothing was removed: another shunt (process {process}) {what_it_does}");
        node.wait_for_log(&error, Duration::ZERO)
    })?;
    let after = node.world.run(Host::Node1, &list)?;
    ensure!(after == before, "it removed something:\n{before}\n{after}");
    node.end()
}
