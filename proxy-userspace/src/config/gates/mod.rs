//! Feature gates: which ones kube-proxy knows, and the state of those that change something here.

mod known;

use std::collections::BTreeMap;

use super::{settings::Settings, value::Value};
use crate::mode::Mode;

const PATH: &str = "featureGates";

/// A feature gate that changes something in shunt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FeatureGate {
    /// Turns all alpha gates on or off that are not given.
    AllAlpha,
    /// Turns all beta gates on or off that are not given.
    AllBeta,
    /// Serves the external IPs of Services (KEP-5707).
    AllowServiceExternalIps,
    /// `/flagz` (KEP-4828).
    ComponentFlagz,
    /// `/statusz` (KEP-4827).
    ComponentStatusz,
    /// Allows the mode ipvs.
    KubeProxyIpvs,
    /// Allows `logging.options`.
    LoggingAlphaOptions,
    /// Gives histograms native buckets (KEP-5808).
    NativeHistograms,
}

/// The maturity of a gate in Kubernetes 1.36, or in 1.37 for those that are new there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Alpha,
    Beta,
    Deprecated,
}

impl FeatureGate {
    /// All gates, in the order of their names.
    pub const ALL: [Self; 8] = [
        Self::AllAlpha,
        Self::AllBeta,
        Self::AllowServiceExternalIps,
        Self::ComponentFlagz,
        Self::ComponentStatusz,
        Self::KubeProxyIpvs,
        Self::LoggingAlphaOptions,
        Self::NativeHistograms,
    ];

    /// Returns the name, as configurations have it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::AllAlpha => "AllAlpha",
            Self::AllBeta => "AllBeta",
            Self::AllowServiceExternalIps => "AllowServiceExternalIPs",
            Self::ComponentFlagz => "ComponentFlagz",
            Self::ComponentStatusz => "ComponentStatusz",
            Self::KubeProxyIpvs => "KubeProxyIPVS",
            Self::LoggingAlphaOptions => "LoggingAlphaOptions",
            Self::NativeHistograms => "NativeHistograms",
        }
    }

    /// Returns the maturity as upstream's metric has it.
    pub const fn stage(self) -> &'static str {
        match self.maturity() {
            Stage::Alpha => "ALPHA",
            Stage::Beta => "BETA",
            Stage::Deprecated => "DEPRECATED",
        }
    }

    const fn maturity(self) -> Stage {
        match self {
            Self::AllAlpha | Self::LoggingAlphaOptions | Self::NativeHistograms => Stage::Alpha,
            Self::AllBeta | Self::ComponentFlagz | Self::ComponentStatusz => Stage::Beta,
            Self::AllowServiceExternalIps | Self::KubeProxyIpvs => Stage::Deprecated,
        }
    }

    /// Returns what the gate does, for the documents.
    #[cfg(test)]
    pub(super) const fn description(self) -> &'static str {
        match self {
            Self::AllAlpha => "Turns all alpha gates of this table on or off that are not given",
            Self::AllBeta => "Turns all beta gates of this table on or off that are not given",
            Self::AllowServiceExternalIps => {
                "`false`: `externalIPs` of Services are not served (CVE-2020-8554, KEP-5707)"
            }
            Self::ComponentFlagz => "Beta. The metrics server has `/flagz` (KEP-4828)",
            Self::ComponentStatusz => "Beta. The metrics server has `/statusz` (KEP-4827)",
            Self::KubeProxyIpvs => "`false`: the mode ipvs is refused, as with kube-proxy 1.37",
            Self::NativeHistograms => {
                "Alpha. Histograms have [native buckets](metrics.md#native-histograms) for scrapers that ask for protobuf (KEP-5808)"
            }
            Self::LoggingAlphaOptions => "Alpha. Allows `logging.options`, which have no effect",
        }
    }

    /// Returns the state of a gate that is not given.
    pub(super) const fn default(self) -> bool {
        !matches!(self.maturity(), Stage::Alpha) && !matches!(self, Self::AllBeta)
    }
}

/// The gates that were given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FeatureGates(BTreeMap<String, bool>);

impl FeatureGates {
    pub(super) fn of(settings: &Settings) -> Self {
        let Some(Value::Gates(given)) = settings.given(PATH) else { return Self::default() };
        Self(given.clone())
    }

    /// Returns true if a gate is on. As upstream, `AllAlpha` and `AllBeta` apply to gates that are
    /// not given.
    pub fn is_on(&self, gate: FeatureGate) -> bool {
        let given = |gate: FeatureGate| self.0.get(gate.name()).copied();
        let by_stage = match gate.maturity() {
            Stage::Alpha => given(FeatureGate::AllAlpha),
            Stage::Beta => given(FeatureGate::AllBeta),
            Stage::Deprecated => None,
        };
        given(gate).or(by_stage).unwrap_or(gate.default())
    }
}

/// Returns the names of all gates that kube-proxy knows.
pub(super) fn known() -> impl Iterator<Item = &'static str> {
    known::NAMES.split_whitespace()
}

/// Returns the names of the gates that change something here.
pub(super) fn used() -> [&'static str; FeatureGate::ALL.len()] {
    FeatureGate::ALL.map(FeatureGate::name)
}

/// Rejects unknown gates and what a gate forbids. Names the gates that change nothing here.
pub(super) fn check(settings: &mut Settings, gates: &FeatureGates, mode: Mode) {
    let (known_gates, unknown): (Vec<_>, Vec<_>) =
        gates.0.keys().partition(|name| known().any(|known| known == **name));
    for name in unknown {
        settings.reject(PATH, unknown_gate(name));
    }
    let unused: Vec<_> = known_gates.into_iter().filter(|name| !used().contains(&name.as_str())).collect();
    if !unused.is_empty() {
        let names = unused.into_iter().map(String::as_str).collect::<Vec<_>>().join(", ");
        settings.add_ineffective_part(PATH, format!("these gates change nothing in shunt: {names}"));
    }
    if mode == Mode::Ipvs && !gates.is_on(FeatureGate::KubeProxyIpvs) {
        settings.reject("mode", "must not be ipvs when the feature gate KubeProxyIPVS is false");
    }
}

fn unknown_gate(name: &str) -> String {
    let meant = known().find(|known| known.eq_ignore_ascii_case(name));
    let meant = meant.map(|meant| format!(" (did you mean {meant}?)")).unwrap_or_default();
    format!(
        "must be feature gates of Kubernetes 1.36 or 1.37, and {name} is none{meant}. shunt uses {}; docs/flags.md \
         lists the others, which change nothing here",
        used().join(", ")
    )
}
