//! The configuration in effect, written as a `KubeProxyConfiguration`: for `--write-config-to`, and to tell what a changed file
//! changes.

use std::net::SocketAddr;

use serde_json::{Map, Value as Json, json};

use super::{Mode, resolve::FLAGS_FOR_ALL_BUT_IPVS, schema, settings::Settings};

/// Every setting with the value in effect, in the order of the schema; settings of ours only where they were given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Effective(Vec<(&'static str, Json)>);

impl Effective {
    pub(super) fn of(
        settings: &Settings,
        mode: Mode,
        healthz: Option<SocketAddr>,
        metrics: Option<SocketAddr>,
    ) -> Self {
        let value = |field: &schema::Field| {
            let path = flag_in_place_of(settings, field.path);
            let (given, value) = (settings.given(path), settings.given_or_default(path));
            let json = match field.path {
                // The ebpf mode has another default than the one that the file would get.
                "iptables.minSyncPeriod" if given.is_none() && mode == Mode::Ebpf => return None,
                "apiVersion" => json!("kubeproxy.config.k8s.io/v1alpha1"),
                "kind" => json!("KubeProxyConfiguration"),
                "healthzBindAddress" => json!(address(healthz)),
                "metricsBindAddress" => json!(address(metrics)),
                path if path.starts_with("shunt.") => given?.to_json(),
                _ => value.map_or_else(|| field.kind.unset(), super::value::Value::to_json),
            };
            Some((field.path, json))
        };
        Self(schema::fields().filter_map(value).collect())
    }

    /// As one object, keys sorted, as upstream writes it. A configuration that is read from it is the same.
    pub fn document(&self) -> Json {
        let mut document = Map::new();
        for (path, value) in &self.0 {
            insert(&mut document, path, value.clone());
        }
        Json::Object(document)
    }

    /// The paths whose values differ.
    pub(super) fn differing<'a>(&'a self, other: &'a Self) -> Vec<&'static str> {
        let value = |of: &'a Self, path| of.0.iter().find(|(p, _)| *p == path).map(|(_, value)| value);
        let paths = schema::fields().map(|field| field.path);
        paths.filter(|path| value(self, *path) != value(other, *path)).collect()
    }

    /// The number at a path, if it is one.
    pub(super) fn number(&self, path: &str) -> Option<i64> {
        self.0.iter().find(|(p, _)| *p == path)?.1.as_i64()
    }
}

/// Flags of the iptables mode that count in the nftables mode too, which reads its own section of a file.
fn flag_in_place_of(settings: &Settings, path: &'static str) -> &'static str {
    let same =
        FLAGS_FOR_ALL_BUT_IPVS.into_iter().find(|flag| path.strip_prefix("nf") == flag.strip_prefix("ip"));
    same.filter(|flag| path.starts_with("nf") && settings.is_by_flag(flag)).unwrap_or(path)
}

/// An address in the file may be empty only where it has its default, so one that is off cannot be written, as upstream.
fn address(address: Option<SocketAddr>) -> String {
    address.map(|address| address.to_string()).unwrap_or_default()
}

fn insert(section: &mut Map<String, Json>, path: &str, value: Json) {
    match path.split_once('.') {
        None => {
            section.insert(path.into(), value);
        }
        Some((name, rest)) => {
            let inner = section.entry(name).or_insert_with(|| json!({}));
            if let Json::Object(inner) = inner {
                insert(inner, rest, value);
            }
        }
    }
}
