//! Leaving ipvs for another mode: connections that IPVS carries are handed over to conntrack, with the virtual servers that they
//! were made to.
//!
//! Conntrack knows them, since kube-proxy's ipvs mode sets `net.ipv4.vs.conntrack`: an entry says the VIP and where answers
//! come from, but it does not translate the destination (`ip_vs_update_conntrack` changes the tuple and no status bit). It is
//! replaced by one that does. Two things of the kernel rule the order:
//!
//! - A connection does not outlive its virtual server: `ip_vs_in` drops packets whose real server is not available.
//! - When IPVS forgets a connection, it deletes the entry of conntrack too (`ip_vs_conn_drop_conntrack`), whoever made it. That
//!   happens when the virtual server goes, where `expire_nodest_conn` is set (kernel 5.9, 04231e52d355), or within minutes.
//!
//! So packets are kept back, entries read, virtual servers removed, IPVS is waited for, and only then entries are made.

use std::{thread, time::Duration};

use super::{IpvsSettings, hold::Hold, removal};
use crate::{
    kernel::{
        KernelError, clock,
        conntrack::{self, AddressPair, Connection, HandoverCounts, TrackedConnection},
        ipset::Ipset,
        ipvs::{self, VirtualKey},
        sysctl::NetSetting,
    },
    model::{IpFamily, Protocol},
};

const EXPIRES_AT_ONCE: NetSetting = NetSetting("ipv4/vs/expire_nodest_conn");
/// What IPVS may take to forget connections; it begins when the last virtual server has gone.
const FORGOTTEN_WITHIN: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(5);

/// Removes the virtual servers of this mode, and makes conntrack translate the connections that they were for: another mode serves
/// all Services by now.
pub(super) fn hand_over(settings: &IpvsSettings) -> Result<HandoverCounts, KernelError> {
    let mut done = HandoverCounts::default();
    if !removal::has_link() {
        return Ok(done);
    }
    let sets = removal::sets(&Ipset::new(&settings.path))?;
    let Some((mut ipvs, servers)) = removal::servers(settings, &sets)? else { return Ok(done) };
    if servers.is_empty() {
        return Ok(done);
    }
    if let Err(error) = EXPIRES_AT_ONCE.ensure(1) {
        tracing::warn!(%error, "connections that IPVS carries may be lost when it forgets them");
    }
    let _hold = match Hold::put(&settings.path, &servers) {
        Ok(hold) => Some(hold),
        // The next process does it whole.
        Err(error @ KernelError::CommandForsaken { .. }) => return Err(error),
        Err(error) => {
            tracing::warn!(%error, "packets cannot be kept back: connections that are busy right now may end");
            None
        }
    };
    let found = IpFamily::ALL.map(|family| (family, find(family, &servers)));
    let mut errors = removal::remove_servers(&mut ipvs, &servers);
    errors.extend(wait_until_forgotten(&servers).err());
    for (family, connections) in found {
        match connections.and_then(|connections| conntrack::replace_entries(family, &connections)) {
            Ok(replaced) => done += replaced,
            Err(error) => errors.push(error),
        }
    }
    errors.into_iter().next().map_or(Ok(done), Err)
}

fn find(family: IpFamily, servers: &[VirtualKey]) -> Result<Vec<Connection>, KernelError> {
    let mut found = Vec::new();
    for protocol in Protocol::ALL {
        found.extend(conntrack::find_connections(family, protocol.number(), &mut |tracked| {
            untranslated(tracked, protocol, servers)
        })?);
    }
    Ok(found)
}

/// The ends of a connection that IPVS carries to one of these virtual servers, which are sorted.
fn untranslated(
    tracked: &TrackedConnection,
    protocol: Protocol,
    servers: &[VirtualKey],
) -> Option<AddressPair> {
    let key = VirtualKey { protocol, address: tracked.original.destination };
    let is_carried = !tracked.is_dnat
        && tracked.reply.source != tracked.original.destination
        && servers.binary_search(&key).is_ok();
    is_carried.then_some(tracked.original)
}

fn wait_until_forgotten(servers: &[VirtualKey]) -> Result<(), KernelError> {
    let deadline = clock::monotonic()? + FORGOTTEN_WITHIN;
    loop {
        let left = ipvs::connections_to(&|key| servers.binary_search(key).is_ok())?;
        if left == 0 {
            return Ok(());
        }
        if clock::monotonic()? >= deadline {
            tracing::warn!(
                left,
                "IPVS goes on with connections whose virtual servers are gone: it may end them"
            );
            return Ok(());
        }
        thread::sleep(PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ipvs_carries_is_what_goes_elsewhere_though_conntrack_does_not_send_it_there() {
        let at = |text: &str| text.parse().unwrap();
        let servers = [VirtualKey { protocol: Protocol::Tcp, address: at("10.96.0.1:80") }];
        let original = AddressPair { source: at("10.244.1.11:4000"), destination: at("10.96.0.1:80") };
        let reply = |from: &str| AddressPair { source: at(from), destination: at("192.168.57.11:5000") };
        let carried =
            TrackedConnection { protocol: 6, original, reply: reply("10.244.1.12:8080"), is_dnat: false };
        let ends = |tracked: &TrackedConnection, protocol| untranslated(tracked, protocol, &servers);
        assert_eq!(ends(&carried, Protocol::Tcp), Some(original));
        assert_eq!(ends(&carried, Protocol::Udp), None);
        assert_eq!(ends(&TrackedConnection { is_dnat: true, ..carried }, Protocol::Tcp), None);
        assert_eq!(ends(&TrackedConnection { reply: reply("10.96.0.1:80"), ..carried }, Protocol::Tcp), None);
        let elsewhere = AddressPair { destination: at("10.96.0.2:80"), ..original };
        assert_eq!(ends(&TrackedConnection { original: elsewhere, ..carried }, Protocol::Tcp), None);
    }
}
