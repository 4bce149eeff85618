//! What the drivers of links say that they can do with XDP (generic netlink family `netdev`).

use std::{collections::HashMap, io};

use netlink_packet_core::NLM_F_DUMP;

use super::netlink::{generic, kernel_constants};
use crate::net::XdpFeatures;

kernel_constants! {
    NETDEV_CMD_DEV_GET = 1,
    NETDEV_A_DEV_IFINDEX = 1,
    NETDEV_A_DEV_XDP_FEATURES = 3,
}

const FAMILY: &str = "netdev";
const VERSION: u8 = 1;
/// `NETDEV_XDP_ACT_BASIC` and `NETDEV_XDP_ACT_REDIRECT`.
const RUNS_PROGRAMS: u64 = 0b11;
/// `NETDEV_XDP_ACT_NDO_XMIT`.
const TAKES_FRAMES: u64 = 0b100;

/// Reads what drivers say. If the kernel does not answer, the former answer holds.
#[derive(Debug, Default)]
pub(super) struct XdpReader {
    last: HashMap<u32, XdpFeatures>,
}

impl XdpReader {
    /// Returns what is known of the links of this network namespace, by index. Nothing before
    /// kernel 6.3 (d3d854fd6a1d).
    pub(super) fn read(&mut self) -> &HashMap<u32, XdpFeatures> {
        match read() {
            Ok(features) => self.last = features,
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => self.last.clear(),
            Err(error) => tracing::debug!(%error, "cannot read what drivers can do with XDP"),
        }
        &self.last
    }
}

fn read() -> io::Result<HashMap<u32, XdpFeatures>> {
    let socket = generic::open()?;
    let family = generic::family(&socket, FAMILY)?;
    let header = generic::header(NETDEV_CMD_DEV_GET, VERSION);
    let mut answers = socket.request(family, NLM_F_DUMP, header, |_| {})?;
    let links = answers.read(|answer| {
        let features = answer.ne64(NETDEV_A_DEV_XDP_FEATURES)?;
        let has = |all: u64| features & all == all;
        let features = XdpFeatures { runs_programs: has(RUNS_PROGRAMS), takes_frames: has(TAKES_FRAMES) };
        Some((answer.ne32(NETDEV_A_DEV_IFINDEX)?, features))
    })?;
    Ok(links.into_iter().collect())
}
