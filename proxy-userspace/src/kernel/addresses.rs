//! The addresses of this network namespace's links, now and whenever they change (rtnetlink).

use std::{collections::HashMap, net::IpAddr, sync::Arc};

use futures::{StreamExt as _, TryStreamExt as _};
use netlink_packet_route::{
    address::{AddressAttribute, AddressMessage},
    link::LinkAttribute,
};
use rtnetlink::{Handle, MulticastGroup, new_multicast_connection};
use tokio::sync::watch;

use super::KernelError;
use crate::model::{LinkAddress, NodeFacts};

/// Reports all addresses, sorted, at once and after every change. Returns when rtnetlink fails or nobody listens any more.
///
/// A burst of changes is read out before the addresses are listed again. If the kernel drops notifications because the burst
/// was too large for the socket, the list taken after it is still complete.
pub async fn report(to: watch::Sender<Option<NodeFacts>>) -> Result<(), KernelError> {
    let groups = [MulticastGroup::Link, MulticastGroup::Ipv4Ifaddr, MulticastGroup::Ipv6Ifaddr];
    let (connection, handle, mut changes) =
        new_multicast_connection(&groups).map_err(KernelError::call("open", "an rtnetlink socket"))?;
    let connection = tokio::spawn(connection);
    let outcome = async {
        loop {
            let facts = NodeFacts { addresses: list(&handle).await? };
            to.send_if_modified(|known| {
                let differs = known.as_ref() != Some(&facts);
                *known = Some(facts);
                differs
            });
            tokio::select! {
                change = changes.next() => if change.is_none() { return Ok(()) },
                () = to.closed() => return Ok(()),
            }
            while futures::FutureExt::now_or_never(changes.next()).flatten().is_some() {}
        }
    }
    .await;
    connection.abort();
    outcome
}

async fn list(handle: &Handle) -> Result<Vec<LinkAddress>, KernelError> {
    let failed = |operation| move |source| KernelError::Netlink { operation, source };
    let names: HashMap<u32, Arc<str>> = handle
        .link()
        .get()
        .execute()
        .map_err(failed("list links"))
        .try_filter_map(|link| async move {
            Ok(link.attributes.into_iter().find_map(|attribute| match attribute {
                LinkAttribute::IfName(name) => Some((link.header.index, Arc::from(name))),
                _ => None,
            }))
        })
        .try_collect()
        .await?;
    let mut addresses: Vec<LinkAddress> = handle
        .address()
        .get()
        .execute()
        .map_err(failed("list addresses"))
        .try_filter_map(|message| {
            let address = link_address(&message, &names);
            async move { Ok(address) }
        })
        .try_collect()
        .await?;
    addresses.sort();
    addresses.dedup();
    Ok(addresses)
}

/// The address of a message; none for IPv6 link-local ones, which are a link's and not the node's.
fn link_address(message: &AddressMessage, links: &HashMap<u32, Arc<str>>) -> Option<LinkAddress> {
    let link = links.get(&message.header.index)?;
    // On point-to-point links IFA_ADDRESS is the other end; IFA_LOCAL, where there is one, is ours.
    let local = message.attributes.iter().find_map(|attribute| match attribute {
        AddressAttribute::Local(address) => Some(*address),
        _ => None,
    });
    let address = local.or_else(|| {
        message.attributes.iter().find_map(|attribute| match attribute {
            AddressAttribute::Address(address) => Some(*address),
            _ => None,
        })
    })?;
    let link_local = matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local());
    (!link_local).then(|| LinkAddress {
        link: Arc::clone(link),
        address,
        prefix_len: message.header.prefix_len,
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn loopback_is_reported_at_once_and_reporting_ends_when_nobody_listens() {
        let (to, mut from) = watch::channel(None);
        let reporting = tokio::spawn(report(to));
        from.wait_for(Option::is_some).await.expect("rtnetlink");
        let has_loopback = from
            .borrow()
            .as_ref()
            .is_some_and(|facts| facts.addresses.iter().any(|a| &*a.link == "lo" && a.address.is_loopback()));
        assert!(has_loopback);
        drop(from);
        tokio::time::timeout(Duration::from_secs(5), reporting)
            .await
            .expect("ends")
            .expect("no panic")
            .expect("no error");
    }
}
