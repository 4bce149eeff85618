//! The settings of the eBPF dataplane.

use std::{num::NonZeroU16, path::PathBuf};

use proxy_common::{
    layout::{MapSizes, service_slots},
    maglev::TableSize,
};

use super::{LinkAttachment, Marks, Rules};
use crate::kernel::{bpf::LogLevel, command::Launcher};

/// The settings of the eBPF dataplane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EbpfSettings {
    /// Sockets of processes in this cgroup and below are translated. It is the root of cgroup v2,
    /// except in tests.
    pub cgroup_root: PathBuf,
    /// The directory where maps and links are pinned.
    pub pin_dir: PathBuf,
    /// The numbers of entries of the maps.
    pub map_sizes: MapSizes,
    /// The smallest number of entries of a Maglev table.
    pub table_size: TableSize,
    /// How programs are attached to links.
    pub link_attachment: LinkAttachment,
    /// The marks that packets get for netfilter.
    pub marks: Marks,
    /// Netfilter masquerades packets, not the link programs, until a plan says otherwise.
    pub netfilter_masquerades: bool,
    /// Where to find the commands for netfilter rules. `None` leaves netfilter alone.
    pub netfilter: Option<Launcher>,
    /// Which trace events the programs write.
    pub log: LogLevel,
    /// The UDP port of the tunnel for direct server return. `None` without a tunnel.
    pub tunnel_port: Option<NonZeroU16>,
}

impl EbpfSettings {
    /// Returns the global variables of the programs that depend on settings.
    pub(super) fn constants(&self) -> [(&'static str, u32); 2] {
        let slots = service_slots(self.map_sizes.counted_services);
        let tunnel_port = self.tunnel_port.map_or(0, NonZeroU16::get);
        [("SERVICE_SLOTS", slots), ("TUNNEL_PORT", tunnel_port.into())]
    }

    /// Returns the rules, with those for the marks of an earlier process.
    pub(super) fn rules(&self, previous: Option<Marks>) -> Option<Rules> {
        let rules = Rules::new(self.marks, self.netfilter_masquerades, self.netfilter.clone()?);
        Some(match previous {
            Some(previous) => rules.with_previous_marks(previous),
            None => rules,
        })
    }
}
