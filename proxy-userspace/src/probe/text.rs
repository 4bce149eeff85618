//! Writes the evaluation as text: a line for each feature, and each mode with what it lacks.

use std::fmt::Write as _;

use super::{Evaluation, ModeSupport};
use crate::{
    kernel::probe::{Fact, Facts, Feature},
    mode::Mode,
};

/// Returns the display name of a feature.
pub(super) const fn name(feature: Feature) -> &'static str {
    match feature {
        Feature::NetAdmin => "CAP_NET_ADMIN",
        Feature::Capabilities => "capabilities for eBPF",
        Feature::SocketPrograms => "programs on sockets",
        Feature::LinkPrograms => "programs on links",
        Feature::Maps => "BPF maps",
        Feature::Bpffs => "bpf filesystem",
        Feature::Cgroup2 => "cgroup v2",
        Feature::Btf => "kernel BTF",
        Feature::Tcx => "TCX",
        Feature::Clsact => "clsact",
        Feature::SetRetval => "bpf_set_retval",
        Feature::NetnsCookie => "SO_NETNS_COOKIE",
        Feature::SocketDestroy => "INET_DIAG_DESTROY",
        Feature::Nftables => "nftables",
        Feature::NftablesMaps => "nftables maps",
        Feature::Iptables => "iptables",
        Feature::Ipset => "ipset",
        Feature::Ipvs => "IPVS",
        Feature::DummyLinks => "dummy links",
    }
}

/// Returns the whole report.
pub fn table(facts: &Facts, evaluation: &Evaluation) -> String {
    let mut text = format!("kernel {}\n\n", facts.kernel);
    for (feature, fact) in &facts.features {
        let mark = match fact {
            Fact::Present(_) => "yes",
            Fact::Missing(_) | Fact::Denied(_) => "no",
            Fact::Unknown(_) => "?",
        };
        line(&mut text, &[name(*feature), mark, fact.detail()]);
    }
    text.push('\n');
    for mode in &evaluation.modes {
        line(&mut text, &[mode.mode.name(), "", state(mode)]);
        for lack in &mode.missing {
            _ = writeln!(text, "    needs   {lack}");
        }
        for lack in &mode.limits {
            _ = writeln!(text, "    limit   {lack}");
        }
    }
    _ = writeln!(text, "\nauto: {}, because {}", evaluation.auto.map_or("none", Mode::name), evaluation.why);
    text
}

fn state(mode: &ModeSupport) -> &'static str {
    match (mode.missing.is_empty(), mode.limits.is_empty()) {
        (true, true) => "works",
        (true, false) => "works, with limits",
        (false, _) => "does not work here",
    }
}

fn line(text: &mut String, [name, mark, detail]: &[&str; 3]) {
    let written = format!("{name:<22}{mark:<5}{}", detail.replace('\n', " "));
    text.push_str(written.trim_end());
    text.push('\n');
}
