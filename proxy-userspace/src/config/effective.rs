//! The settings in effect as a `KubeProxyConfiguration`: for `--write-config-to`, `/configz`, and
//! to find the settings that a new file changes.

use std::net::SocketAddr;

use serde_json::{Value as Json, json};

use super::{
    schema::{self, FLAGS_FOR_ALL_BUT_IPVS},
    settings::Settings,
    value::Value,
};
use crate::mode::Mode;

/// Every setting with its value, in the order of the schema; shunt's own settings only if given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EffectiveSettings(Vec<(&'static str, Json)>);

impl EffectiveSettings {
    pub(super) fn of(
        settings: &Settings,
        mode: Mode,
        healthz: Option<SocketAddr>,
        metrics: Option<SocketAddr>,
    ) -> Self {
        let value = |field: &schema::Field| {
            let path = overriding_flag(settings, field.path);
            let (given, value) = (settings.given(path), settings.given_or_default(path));
            let json = match field.path {
                // Its default in the ebpf mode differs from the default that the file would get.
                "iptables.minSyncPeriod" if given.is_none() && mode == Mode::Ebpf => return None,
                "apiVersion" => json!("kubeproxy.config.k8s.io/v1alpha1"),
                "kind" => json!("KubeProxyConfiguration"),
                "healthzBindAddress" => address(healthz),
                "metricsBindAddress" => address(metrics),
                path if path.starts_with("shunt.") => given?.to_json(),
                _ => value.map_or_else(|| field.kind.unset(), Value::to_json),
            };
            Some((field.path, json))
        };
        Self(schema::fields().filter_map(value).collect())
    }

    /// Returns one object with sorted keys, as upstream writes it. It means the same when it is
    /// read.
    pub fn document(&self) -> Json {
        let mut document = json!({});
        for (path, value) in &self.0 {
            // Indexing inserts a section that is missing.
            *path.split('.').fold(&mut document, |section, name| &mut section[name]) = value.clone();
        }
        document
    }

    /// Returns the paths whose values differ.
    pub(super) fn differing(&self, other: &Self) -> impl Iterator<Item = &'static str> {
        let paths = schema::fields().map(|field| field.path);
        paths.filter(|path| self.value(path) != other.value(path))
    }

    pub(super) fn value(&self, path: &str) -> Option<&Json> {
        self.0.iter().find(|(at, _)| *at == path).map(|(_, value)| value)
    }
}

/// Returns the path of the iptables flag that overrides this nftables field, or the path itself.
fn overriding_flag(settings: &Settings, path: &'static str) -> &'static str {
    let same =
        FLAGS_FOR_ALL_BUT_IPVS.into_iter().find(|flag| path.strip_prefix("nf") == flag.strip_prefix("ip"));
    same.filter(|flag| settings.is_by_flag(flag)).unwrap_or(path)
}

/// An empty address in the file means the default. As with upstream, a file cannot turn one off.
fn address(address: Option<SocketAddr>) -> Json {
    json!(address.map(|address| address.to_string()).unwrap_or_default())
}
