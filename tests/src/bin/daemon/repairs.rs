//! A scenario of drift: shunt repairs what others changed in the kernel at the next syncPeriod.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use shunt_tests::{deadline::Deadline, world::Host};

use super::test_node::{Setup, TestNode};

const TIMEOUT: Duration = Duration::from_mins(1);
const OFTEN: &str = "{iptables: {syncPeriod: 2s}, nftables: {syncPeriod: 2s}, ipvs: {syncPeriod: 2s}}";

pub(crate) fn drift_is_repaired(setup: &Setup) -> Result<()> {
    let mut node = TestNode::started(setup, &setup.mode, OFTEN)?;
    for damage in damages(&setup.mode, &node)? {
        let before = repairs(&mut node)?;
        node.world.run(Host::Node1, &damage).with_context(|| damage.clone())?;
        Deadline::after(TIMEOUT)
            .try_poll(|| anyhow::Ok((repairs(&mut node)? > before).then_some(())))?
            .with_context(|| format!("nothing is repaired after {damage}"))?;
        node.wait_until_served(&[Host::A1, Host::A2], TIMEOUT).with_context(|| format!("after {damage}"))?;
    }
    node.end()
}

fn repairs(node: &mut TestNode) -> Result<u64> {
    let page = node.page("/metrics")?.body;
    let value = page.lines().find_map(|line| line.strip_prefix("shunt_sync_drift_operations_total "));
    value.context("no count of repairs")?.parse().context("a count")
}

fn damages(mode: &str, node: &TestNode) -> Result<Vec<String>> {
    let pins = node.world.pin_directory();
    let pins = pins.display();
    let lines: Vec<String> = match mode {
        "ebpf" => vec![
            // 10.96.0.80, port 80, TCP.
            format!(
                "bpftool map delete pinned {pins}/services key hex 00 00 00 00 00 00 00 00 00 00 ff ff 0a 60 00 50 50 00 06 00"
            ),
            format!("rm {pins}/links/shunt_connect4"),
            format!("rm {pins}/services"),
        ],
        "nftables" => vec![
            // A map element of a Service with two endpoints.
            "nft delete element ip kube-proxy service-ips-2 { 10.96.0.80 . tcp . 80 }".into(),
            "nft flush chain ip kube-proxy services".into(),
            "nft delete table ip kube-proxy".into(),
        ],
        "iptables" => vec![
            // If only a rule is missing, shunt sees it at the next full sync, as upstream does.
            "iptables -t nat -D PREROUTING 1; iptables -t nat -D OUTPUT 1".into(),
            "iptables -t nat -F".into(),
        ],
        other => bail!("no damage is known for the mode {other}"),
    };
    Ok(lines)
}
