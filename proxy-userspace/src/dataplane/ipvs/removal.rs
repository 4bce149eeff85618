//! Removes what this mode, and upstream's, leaves in the kernel besides rules.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use super::{
    DUMMY_LINK, IpvsSettings,
    sets::{Entry, Set},
};
use crate::{
    kernel::{
        KernelError,
        dummy_link::DummyLink,
        ipset::{Ipset, Saved},
        ipvs::{Change, Ipvs, VirtualKey},
    },
    model::Protocol,
};

/// Removes virtual servers, the dummy link and sets; rules that use the sets must be gone before. Goes on past errors and returns
/// them all.
///
/// Ours are the virtual servers on addresses of the dummy link, and those of node ports. Others on this node stay, and so do those
/// in `excludeCIDRs`.
pub(super) fn remove(settings: &IpvsSettings) -> Vec<KernelError> {
    let mut errors = Vec::new();
    let ipset = Ipset::new(&settings.path);
    let sets = match sets(&ipset) {
        Ok(sets) => sets,
        Err(error) => {
            errors.push(error);
            BTreeMap::new()
        }
    };
    match DummyLink::open(DUMMY_LINK) {
        Ok(mut link) if link.is_there() => {
            errors.extend(remove_servers(settings, &mut link, &sets));
            errors.extend(link.remove().err());
        }
        Ok(_) => {}
        Err(error) => errors.push(error),
    }
    let ours = sets.keys().filter(|name| Set::named(name).is_some());
    errors.extend(ours.filter_map(|name| ipset.destroy(name).err()));
    errors
}

/// Where there is no ipset, there are no sets that we could have a name for.
fn sets(ipset: &Ipset) -> Result<BTreeMap<String, Saved>, KernelError> {
    match ipset.save() {
        Err(KernelError::CommandNotFound { .. }) => Ok(BTreeMap::new()),
        // A kernel without ipset.
        Err(KernelError::CommandFailed { stderr, .. }) if stderr.contains("Kernel error received") => {
            Ok(BTreeMap::new())
        }
        sets => sets,
    }
}

fn remove_servers(
    settings: &IpvsSettings,
    link: &mut DummyLink,
    sets: &BTreeMap<String, Saved>,
) -> Vec<KernelError> {
    // A kernel without IPVS has no virtual servers.
    let Ok(mut ipvs) = Ipvs::open() else { return Vec::new() };
    let (addresses, servers) = match (link.addresses(), ipvs.servers()) {
        (Ok(addresses), Ok(servers)) => (addresses, servers),
        (addresses, servers) => return addresses.err().into_iter().chain(servers.err()).collect(),
    };
    let ours = Ours { addresses, node_ports: node_ports(sets) };
    let is_excluded =
        |key: &VirtualKey| settings.exclude_cidrs.iter().any(|range| range.contains(&key.address.ip()));
    let removed = servers.into_keys().filter(|key| ours.have(key) && !is_excluded(key));
    let removed: Vec<Change> = removed.map(Change::RemoveServer).collect();
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
    let entries = sets.iter().filter_map(|(name, saved)| Some((Set::named(name)?.1, saved)));
    let entries = entries.flat_map(|(set, saved)| {
        saved.entries.iter().filter_map(move |text| Some((set, Entry::read(set, text)?)))
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
