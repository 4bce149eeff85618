//! What stays in the table `kube-proxy` after kube-proxy took it over from shunt: chains, sets and
//! maps that kube-proxy does not have. kube-proxy flushes its own chains when it starts, so that no
//! rule leads to them any more, but it does not delete what it does not know.
//!
//! Chains and sets of one Service have kube-proxy's names, and kube-proxy deletes them itself.

use super::{
    is_without_nftables,
    lists::{EndpointList, ListSize, SizedList},
    sets::SharedSet,
    table::{OWN_CHAINS, TABLE},
};
use crate::{
    kernel::{
        KernelError,
        nftables::{Change, Name, Nftables as Socket, TableListing},
    },
    model::IpFamily,
};

/// The result of a removal.
#[derive(Debug, Default)]
pub struct LeftoverRemoval {
    /// The number of chains, sets and maps that were removed.
    pub removed: usize,
    /// The families whose table is in use: rules that are not shunt's by name lead to its chains.
    pub in_use: Vec<IpFamily>,
    /// What could not be removed, and why.
    pub errors: Vec<KernelError>,
}

/// Removes what only shunt has from the tables of both families, and leaves the rest. Leaves a
/// table that is in use as it is. Does nothing if a table does not exist.
pub(super) fn remove(socket: &mut Socket) -> LeftoverRemoval {
    let mut removal = LeftoverRemoval::default();
    for family in IpFamily::ALL {
        match remove_of(socket, family) {
            Ok(Some(removed)) => removal.removed += removed,
            Ok(None) => removal.in_use.push(family),
            Err(error) => removal.errors.push(error),
        }
    }
    removal
}

/// Removes the objects of one family, and returns their number. `None` if they are in use.
///
/// Chains are removed first, in one transaction. If rules lead to them, the kernel refuses it, and
/// nothing has changed. Sets come after the rules with them. They may have many elements, which a
/// refused transaction would have to bring back.
fn remove_of(socket: &mut Socket, family: IpFamily) -> Result<Option<usize>, KernelError> {
    let listing = match socket.list_table(family, TABLE) {
        Err(error) if is_without_nftables(&error) => return Ok(Some(0)),
        listing => listing?,
    };
    let (chains, sets) = (chains_in(&listing), sets_in(&listing));
    let flushes = chains.iter().cloned().map(Change::FlushChain);
    let deletions = chains.iter().cloned().map(Change::DeleteChain);
    let changes: Vec<_> = flushes.chain(deletions).map(|change| (family, change)).collect();
    match socket.commit(TABLE, &changes) {
        Err(error) if is_in_use(&error) => return Ok(None),
        done => done?,
    }
    let deletions: Vec<_> = sets.iter().cloned().map(|set| (family, Change::DeleteSet(set))).collect();
    socket.commit(TABLE, &deletions)?;
    Ok(Some(chains.len() + sets.len()))
}

fn chains_in(listing: &TableListing) -> Vec<Name> {
    let lists = EndpointList::ALL.into_iter().flat_map(|list| {
        let sized = ListSize::ALL.into_iter().map(move |size| SizedList { list, size }.chain());
        sized.chain([Name::from(list.chain())])
    });
    let own = OWN_CHAINS.into_iter().map(Name::from).chain(lists);
    own.filter(|name| listing.chains.iter().any(|chain| chain.name == *name)).collect()
}

fn sets_in(listing: &TableListing) -> Vec<Name> {
    let own = SharedSet::all().filter(|set| !set.is_kube_proxys()).map(SharedSet::name);
    own.filter(|name| listing.sets.contains_key(name)).collect()
}

/// Returns true for the kernel's answer to the deletion of a chain to which a rule leads.
fn is_in_use(error: &KernelError) -> bool {
    let KernelError::Call { source, .. } = error else { return false };
    source.raw_os_error() == Some(libc::EBUSY)
}
