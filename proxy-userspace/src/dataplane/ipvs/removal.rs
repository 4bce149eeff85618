//! Removes what the ipvs mode of shunt or of kube-proxy left in the kernel, except rules.

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
        ipset::{Ipset, SavedSet},
        ipvs::{Change, Ipvs, VirtualKey},
        own_link::OwnLink,
        sock_diag,
    },
    model::Protocol,
};

/// When the dummy link is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkRemoval {
    /// Now.
    Now,
    /// When it has no addresses that are the source of this node's own connections. A socket that
    /// connected to an address of the link also has it as its source. Without the address the
    /// socket can neither send (`ip_route_output_key_hash_rcu`) nor receive.
    IfUnused,
}

/// Removes virtual servers, the dummy link and sets. The rules that use the sets must be removed
/// before. Continues after errors and returns them all. But if the sets cannot be read, the virtual
/// servers and the link stay: without the sets, the virtual servers of node ports could never be
/// recognized. kube-proxy's `--cleanup` removes the same objects.
///
/// Virtual servers of other programs and those in `excludeCIDRs` stay.
pub fn remove(settings: &IpvsSettings, when: LinkRemoval) -> Vec<KernelError> {
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
    let known = sets.keys().map(String::as_str).filter(|name| Set::from_name(name).is_some());
    errors.extend(ipset.destroy(&known.collect::<Vec<_>>()));
    errors
}

/// Returns true if the dummy link exists.
pub fn has_link() -> bool {
    OwnLink::open(DUMMY_LINK).is_ok_and(|link| link.exists())
}

/// Removes the dummy link, or only its unused addresses. Returns the addresses that stay. If there
/// are none, the link is removed.
pub fn remove_link(when: LinkRemoval) -> Result<BTreeSet<IpAddr>, KernelError> {
    let mut link = OwnLink::open(DUMMY_LINK)?;
    if !link.exists() {
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

/// Returns all sets of the node by name. Without ipset there are none.
pub(super) fn sets(ipset: &Ipset) -> Result<BTreeMap<String, SavedSet>, KernelError> {
    match ipset.save() {
        Err(KernelError::CommandNotFound { .. }) => Ok(BTreeMap::new()),
        // The kernel has no ipset.
        Err(KernelError::CommandFailed { stderr, .. }) if stderr.contains("Kernel error received") => {
            Ok(BTreeMap::new())
        }
        sets => sets,
    }
}

/// Returns IPVS and the sorted virtual servers of this mode: those on addresses of the dummy link
/// and those of node ports, except `excludeCIDRs`. Returns `None` without IPVS or without the dummy
/// link.
pub(super) fn servers(
    settings: &IpvsSettings,
    sets: &BTreeMap<String, SavedSet>,
) -> Result<Option<(Ipvs, Vec<VirtualKey>)>, KernelError> {
    let mut link = OwnLink::open(DUMMY_LINK)?;
    if !link.exists() {
        return Ok(None);
    }
    // A kernel without IPVS has no virtual servers.
    let Ok(mut ipvs) = Ipvs::open() else { return Ok(None) };
    let (addresses, node_ports) = (link.addresses()?, node_ports(sets));
    let mut servers: Vec<_> = ipvs.servers()?.into_keys().collect();
    servers.retain(|key| is_owned(key, &addresses, &node_ports) && !settings.excludes(key.address.ip()));
    Ok(Some((ipvs, servers)))
}

/// Removes virtual servers. Continues after errors and returns them all.
pub(super) fn remove_servers(ipvs: &mut Ipvs, servers: &[VirtualKey]) -> Vec<KernelError> {
    let changes: Vec<Change> = servers.iter().copied().map(Change::RemoveServer).collect();
    match ipvs.commit(&changes) {
        Ok(failures) => failures.into_iter().map(|(_, error)| error).collect(),
        Err(error) => vec![error],
    }
}

fn is_owned(key: &VirtualKey, addresses: &BTreeSet<IpAddr>, node_ports: &BTreeSet<(Protocol, u16)>) -> bool {
    addresses.contains(&key.address.ip()) || node_ports.contains(&(key.protocol, key.address.port()))
}

fn node_ports(sets: &BTreeMap<String, SavedSet>) -> BTreeSet<(Protocol, u16)> {
    let known = sets.iter().filter_map(|(name, saved)| Some((Set::from_name(name)?.1, saved)));
    let entries = known.flat_map(|(set, saved)| saved.entries.iter().map(move |text| (set, text)));
    entries
        .filter_map(|(set, text)| match (set, Entry::parse(set, text)?) {
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
    fn virtual_servers_of_other_programs_are_not_removed() {
        let saved = |entries: &[&str]| SavedSet {
            definition: String::new(),
            entries: entries.iter().copied().map(String::from).collect(),
        };
        let sets = BTreeMap::from([
            ("KUBE-NODE-PORT-TCP".to_owned(), saved(&["30080"])),
            ("KUBE-6-NODE-PORT-SCTP-HASH".to_owned(), saved(&["fd57::11,sctp:30090"])),
            ("OTHERS".to_owned(), saved(&["1.2.3.4"])),
        ]);
        let (addresses, node_ports) = (BTreeSet::from(["10.96.0.10".parse().unwrap()]), node_ports(&sets));
        let is_owned = |protocol, address: &str| {
            let key = VirtualKey { protocol, address: address.parse().unwrap() };
            is_owned(&key, &addresses, &node_ports)
        };
        assert!(is_owned(Protocol::Udp, "10.96.0.10:53"));
        assert!(is_owned(Protocol::Tcp, "192.168.57.11:30080"));
        assert!(is_owned(Protocol::Sctp, "[fd57::11]:30090"));
        assert!(!is_owned(Protocol::Udp, "192.168.57.11:30080"));
        assert!(!is_owned(Protocol::Tcp, "192.168.57.11:80"));
    }
}
