//! A changed configuration file, with traffic going on.

use std::path::Path;

use anyhow::{Result, ensure};
use shunt_tests::{
    agent::protocol::{Dial, Protocol, Send, Try},
    small_cluster::CLUSTER_IP,
    world::Host,
};

use crate::scene::Scene;

const HELD: &str = "held";
/// The node's second address.
const OTHER_NODE_PORT: &str = "192.168.57.111:30080";

fn start(shunt: &Path, mode: &str, fields: &str) -> Result<Scene> {
    let mut scene = Scene::build(shunt)?;
    scene.configure(mode, fields)?;
    scene.spawn(None, &[])?;
    scene.healthy()?;
    scene.serves()?;
    let dial = Dial { hold: Some(HELD.into()), ..Dial::new(CLUSTER_IP.parse()?, Protocol::Tcp, 1) };
    let tries = scene.world.agent(Host::A3)?.dial(dial)?;
    ensure!(matches!(tries[..], [Try::Answered(_)]), "the first connection fails: {tries:?}");
    Ok(scene)
}

fn is_held(scene: &mut Scene) -> Result<()> {
    let timeout = std::time::Duration::from_secs(2);
    let answer = scene.world.agent(Host::A3)?.send(Send { id: HELD.into(), size: 1, answer: 0, timeout })?;
    ensure!(matches!(answer, Try::Answered(_)), "an established connection has ended: {answer:?}");
    Ok(())
}

fn starts(scene: &Scene) -> Result<usize> {
    Ok(scene.said()?.matches("starting version").count())
}

/// Log level, node port addresses and growing maps, in one process.
pub(crate) fn what_can_be_taken_on_in_place_is(shunt: &Path) -> Result<()> {
    let mut scene = start(shunt, "ebpf", "{}")?;
    ensure!(scene.reaches(Host::Client, OTHER_NODE_PORT)?, "node ports are not on all addresses at first");
    ensure!(!scene.said()?.contains("DEBUG"), "logs are at debug from the start");
    let narrow = "{logging: {verbosity: 5}, nodePortAddresses: [192.168.57.11/32]}";
    scene.configure("ebpf", narrow)?;
    scene.says("taken on settings=\"logging.verbosity, nodePortAddresses\"")?;
    scene.until("narrowed", |scene| Ok(!scene.reaches(Host::Client, OTHER_NODE_PORT)?))?;
    scene.says("DEBUG")?;
    scene.serves()?;
    let wide = "{logging: {verbosity: 5}, shunt: {ebpf: {mapSizes: {services: 200000}}}}";
    scene.configure("ebpf", wide)?;
    scene.until("widened", |scene| scene.reaches(Host::Client, OTHER_NODE_PORT))?;
    scene.says("shunt.ebpf.mapSizes.services")?;
    let pinned = scene.world.pin_directory().join("services");
    scene.until("grown", |scene| {
        let shown = scene.world.run(Host::Node1, &format!("bpftool map show pinned {}", pinned.display()));
        Ok(shown?.contains("max_entries 200000"))
    })?;
    scene.healthy()?;
    scene.serves()?;
    is_held(&mut scene)?;
    ensure!(starts(&scene)? == 1, "it was started anew; it said:\n{}", scene.said()?);
    scene.stop()
}

/// Another mode: the process starts anew under its number. Before that, files that cannot be used.
pub(crate) fn what_cannot_starts_the_program_anew_and_bad_files_change_nothing(shunt: &Path) -> Result<()> {
    let mut scene = start(shunt, "nftables", "{}")?;
    let id = scene.process_id();
    scene.place("apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: nftable\noomScoreAdj: 5000\n")?;
    scene.says("the settings stay as they are")?;
    let said = scene.said()?;
    ensure!(said.contains("nftable") && said.contains("oomScoreAdj: 5000"), "not all is said:\n{said}");
    scene.serves()?;
    ensure!(starts(&scene)? == 1, "a bad file starts it anew");
    scene.configure("nftables", "{clusterCIDR: '10.0.0.0/8,fd44::/16'}")?;
    scene.says("starting anew")?;
    scene.until("started anew", |scene| Ok(starts(scene)? == 2))?;
    scene.healthy()?;
    scene.serves()?;
    is_held(&mut scene)?;
    scene.configure("iptables", "{}")?;
    scene.until("in the other mode", |scene| Ok(scene.mode()? == "iptables"))?;
    scene.healthy()?;
    scene.serves()?;
    is_held(&mut scene)?;
    ensure!(scene.process_id() == id, "another process");
    scene.stop()
}
