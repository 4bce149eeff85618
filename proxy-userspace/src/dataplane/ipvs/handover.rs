//! Hands the connections that IPVS carries over to conntrack when another mode replaces ipvs, and
//! removes their virtual servers.
//!
//! Conntrack has an entry of each connection, because kube-proxy's ipvs mode sets
//! `net.ipv4.vs.conntrack`. The entry has the VIP and the source of replies, but it does not
//! translate the destination: `ip_vs_update_conntrack` changes the tuple and no status bit. The
//! handover replaces it by an entry that translates. Two facts of the kernel determine the order:
//!
//! - A connection does not outlive its virtual server: `ip_vs_in` drops packets whose real server
//!   is not available.
//! - When IPVS forgets a connection, it also deletes the conntrack entry
//!   (`ip_vs_conn_drop_conntrack`), no matter who created it. IPVS forgets a connection when its
//!   virtual server is removed if `expire_nodest_conn` is set (kernel 5.9, 04231e52d355), or else
//!   within minutes.
//!
//! The order is therefore: drop packets, read the conntrack entries, remove the virtual servers,
//! wait until IPVS has forgotten the connections, and only then create the new entries.

use std::{thread, time::Duration};

use super::{handover_table::HandoverTable, removal, settings::IpvsSettings};
use crate::{
    kernel::{
        KernelError, clock,
        conntrack::{self, AddressPair, Connection, HandoverCounts, TrackedConnection},
        ipset::Ipset,
        ipvs::{self, VirtualKey},
        sysctl::Sysctl,
    },
    model::{IpFamily, Protocol},
};

const EXPIRES_AT_ONCE: Sysctl = Sysctl("ipv4/vs/expire_nodest_conn");
/// The maximum time to wait until IPVS has forgotten the connections. IPVS begins when the last
/// virtual server is removed.
const FORGET_TIMEOUT: Duration = Duration::from_secs(10);
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Removes the virtual servers of this mode and replaces the conntrack entries of their connections
/// by entries that translate. Another mode must serve all Services already.
pub fn hand_over(settings: &IpvsSettings) -> Result<HandoverCounts, KernelError> {
    let mut done = HandoverCounts::default();
    if !removal::has_link() {
        return Ok(done);
    }
    let sets = removal::sets(&Ipset::new(&settings.launcher))?;
    let Some((mut ipvs, servers)) = removal::servers(settings, &sets)? else { return Ok(done) };
    if servers.is_empty() {
        return Ok(done);
    }
    if let Err(error) = EXPIRES_AT_ONCE.ensure(1) {
        tracing::warn!(
            %error,
            "cannot make IPVS forget connections at once: connections that it carries may end"
        );
    }
    let _table = match HandoverTable::create(&settings.launcher, &servers) {
        Ok(table) => Some(table),
        // The process ends. The next process makes the whole handover.
        Err(error @ KernelError::CommandCancelled { .. }) => return Err(error),
        Err(error) => {
            tracing::warn!(
                %error,
                "cannot drop packets during the handover: connections that send at this moment may end"
            );
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

/// Returns the connections of a family that IPVS carries to these virtual servers.
fn find(family: IpFamily, servers: &[VirtualKey]) -> Result<Vec<Connection>, KernelError> {
    let mut found = Vec::new();
    for protocol in Protocol::ALL {
        found.extend(conntrack::find_connections(family, protocol, &mut |tracked| {
            original_ends(tracked, protocol, servers)
        })?);
    }
    Ok(found)
}

/// Returns the original ends of a connection if IPVS carries it to one of these sorted virtual
/// servers.
fn original_ends(
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
    let deadline = clock::monotonic()? + FORGET_TIMEOUT;
    loop {
        let connections = ipvs::connections_to(&|key| servers.binary_search(key).is_ok())?;
        if connections == 0 {
            return Ok(());
        }
        if clock::monotonic()? >= deadline {
            tracing::warn!(
                connections,
                "IPVS still has connections of removed virtual servers: it may end them"
            );
            return Ok(());
        }
        thread::sleep(POLL_INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ipvs_carries_a_connection_with_another_reply_source_and_no_dnat() {
        let at = |text: &str| text.parse().unwrap();
        let servers = [VirtualKey { protocol: Protocol::Tcp, address: at("10.96.0.1:80") }];
        let original = AddressPair { source: at("10.244.1.11:4000"), destination: at("10.96.0.1:80") };
        let reply = |from: &str| AddressPair { source: at(from), destination: at("192.168.57.11:5000") };
        let carried = TrackedConnection {
            protocol: Protocol::Tcp,
            original,
            reply: reply("10.244.1.12:8080"),
            is_dnat: false,
        };
        let ends = |tracked: &TrackedConnection, protocol| original_ends(tracked, protocol, &servers);
        assert_eq!(ends(&carried, Protocol::Tcp), Some(original));
        assert_eq!(ends(&carried, Protocol::Udp), None);
        assert_eq!(ends(&TrackedConnection { is_dnat: true, ..carried }, Protocol::Tcp), None);
        assert_eq!(ends(&TrackedConnection { reply: reply("10.96.0.1:80"), ..carried }, Protocol::Tcp), None);
        let elsewhere = AddressPair { destination: at("10.96.0.2:80"), ..original };
        assert_eq!(ends(&TrackedConnection { original: elsewhere, ..carried }, Protocol::Tcp), None);
    }
}
