//! A scenario with an API server that is down, slow, restored from a backup, sends wrong versions,
//! or refuses credentials. Services keep working, and everything is correct afterwards.

use std::{thread, time::Duration};

use anyhow::{Context as _, Result};
use shunt_tests::{
    apiserver::{Fault, Interruption, WrongVersion},
    world::Host,
};

use super::test_node::{Setup, TestNode};

/// Longer than the longest pause between two attempts, which follows a minute of refusals.
const TIMEOUT: Duration = Duration::from_secs(70);
/// The time limit for what is served all the time. The machine may have much other load.
const SERVED_WITHIN: Duration = Duration::from_mins(1);
const DOWN_FOR: Duration = Duration::from_secs(3);
const REFUSED_FOR: Duration = Duration::from_mins(1);
const ALWAYS: usize = usize::MAX;

pub(crate) fn traffic_continues_whatever_the_api_server_does(setup: &Setup) -> Result<()> {
    let mut node = TestNode::started(setup, &setup.mode, "{}")?;
    node.under_load(|node| {
        down(node).context("down")?;
        restored_from_a_backup(node).context("restarted with older data")?;
        slow(node).context("slow")?;
        wrong_versions(node).context("wrong versions")?;
        refusing(node).context("refusing credentials")
    })?;
    node.end()
}

fn down(node: &mut TestNode) -> Result<()> {
    node.cluster.down();
    node.set_endpoints(&[Host::A2, Host::A3])?;
    thread::sleep(DOWN_FOR);
    node.wait_until_served(&[Host::A1, Host::A2], SERVED_WITHIN).context("while the server is down")?;
    node.cluster.up(&node.world)?;
    node.wait_until_served(&[Host::A2, Host::A3], TIMEOUT)
}

fn restored_from_a_backup(node: &mut TestNode) -> Result<()> {
    let backup = node.cluster.server().backup();
    node.set_endpoints(&[Host::A1, Host::A3])?;
    node.wait_until_served(&[Host::A1, Host::A3], TIMEOUT)?;
    node.cluster.down();
    node.cluster.server().restore_backup(backup);
    node.cluster.up(&node.world)?;
    // Nothing changes on the server any more. Only its bookmark shows the old version, once a
    // minute.
    node.wait_until_served(&[Host::A2, Host::A3], TIMEOUT + Duration::from_mins(1))
}

fn slow(node: &mut TestNode) -> Result<()> {
    node.cluster.server().inject_fault(None, None, Fault::Slow, ALWAYS);
    node.cluster.server().interrupt(Interruption::End);
    node.set_endpoints(&[Host::A1, Host::A2])?;
    node.wait_until_served(&[Host::A1, Host::A2], TIMEOUT)?;
    node.cluster.server().clear_faults();
    Ok(())
}

fn wrong_versions(node: &mut TestNode) -> Result<()> {
    let served = [[Host::A2, Host::A3], [Host::A1, Host::A3], [Host::A1, Host::A2], [Host::A2, Host::A3]];
    for (lie, pods) in
        [WrongVersion::Low, WrongVersion::High, WrongVersion::NotANumber, WrongVersion::Missing]
            .into_iter()
            .zip(served)
    {
        node.cluster.server().inject_fault(None, None, Fault::WrongVersions(lie), ALWAYS);
        node.cluster.server().interrupt(Interruption::End);
        node.set_endpoints(&pods)?;
        // A watch of the phase before may have brought the change with a version that is far ahead.
        // Only a bookmark shows that, once a minute.
        let limit = TIMEOUT + Duration::from_mins(1);
        node.wait_until_served(&pods, limit).with_context(|| format!("{lie:?}"))?;
        node.cluster.server().clear_faults();
    }
    Ok(())
}

fn refusing(node: &mut TestNode) -> Result<()> {
    node.cluster.server().inject_fault(None, None, Fault::Unauthorized, ALWAYS);
    node.cluster.server().interrupt(Interruption::End);
    // Until then, the previous watch may still bring the change.
    let refused = "Unauthorized; the last known objects stay; shunt tries again resource=\"endpointslices\"";
    node.wait_for_log(refused, TIMEOUT)?;
    node.set_endpoints(&[Host::A1, Host::A3])?;
    thread::sleep(REFUSED_FOR);
    node.wait_until_served(&[Host::A2, Host::A3], SERVED_WITHIN).context("while it refuses")?;
    node.cluster.server().clear_faults();
    node.wait_until_served(&[Host::A1, Host::A3], TIMEOUT)
}
