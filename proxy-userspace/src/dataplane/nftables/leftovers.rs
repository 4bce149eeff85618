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

/// How many times to list the objects of a table, if another process removes some meanwhile.
const ATTEMPTS: usize = 3;

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
/// Looks again if another process removed an object after it was listed, such as shunt that starts
/// in another mode and removes the table.
fn remove_of(socket: &mut Socket, family: IpFamily) -> Result<Option<usize>, KernelError> {
    remove_listed(|| try_remove(socket, family))
}

fn remove_listed(
    mut try_remove: impl FnMut() -> Result<Option<usize>, KernelError>,
) -> Result<Option<usize>, KernelError> {
    for _ in 1..ATTEMPTS {
        match try_remove() {
            Err(error) if has_errno(&error, libc::ENOENT) => {}
            done => return done,
        }
    }
    try_remove()
}

/// Chains are removed first, in one transaction. If rules lead to them, the kernel refuses it, and
/// nothing has changed. Sets come after the rules with them. They may have many elements, which a
/// refused transaction would have to bring back.
fn try_remove(socket: &mut Socket, family: IpFamily) -> Result<Option<usize>, KernelError> {
    let listing = match socket.list_table(family, TABLE) {
        Err(error) if is_without_nftables(&error) => return Ok(Some(0)),
        listing => listing?,
    };
    let (chains, sets) = (chains_in(&listing), sets_in(&listing));
    let flushes = chains.iter().cloned().map(Change::FlushChain);
    let deletions = chains.iter().cloned().map(Change::DeleteChain);
    let changes: Vec<_> = flushes.chain(deletions).map(|change| (family, change)).collect();
    match socket.commit(TABLE, &changes) {
        // A rule leads to one of them.
        Err(error) if has_errno(&error, libc::EBUSY) => return Ok(None),
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

/// Returns true if the kernel refused a call with this error number.
fn has_errno(error: &KernelError, number: i32) -> bool {
    let KernelError::Call { source, .. } = error else { return false };
    source.raw_os_error() == Some(number)
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    /// Returns the number of attempts and the result.
    fn removed(failures: usize, number: i32) -> (usize, Option<usize>) {
        let mut count = 0;
        let attempt = || {
            count += 1;
            let failed = KernelError::call("change", TABLE)(io::Error::from_raw_os_error(number));
            if count <= failures { Err(failed) } else { Ok(Some(7)) }
        };
        let result = remove_listed(attempt).ok().flatten();
        (count, result)
    }

    #[test]
    fn an_object_that_another_process_removed_meanwhile_does_not_fail_the_removal() {
        assert_eq!(removed(1, libc::ENOENT), (2, Some(7)));
        assert_eq!(removed(usize::MAX, libc::ENOENT), (ATTEMPTS, None));
        assert_eq!(removed(1, libc::EPERM), (1, None));
    }
}
