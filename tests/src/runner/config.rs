//! Composes the `KubeProxyConfiguration` v1alpha1 of a case: the base, overridden by the case's
//! fields.

use anyhow::{Context as _, Result, bail};
use serde_yaml_ng::{Mapping, Value};

/// The base configuration of every case. The conntrack section leaves the machine's sysctls
/// unchanged.
const BASE: &str = "
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
hostnameOverride: node1
clusterCIDR: 10.244.0.0/16,fd44::/16
healthzBindAddress: 0.0.0.0:10256
metricsBindAddress: 127.0.0.1:10249
iptables: {minSyncPeriod: 0s, syncPeriod: 30s}
nftables: {minSyncPeriod: 0s, syncPeriod: 30s}
ipvs: {minSyncPeriod: 0s, syncPeriod: 30s}
conntrack:
  maxPerCore: 0
  min: 0
  tcpEstablishedTimeout: 0s
  tcpCloseWaitTimeout: 0s
  udpTimeout: 0s
  udpStreamTimeout: 0s
";

/// Returns the text of the configuration file for these fields, in a mode.
pub fn compose(overlay: &Mapping, mode: &str) -> Result<String> {
    let mut config: Mapping = serde_yaml_ng::from_str(BASE).context("the base configuration")?;
    let mut overlay = overlay.clone();
    if let Some(linux) = overlay.remove("linux") {
        merge(&mut config, move_linux_fields(&linux, mode)?);
    }
    merge(&mut config, overlay);
    serde_yaml_ng::to_string(&config).context("write the configuration")
}

/// Moves the fields of the `linux` section, which belongs to a newer version, to the modes'
/// sections of v1alpha1. Modes without their own section read that of iptables.
fn move_linux_fields(linux: &Value, mode: &str) -> Result<Mapping> {
    let mut placed = Mapping::new();
    for (field, value) in linux.as_mapping().context("config.linux: must be a mapping")? {
        if field.as_str() != Some("masqueradeAll") {
            bail!("config.linux: v1alpha1 has no place for {field:?}; only masqueradeAll is known");
        }
        for section in ["iptables", "nftables"].iter().take(if mode == "nftables" { 2 } else { 1 }) {
            let fields = Mapping::from_iter([(field.clone(), value.clone())]);
            placed.insert((*section).into(), fields.into());
        }
    }
    Ok(placed)
}

/// Merges mappings field by field. Other values are replaced.
fn merge(base: &mut Mapping, overlay: Mapping) {
    for (field, value) in overlay {
        match (base.get_mut(&field), value) {
            (Some(Value::Mapping(below)), Value::Mapping(above)) => merge(below, above),
            (_, value) => drop(base.insert(field, value)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn composed(overlay: &str, mode: &str) -> Mapping {
        let overlay = serde_yaml_ng::from_str(overlay).unwrap();
        serde_yaml_ng::from_str(&compose(&overlay, mode).unwrap()).unwrap()
    }

    #[test]
    fn a_case_overrides_single_fields_and_keeps_the_others() {
        let config = composed("{nodePortAddresses: [10.0.0.0/8], iptables: {syncPeriod: 1s}}", "ebpf");
        assert_eq!(config["nodePortAddresses"][0], "10.0.0.0/8");
        assert_eq!(config["iptables"]["syncPeriod"], "1s");
        assert_eq!(config["iptables"]["minSyncPeriod"], "0s");
        assert_eq!(config["hostnameOverride"], "node1");
    }

    #[test]
    fn masquerade_all_is_written_to_the_sections_of_v1alpha1() {
        let everywhere = composed("linux: {masqueradeAll: true}", "nftables");
        assert_eq!(everywhere["nftables"]["masqueradeAll"], true);
        assert_eq!(everywhere["iptables"]["masqueradeAll"], true);
        let ebpf = composed("linux: {masqueradeAll: true}", "ebpf");
        assert_eq!(ebpf["iptables"]["masqueradeAll"], true);
        assert!(ebpf["nftables"].get("masqueradeAll").is_none());
        assert!(ebpf.get("linux").is_none());
    }

    #[test]
    fn an_unknown_linux_field_is_an_error_that_names_it() {
        let overlay = serde_yaml_ng::from_str("linux: {oomScoreAdj: 1}").unwrap();
        let error = compose(&overlay, "ebpf").unwrap_err().to_string();
        assert!(error.contains("oomScoreAdj"), "{error}");
    }
}
