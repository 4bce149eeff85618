//! The proxy's flags for links, which programs of the test world take and pass on.

use anyhow::Result;
use clap::Args;

use super::Proxy;
use crate::world::{Host, World};

/// The proxy's flags for links, in mode ebpf.
#[derive(Clone, Debug, Default, Args)]
pub struct LinkFlags {
    /// The proxy's flag --links-path, in mode ebpf.
    #[arg(long, value_name = "auto|programs|direct|netfilter")]
    pub links_path: Option<String>,
    /// The proxy's flag --links-masquerade, in mode ebpf.
    #[arg(long, value_name = "netfilter|programs")]
    pub links_masquerade: Option<String>,
    /// The proxy's flag --links-direct, in mode ebpf.
    #[arg(long, value_name = "learned|whole")]
    pub links_direct: Option<String>,
    /// The proxy's flag --links-xdp, in mode ebpf. Hosts then complete their checksums
    /// themselves: the XDP program leaves all others to the stack.
    #[arg(long, value_name = "off|generic|native")]
    pub links_xdp: Option<String>,
}

impl LinkFlags {
    /// Returns the flags that are given, with their values.
    pub fn given(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let flags = [
            ("--links-path", &self.links_path),
            ("--links-masquerade", &self.links_masquerade),
            ("--links-direct", &self.links_direct),
            ("--links-xdp", &self.links_xdp),
        ];
        flags.into_iter().filter_map(|(flag, value)| Some((flag, value.as_deref()?)))
    }

    /// Gives the proxy these flags.
    pub fn set(&self, proxy: &mut Proxy) {
        self.given().for_each(|(flag, value)| proxy.set_flag(flag, value));
    }

    /// Returns true if links have an XDP program.
    pub fn has_xdp(&self) -> bool {
        self.links_xdp.as_deref().is_some_and(|xdp| xdp != "off")
    }

    /// Prepares the world for an XDP program, if links have one.
    pub fn prepare(&self, world: &mut World) -> Result<()> {
        if self.links_xdp.as_deref() == Some("native") {
            let mut nodes = world.hosts();
            nodes.retain(|host| [Host::Node1, Host::Node2].contains(host));
            world.take_frames_of_drivers(&nodes)?;
        }
        if self.has_xdp() { world.complete_checksums() } else { Ok(()) }
    }
}
