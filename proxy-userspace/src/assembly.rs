//! Converts the configuration into the settings of each dataplane.
#![forbid(unsafe_code)]

use proxy_common::layout::NodeValue;

use crate::{
    config::Config,
    dataplane::{
        ebpf::{EbpfSettings, LinkAttachment, Marks},
        iptables::IptablesSettings,
        ipvs::IpvsSettings,
        nftables::NftablesSettings,
    },
    kernel::command::Launcher,
};

/// Returns the settings of the ebpf mode.
pub fn ebpf(config: &Config, launcher: &Launcher) -> EbpfSettings {
    let ebpf = &config.ebpf;
    EbpfSettings {
        cgroup_root: ebpf.cgroup_root.clone(),
        pin_dir: ebpf.pin_dir.clone(),
        map_sizes: ebpf.map_sizes,
        table_size: ebpf.maglev_table_size,
        link_attachment: LinkAttachment::Probe,
        marks: marks(ebpf.masquerade_mark),
        netfilter_masquerades: config.model.masquerade_ports.is_none()
            || config.model.masquerades_with_direct_path,
        netfilter: Some(launcher.clone()),
        log: ebpf.log,
        tunnel_port: config.model.dsr_port,
    }
}

/// Returns the mark bits of the ebpf mode and its backstop.
pub fn own_marks(config: &Config) -> u32 {
    let Marks { masquerade, reject } = marks(config.ebpf.masquerade_mark);
    masquerade | reject
}

/// Returns upstream's mark bits, 14 and 15. If bit 15 means masquerade, bit 14 means reject.
fn marks(masquerade: u32) -> Marks {
    let reject = match masquerade {
        NodeValue::REJECT_MARK => NodeValue::MASQUERADE_MARK,
        _ => NodeValue::REJECT_MARK,
    };
    Marks { masquerade, reject }
}

/// Returns the settings of the nftables mode.
pub fn nftables(config: &Config) -> NftablesSettings {
    NftablesSettings { masquerade: config.masquerade_mark }
}

/// Returns the settings of the iptables mode.
pub fn iptables(config: &Config, launcher: &Launcher) -> IptablesSettings {
    IptablesSettings {
        masquerade_mark: config.masquerade_mark,
        localhost_node_ports: config.localhost_node_ports,
        launcher: launcher.clone(),
    }
}

/// Returns the settings of the ipvs mode.
pub fn ipvs(config: &Config, launcher: &Launcher) -> IpvsSettings {
    IpvsSettings {
        scheduler: config.ipvs.scheduler.clone(),
        exclude_cidrs: config.ipvs.exclude_cidrs.clone(),
        strict_arp: config.ipvs.strict_arp,
        timeouts: config.ipvs.timeouts,
        masquerade_mark: config.masquerade_mark,
        counted_services: config.counted_services,
        launcher: launcher.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reject_mark_differs_from_masquerade_mark() {
        assert_eq!([14, 15, 9].map(|bit| marks(1 << bit).reject), [1 << 15, 1 << 14, 1 << 15]);
    }
}
