//! Scenarios of the mode `auto`: it skips a mode that cannot run, and replaces one that breaks.

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use shunt_tests::{deadline::Deadline, world::Host};

use super::{
    bpffs::{Covered, wait_for_health},
    test_node::{Setup, TestNode},
};

/// The time that a mode may fail, plus the time that the next one needs.
const GIVE_UP_TIMEOUT: Duration = Duration::from_mins(1);
const OFTEN: &str = "{iptables: {syncPeriod: 1s}, nftables: {syncPeriod: 1s}}";

/// shunt can no longer pin, so it cannot restore removed programs. The socket programs still run.
pub(crate) fn a_broken_mode_is_replaced_and_traffic_continues(setup: &Setup) -> Result<()> {
    let mut node = TestNode::started(setup, "auto", OFTEN)?;
    node.wait_for_metric("shunt_mode{mode=\"ebpf\"} 1", GIVE_UP_TIMEOUT)?;
    node.wait_for_metric("shunt_fell_back{reason=\"broken\"} 0", GIVE_UP_TIMEOUT)?;
    let pins = node.world.pin_directory();
    node.under_load(|node| {
        let _covered = Covered::new(&pins)?;
        node.wait_for_metric("shunt_mode{mode=\"nftables\"} 1", GIVE_UP_TIMEOUT)?;
        node.wait_for_metric("shunt_modes_broken_total{mode=\"ebpf\"} 1", GIVE_UP_TIMEOUT)?;
        node.wait_for_metric("shunt_fell_back{reason=\"broken\"} 1", GIVE_UP_TIMEOUT)?;
        // What is in the old programs' maps must no longer count.
        node.set_endpoints(&[Host::A2, Host::A3])?;
        node.wait_until_served(&[Host::A2, Host::A3], GIVE_UP_TIMEOUT)?;
        ensure!(node.page("/proxyMode")?.body == "nftables");
        node.wait_for_log("another mode replaces it", Duration::ZERO)
    })?;
    node.end()
}

/// The probe finds everything that the ebpf mode needs, but the root of the cgroups is not in a
/// cgroup v2 hierarchy.
pub(crate) fn a_mode_that_cannot_start_is_skipped(setup: &Setup) -> Result<()> {
    let mut node = TestNode::new(setup, "auto", "{}")?;
    let elsewhere = node.world.directory().display().to_string();
    node.proxy.set_flag("--cgroup-root", &elsewhere);
    node.proxy.start(&mut node.world)?;
    node.wait_until_served(&[Host::A1, Host::A2], GIVE_UP_TIMEOUT)?;
    node.wait_for_metric("shunt_mode{mode=\"nftables\"} 1", GIVE_UP_TIMEOUT)?;
    node.wait_for_log("is not a directory of a cgroup2 filesystem", Duration::ZERO)?;
    node.end()
}

/// Returns a Service whose addresses do not fit into a map of [`FEW`] destinations.
fn too_large() -> String {
    let addresses: Vec<String> = (1..=FEW).map(|last| format!("198.51.100.{last}")).collect();
    format!(
        "{{apiVersion: v1, kind: Service, metadata: {{name: zz, namespace: default}}, \
         spec: {{clusterIP: 10.96.0.90, externalIPs: [{}], ports: [{{port: 80}}]}}}}",
        addresses.join(", ")
    )
}

/// The minimum size of the map of destinations.
const FEW: u32 = 16;

/// While a Service is left out, the rules of another mode may serve it. The node stays healthy.
pub(crate) fn other_modes_rules_stay_while_a_service_is_left_out(setup: &Setup) -> Result<()> {
    let mut node =
        TestNode::new(setup, "ebpf", &format!("{{shunt: {{ebpf: {{mapSizes: {{services: {FEW}}}}}}}}}"))?;
    node.cluster.apply_all(&too_large())?;
    for line in ["add table ip kube-proxy", "add chain ip kube-proxy services"] {
        node.world.run(Host::Node1, &format!("nft {line}"))?;
    }
    node.proxy.spawn(&node.world)?;
    node.wait_for_log("mapSizes.services", GIVE_UP_TIMEOUT)?;
    node.wait_for_metric("shunt_service_ports_left_out{reason=\"map-full\"} 1", GIVE_UP_TIMEOUT)?;
    wait_for_health(&mut node, 200)?;
    // Changes of other Services are made meanwhile. They do not make the whole sync succeed.
    for pods in [[Host::A2, Host::A3], [Host::A1, Host::A3]] {
        node.set_endpoints(&pods)?;
        node.wait_until_served(&pods, GIVE_UP_TIMEOUT)?;
        let there = "nft list chain ip kube-proxy services";
        node.world.run(Host::Node1, there).context("the other mode's chain is gone")?;
    }
    let events = || {
        let events = node.cluster.server().events().into_iter();
        events.filter(|event| event["reason"] == "ServiceLeftOut").collect::<Vec<_>>()
    };
    Deadline::after(GIVE_UP_TIMEOUT).poll(|| (!events().is_empty()).then_some(())).context("no Event")?;
    let [event] = &events()[..] else { bail!("several Events: {:?}", events()) };
    let regarding = [&event["regarding"]["kind"], &event["regarding"]["name"], &event["action"]];
    ensure!(regarding == ["Service", "zz", "SyncProxyRules"], "{event}");
    node.end()
}
