//! The links of this network namespace and their addresses, now and whenever they change (rtnetlink).

use std::{
    collections::{BTreeSet, HashMap},
    net::IpAddr,
    sync::Arc,
};

use futures::{FutureExt as _, StreamExt as _, TryStreamExt as _};
use netlink_packet_core::{NetlinkMessage, NetlinkPayload};
use netlink_packet_route::{
    RouteNetlinkMessage,
    address::{AddressAttribute, AddressMessage},
    link::{InfoKind, LinkAttribute, LinkFlags, LinkInfo, LinkLayerType, LinkMessage},
};
use rtnetlink::{Handle, MulticastGroup, new_multicast_connection};
use tokio::sync::{Notify, watch};

use super::{KernelError, bpf::tc};
use crate::model::{Link, LinkAddress, LinkHeader, MacAddress, NodeFacts};

type Message = NetlinkMessage<RouteNetlinkMessage>;

/// kube-proxy's ipvs mode, upstream's as ours, makes this link for addresses that the node serves and does not have for its own.
const VIRTUAL_LINK: &str = "kube-ipvs0";

/// Reports all links and addresses, sorted, at once and after every change; and on `disturbed` that someone removed a filter
/// which may have been ours. Returns when rtnetlink fails or nobody listens any more.
///
/// A burst of changes is read out before everything is listed again. If the kernel drops notifications because the burst
/// was too large for the socket, the list taken after it is still complete.
pub async fn report(to: watch::Sender<Option<NodeFacts>>, disturbed: Arc<Notify>) -> Result<(), KernelError> {
    let groups =
        [MulticastGroup::Link, MulticastGroup::Ipv4Ifaddr, MulticastGroup::Ipv6Ifaddr, MulticastGroup::Tc];
    let (connection, handle, mut changes) =
        new_multicast_connection(&groups).map_err(KernelError::call("open", "an rtnetlink socket"))?;
    let connection = tokio::spawn(connection);
    let outcome = async {
        let mut told = BTreeSet::new();
        loop {
            let (facts, virtual_link) = list(&handle).await?;
            tell_unsupported(&facts.links, &mut told);
            to.send_if_modified(|known| {
                let differs = known.as_ref() != Some(&facts);
                *known = Some(facts);
                differs
            });
            let mut is_listed = true;
            while is_listed {
                let change = tokio::select! {
                    change = changes.next() => change,
                    () = to.closed() => return Ok(()),
                };
                let Some((change, _)) = change else { return Ok(()) };
                let rest = std::iter::from_fn(|| changes.next().now_or_never().flatten());
                for message in std::iter::once(change).chain(rest.map(|(message, _)| message)) {
                    is_listed &= is_of_traffic_control(&message) || is_address_of(&message, virtual_link);
                    if is_removed_filter(&message) {
                        disturbed.notify_one();
                    }
                }
            }
        }
    }
    .await;
    connection.abort();
    outcome
}

/// It says nothing of links and addresses.
fn is_of_traffic_control(message: &Message) -> bool {
    matches!(
        &message.payload,
        NetlinkPayload::InnerMessage(
            RouteNetlinkMessage::NewQueueDiscipline(_)
                | RouteNetlinkMessage::DelQueueDiscipline(_)
                | RouteNetlinkMessage::NewTrafficFilter(_)
                | RouteNetlinkMessage::DelTrafficFilter(_)
                | RouteNetlinkMessage::NewTrafficClass(_)
                | RouteNetlinkMessage::DelTrafficClass(_)
                | RouteNetlinkMessage::NewTrafficChain(_)
                | RouteNetlinkMessage::DelTrafficChain(_)
        )
    )
}

/// Addresses that come to this link and go are no news.
fn is_address_of(message: &Message, link: Option<u32>) -> bool {
    match &message.payload {
        NetlinkPayload::InnerMessage(
            RouteNetlinkMessage::NewAddress(address) | RouteNetlinkMessage::DelAddress(address),
        ) => Some(address.header.index) == link,
        _ => false,
    }
}

