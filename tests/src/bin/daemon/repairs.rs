//! What others change by hand in the kernel is put right at the next syncPeriod.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use shunt_tests::{deadline::Deadline, world::Host};

use super::test_node::{Setup, TestNode};

const TIMEOUT: Duration = Duration::from_secs(15);
const OFTEN: &str = "{iptables: {syncPeriod: 2s}, nftables: {syncPeriod: 2s}, ipvs: {syncPeriod: 2s}}";

pub(crate) fn what_others_change_by_hand_is_put_right(setup: &Setup) -> Result<()> {
    let mut node = TestNode::started(setup, &setup.mode, OFTEN)?;
    for damage in damages(&setup.mode, &node)? {
        let before = repaired(&mut node)?;
        node.world.run(Host::Node1, &damage).with_context(|| damage.clone())?;
        let look = || match repaired(&mut node) {
            Ok(now) => (now > before).then_some(Ok(())),
            Err(error) => Some(Err(error)),
        };
        Deadline::after(TIMEOUT)
            .poll(look)
            .with_context(|| format!("nothing is repaired after {damage}"))??;
        node.wait_until_served(&[Host::A1, Host::A2], TIMEOUT).with_context(|| format!("after {damage}"))?;
    }
    node.end()
}

fn repaired(node: &mut TestNode) -> Result<u64> {
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
            // Those of two endpoints.
            "nft delete element ip kube-proxy service-ips-2 { 10.96.0.80 . tcp . 80 }".into(),
            "nft flush chain ip kube-proxy services".into(),
            "nft delete table ip kube-proxy".into(),
        ],
        "iptables" => vec![
            // A rule that is gone from a chain that is still there shows at the next whole reading only, as upstream.
            "iptables -t nat -D PREROUTING 1; iptables -t nat -D OUTPUT 1".into(),
            "iptables -t nat -F".into(),
        ],
        other => bail!("no damage is known for the mode {other}"),
    };
    Ok(lines)
}
