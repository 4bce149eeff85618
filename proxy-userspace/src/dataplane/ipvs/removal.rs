//! Removes what this mode, and upstream's, leaves in the kernel besides rules.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use super::{
    handover_table,
    sets::{Entry, Set},
    settings::{DUMMY_LINK, IpvsSettings},
};
use crate::{
    kernel::{
        KernelError,
        dummy_link::DummyLink,
        ipset::{Ipset, Saved},
        ipvs::{Change, Ipvs, VirtualKey},
        sock_diag,
    },
    model::Protocol,
};

/// What becomes of the dummy link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LinkRemoval {
    /// At once.
    Now,
    /// Its addresses stay from which sockets of this node are connected, and it does as long as it has one. A socket that connected to
    /// one of its addresses has this address for its own too, and can neither send (`ip_route_output_key_hash_rcu`) nor hear without
    /// it.
    IfUnused,
}

/// Removes virtual servers, the dummy link and sets; rules that use the sets must be gone before. Goes on past errors and returns
/// them all; but where the sets cannot be read, virtual servers and link stay: those of node ports could never be told again.
///
/// Ours are the virtual servers on addresses of the dummy link, and those of node ports. Others on this node stay, and so do those
/// in `excludeCIDRs`.
pub(super) fn remove(settings: &IpvsSettings, when: LinkRemoval) -> Vec<KernelError> {
    let mut errors: Vec<KernelError> = handover_table::remove(&settings.launcher).err().into_iter().collect();
    let ipset = Ipset::new(&settings.launcher);
    let sets = match sets(&ipset) {
        Ok(sets) => sets,
        Err(error) => {
            errors.push(error);
            return errors;
        }
    };
    match servers(settings, &sets) {
        Ok(Some((mut ipvs, servers))) => errors.extend(remove_servers(&mut ipvs, &servers)),
        Ok(None) => {}
        Err(error) => errors.push(error),
    }
    errors.extend(remove_link(when).err());
    let ours = sets.keys().filter(|name| Set::from_name(name).is_some());
    errors.extend(ours.filter_map(|name| ipset.destroy(name).err()));
    errors
}

/// Whether the dummy link is there.
pub(super) fn has_link() -> bool {
    DummyLink::open(DUMMY_LINK).is_ok_and(|link| link.is_there())
}

/// Removes the dummy link, or what of it is not used; returns the addresses that it has then, with none of which it is gone.
pub(super) fn remove_link(when: LinkRemoval) -> Result<BTreeSet<IpAddr>, KernelError> {
    let mut link = DummyLink::open(DUMMY_LINK)?;
    if !link.is_there() {
        return Ok(BTreeSet::new());
    }
    let used = match when {
        LinkRemoval::Now => BTreeSet::new(),
        LinkRemoval::IfUnused => sock_diag::connected_source_addresses()?,
    };
    let held = link.addresses()?;
    if held.is_disjoint(&used) {
        return link.remove().map(|()| BTreeSet::new());
    }
    held.difference(&used).try_for_each(|address| link.delete(*address))?;
    Ok(held.intersection(&used).copied().collect())
}

/// Where there is no ipset, there are no sets that we could have a name for.
pub(super) fn sets(ipset: &Ipset) -> Result<BTreeMap<String, Saved>, KernelError> {
    match ipset.save() {
        Err(KernelError::CommandNotFound { .. }) => Ok(BTreeMap::new()),
        // A kernel without ipset.
        Err(KernelError::CommandFailed { stderr, .. }) if stderr.contains("Kernel error received") => {
            Ok(BTreeMap::new())
        }
        sets => sets,
    }
}

/// IPVS, and our virtual servers, sorted; none where there is no IPVS, or no dummy link.
pub(super) fn servers(
    settings: &IpvsSettings,
    sets: &BTreeMap<String, Saved>,
) -> Result<Option<(Ipvs, Vec<VirtualKey>)>, KernelError> {
    let mut link = DummyLink::open(DUMMY_LINK)?;
    if !link.is_there() {
        return Ok(None);
    }
    // A kernel without IPVS has no virtual servers.
    let Ok(mut ipvs) = Ipvs::open() else { return Ok(None) };
    let ours = Ours { addresses: link.addresses()?, node_ports: node_ports(sets) };
    let is_excluded = |key: &VirtualKey| settings.excludes(key.address.ip());
    let found = ipvs.servers()?.into_keys().filter(|key| ours.have(key) && !is_excluded(key)).collect();
    Ok(Some((ipvs, found)))
}

/// Removes these; goes on past those that fail.
pub(super) fn remove_servers(ipvs: &mut Ipvs, servers: &[VirtualKey]) -> Vec<KernelError> {
    let removed: Vec<Change> = servers.iter().copied().map(Change::RemoveServer).collect();
    match ipvs.commit(&removed) {
        Ok(failures) => failures.into_iter().map(|(_, error)| error).collect(),
        Err(error) => vec![error],
    }
}

/// What tells our virtual servers from others'.
struct Ours {
    addresses: BTreeSet<IpAddr>,
    node_ports: BTreeSet<(Protocol, u16)>,
}

impl Ours {
    fn have(&self, key: &VirtualKey) -> bool {
        self.addresses.contains(&key.address.ip())
            || self.node_ports.contains(&(key.protocol, key.address.port()))
    }
}

fn node_ports(sets: &BTreeMap<String, Saved>) -> BTreeSet<(Protocol, u16)> {
    let entries = sets.iter().filter_map(|(name, saved)| Some((Set::from_name(name)?.1, saved)));
    let entries = entries.flat_map(|(set, saved)| {
        saved.entries.iter().filter_map(move |text| Some((set, Entry::parse(set, text)?)))
    });
    entries
        .filter_map(|(set, entry)| match (set, entry) {
            (Set::NodePortTcp, Entry::Port(port)) => Some((Protocol::Tcp, port)),
            (Set::NodePortUdp, Entry::Port(port)) => Some((Protocol::Udp, port)),
            (Set::NodePortSctp, Entry::Destination(to)) => Some((to.protocol, to.port)),
            _ => None,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn virtual_servers_on_the_links_addresses_and_of_node_ports_are_ours_and_others_are_not() {
        let saved = |entries: &[&str]| Saved {
            made_as: String::new(),
            entries: entries.iter().copied().map(String::from).collect(),
        };
        let sets = BTreeMap::from([
            ("KUBE-NODE-PORT-TCP".to_owned(), saved(&["30080"])),
            ("KUBE-6-NODE-PORT-SCTP-HASH".to_owned(), saved(&["fd57::11,sctp:30090"])),
            ("OTHERS".to_owned(), saved(&["1.2.3.4"])),
        ]);
        let ours = Ours {
            addresses: BTreeSet::from(["10.96.0.10".parse().unwrap()]),
            node_ports: node_ports(&sets),
        };
        let have =
            |protocol, address: &str| ours.have(&VirtualKey { protocol, address: address.parse().unwrap() });
        assert!(have(Protocol::Udp, "10.96.0.10:53"));
        assert!(have(Protocol::Tcp, "192.168.57.11:30080"));
        assert!(have(Protocol::Sctp, "[fd57::11]:30090"));
        assert!(!have(Protocol::Udp, "192.168.57.11:30080"));
        assert!(!have(Protocol::Tcp, "192.168.57.11:80"));
    }
}
