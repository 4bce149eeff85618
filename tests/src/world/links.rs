//! What happens at the links of a world: offloads, XDP programs at the ports of the bridge, and
//! segments that were sent again.

use anyhow::{Context as _, Result};
use nix::net::if_::if_nametoindex;
use proxy_userspace::kernel::bpf::live_frames::{Fate, SameForAll};

use super::{Host, LINK, World, counters, netns::Netns};

impl World {
    /// Makes the links of all hosts leave no checksum to the next link, as real ones. They then
    /// segment nothing either.
    pub fn complete_checksums(&mut self) -> Result<()> {
        let lines = |host: &Host| self.run(*host, &format!("ethtool -K {LINK} tx off")).map(drop);
        self.agents.keys().try_for_each(lines)?;
        self.links_segment = false;
        Ok(())
    }

    /// Returns false after [`Self::complete_checksums`].
    pub fn links_segment(&self) -> bool {
        self.links_segment
    }

    /// Lets the ports of the bridge that lead to these hosts take frames that XDP programs of the
    /// hosts send in the driver. A veth without a program drops them.
    pub fn take_frames_of_drivers(&mut self, hosts: &[Host]) -> Result<()> {
        for host in hosts {
            if !self.ports.contains_key(host) {
                self.ports.insert(*host, self.attach_to_port(*host, Fate::Pass)?);
            }
        }
        Ok(())
    }

    /// Attaches an XDP program to the port of the bridge that leads to a host, until the result is
    /// dropped.
    pub fn attach_to_port(&self, host: Host, fate: Fate) -> Result<SameForAll> {
        Netns::open(&format!("{}-bridge", self.name()))?.run(|| {
            let port = if_nametoindex(host.name()).with_context(|| format!("the port of {host}"))?;
            SameForAll::attach(port, fate).with_context(|| format!("attach XDP to the port of {host}"))
        })
    }

    /// Returns the number of TCP segments that all hosts together have retransmitted so far.
    pub fn retransmits(&self) -> Result<u64> {
        let counts = self.namespaces.values().map(|namespace| namespace.run(counters::retransmits));
        counts.sum()
    }
}