fn is_removed_filter(message: &Message) -> bool {
    match &message.payload {
        NetlinkPayload::InnerMessage(RouteNetlinkMessage::DelQueueDiscipline(removed)) => {
            tc::clsact::may_have_held_ours(removed)
        }
        NetlinkPayload::InnerMessage(RouteNetlinkMessage::DelTrafficFilter(removed)) => {
            tc::clsact::may_be_ours(removed)
        }
        _ => false,
    }
}

/// Links of a kind that is not known are left alone; that is said once a link.
fn tell_unsupported(links: &[Link], told: &mut BTreeSet<u32>) {
    for link in links.iter().filter(|link| !link.is_loopback) {
        if let LinkHeader::Other(kind) = link.header
            && told.insert(link.index)
        {
            tracing::info!(
                link = &*link.name,
                kind,
                "its packets have a header that is not known here: it is left alone"
            );
        }
    }
}

/// All links and addresses, and the index of the virtual link: its addresses are not the node's.
async fn list(handle: &Handle) -> Result<(NodeFacts, Option<u32>), KernelError> {
    let failed = |operation| move |source| KernelError::Netlink { operation, source };
    let links = handle.link().get().execute().map_err(failed("list links"));
    let mut links: Vec<Link> =
        links.try_filter_map(|link| async move { Ok(self::link(&link)) }).try_collect().await?;
    links.sort();
    let names: HashMap<u32, Arc<str>> =
        links.iter().map(|link| (link.index, Arc::clone(&link.name))).collect();
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
    addresses.retain(|address| &*address.link != VIRTUAL_LINK);
    addresses.sort();
    addresses.dedup();
    let virtual_link = links.iter().find(|link| &*link.name == VIRTUAL_LINK).map(|link| link.index);
    Ok((NodeFacts { addresses, links }, virtual_link))
}

fn link(message: &LinkMessage) -> Option<Link> {
    let name = message.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::IfName(name) => Some(name.as_str().into()),
        _ => None,
    })?;
    let master = message.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::Controller(master) => Some(*master).filter(|master| *master != 0),
        _ => None,
    });
    Some(Link {
        index: message.header.index,
        name,
        master,
        header: header(message.header.link_layer_type),
        is_loopback: message.header.flags.contains(LinkFlags::Loopback),
        bridge_address: bridge_address(message),
    })
}

fn bridge_address(message: &LinkMessage) -> Option<MacAddress> {
    let is_bridge = message.attributes.iter().any(|attribute| {
        matches!(attribute, LinkAttribute::LinkInfo(infos) if infos.contains(&LinkInfo::Kind(InfoKind::Bridge)))
    });
    let address = message.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::Address(address) => Some(MacAddress(address.as_slice().try_into().ok()?)),
        _ => None,
    });
    address.filter(|_| is_bridge)
}

/// Those that the kernel's `dev_is_mac_header_xmit` (`include/linux/if_arp.h`) names have no header below IP's.
fn header(kind: LinkLayerType) -> LinkHeader {
    match kind {
        LinkLayerType::Ether => LinkHeader::Ethernet,
        LinkLayerType::Tunnel
        | LinkLayerType::Tunnel6
        | LinkLayerType::Sit
        | LinkLayerType::Ipgre
        | LinkLayerType::Ip6gre
        | LinkLayerType::None
        | LinkLayerType::Rawip
        | LinkLayerType::Ppp => LinkHeader::Ip,
        other => LinkHeader::Other(other.into()),
    }
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
        let reporting = tokio::spawn(report(to, Arc::default()));
        from.wait_for(Option::is_some).await.expect("rtnetlink");
        let has_loopback = from
            .borrow()
            .as_ref()
            .is_some_and(|facts| facts.addresses.iter().any(|a| &*a.link == "lo" && a.address.is_loopback()));
        assert!(has_loopback);
        let is_linked = from
            .borrow()
            .as_ref()
            .is_some_and(|facts| facts.links.iter().any(|l| &*l.name == "lo" && l.is_loopback));
        assert!(is_linked);
        drop(from);
        tokio::time::timeout(Duration::from_secs(5), reporting)
            .await
            .expect("ends")
            .expect("no panic")
            .expect("no error");
    }
}
