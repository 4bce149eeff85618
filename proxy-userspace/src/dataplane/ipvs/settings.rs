//! The settings of the ipvs mode.

use std::{net::IpAddr, sync::Arc};

use ipnet::IpNet;

use crate::kernel::{command::Launcher, ipvs::Timeouts};

/// The link that holds the addresses of Services in the ipvs mode of kube-proxy and of shunt. The
/// node does not own these addresses.
pub const DUMMY_LINK: &str = "kube-ipvs0";

/// The settings of the ipvs mode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IpvsSettings {
    /// The name of the scheduler of all virtual servers, such as `rr`.
    pub scheduler: Arc<str>,
    /// Virtual servers in these ranges stay, even if no Service has them.
    pub exclude_cidrs: Vec<IpNet>,
    /// The node does not answer ARP requests for addresses of Services.
    pub strict_arp: bool,
    /// Timeouts of connections. A timeout of zero keeps the kernel's value.
    pub timeouts: Timeouts,
    /// The bit in a packet's mark that requests masquerade.
    pub masquerade_mark: u32,
    /// The maximum number of service ports that metrics count individually. 0 disables counting.
    pub counted_services: u32,
    /// The directories to search for commands.
    pub launcher: Launcher,
}

impl Default for IpvsSettings {
    fn default() -> Self {
        Self {
            scheduler: "rr".into(),
            exclude_cidrs: Vec::new(),
            strict_arp: false,
            timeouts: Timeouts::default(),
            masquerade_mark: 1 << 14,
            counted_services: 4_000,
            launcher: Launcher::default(),
        }
    }
}

impl IpvsSettings {
    /// Returns true if `exclude_cidrs` contains the address.
    pub(super) fn excludes(&self, address: IpAddr) -> bool {
        self.exclude_cidrs.iter().any(|range| range.contains(&address))
    }
}
