//! `auto`: a mode that cannot run is passed over, and one that breaks is followed by the next.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use shunt_tests::world::Host;

use super::{
    bed::{Bed, Setting},
    bpffs::Covered,
};

/// The time that a mode may fail, and the time that the next one takes.
const GIVEN_UP_WITHIN: Duration = Duration::from_mins(1);
const OFTEN: &str = "{iptables: {syncPeriod: 1s}, nftables: {syncPeriod: 1s}}";

/// Pins cannot be made any more, so that programs that are gone from them cannot be put back; those on sockets still run.
pub(crate) fn a_mode_that_breaks_is_followed_by_the_next_with_traffic_kept(setting: &Setting) -> Result<()> {
    let mut bed = Bed::started(setting, "auto", OFTEN)?;
    bed.wait_for_metric("shunt_mode{mode=\"ebpf\"} 1", GIVEN_UP_WITHIN)?;
    let pins = bed.world.pin_directory();
    bed.under_load(|bed| {
        let _covered = Covered::new(&pins)?;
        bed.wait_for_metric("shunt_mode{mode=\"nftables\"} 1", GIVEN_UP_WITHIN)?;
        bed.wait_for_metric("shunt_modes_broken_total{mode=\"ebpf\"} 1", GIVEN_UP_WITHIN)?;
        // What the old programs know of must not decide any more.
        bed.serve(&[Host::A2, Host::A3])?;
        bed.wait_until_served(&[Host::A2, Host::A3], GIVEN_UP_WITHIN)?;
        ensure!(bed.page("/proxyMode")?.body == "nftables");
        bed.wait_for_log("another one takes over", Duration::ZERO)
    })?;
    bed.end()
}

/// The probe finds all that the eBPF mode needs; but pins are to be where no bpf filesystem is.
pub(crate) fn a_mode_that_cannot_start_is_passed_over(setting: &Setting) -> Result<()> {
    let mut bed = Bed::new(setting, "auto", "{}")?;
    let elsewhere = bed.world.directory().join("no-bpffs");
    bed.proxy.set_flag("--bpf-pin-dir", &elsewhere.display().to_string());
    bed.proxy.start(&mut bed.world)?;
    bed.wait_until_served(&[Host::A1, Host::A2], GIVEN_UP_WITHIN)?;
    bed.wait_for_metric("shunt_mode{mode=\"nftables\"} 1", GIVEN_UP_WITHIN)?;
    bed.wait_for_log("is not on a bpf filesystem", Duration::ZERO)?;
    bed.end()
}

/// A Service whose addresses do not fit into a map of [`FEW`] destinations.
fn too_large() -> String {
    let addresses: Vec<String> = (1..=FEW).map(|last| format!("198.51.100.{last}")).collect();
    format!(
        "{{apiVersion: v1, kind: Service, metadata: {{name: zz, namespace: default}}, \
         spec: {{clusterIP: 10.96.0.90, externalIPs: [{}], ports: [{{port: 80}}]}}}}",
        addresses.join(", ")
    )
}

/// The smallest size there is for the map of destinations.
const FEW: u32 = 16;

/// As long as a Service is left out, another mode's rules may be what serves it.
pub(crate) fn a_mode_that_leaves_a_service_out_leaves_others_their_rules(setting: &Setting) -> Result<()> {
    let mut bed =
        Bed::new(setting, "ebpf", &format!("{{shunt: {{ebpf: {{mapSizes: {{services: {FEW}}}}}}}}}"))?;
    bed.cluster.apply_all(&too_large())?;
    for line in ["add table ip kube-proxy", "add chain ip kube-proxy services"] {
        bed.world.run(Host::Node1, &format!("nft {line}"))?;
    }
    bed.proxy.spawn(&bed.world)?;
    bed.wait_for_log("mapSizes.services", GIVEN_UP_WITHIN)?;
    // Changes of what does fit are made meanwhile, and are no success of the whole.
    for pods in [[Host::A2, Host::A3], [Host::A1, Host::A3]] {
        bed.serve(&pods)?;
        bed.wait_until_served(&pods, GIVEN_UP_WITHIN)?;
        let there = "nft list chain ip kube-proxy services";
        bed.world.run(Host::Node1, there).context("the other mode's chain is gone")?;
    }
    bed.end()
}
