//! Reports the links and addresses of this network namespace, and their changes (rtnetlink).

use std::{
    collections::{BTreeSet, HashMap},
    io,
    net::IpAddr,
    sync::{Arc, LazyLock},
};

use aya::util::KernelVersion;
use futures::{FutureExt as _, StreamExt as _};
use netlink_packet_core::{NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload};
use netlink_packet_route::{
    RouteNetlinkMessage,
    address::{AddressAttribute, AddressHeaderFlags, AddressMessage, AddressScope},
    link::{InfoData, InfoKind, InfoVlan, LinkAttribute, LinkFlags, LinkInfo, LinkLayerType, LinkMessage},
    tc::TcHandle,
};
use rtnetlink::{Handle, MulticastGroup, new_multicast_connection};
use tokio::sync::{Notify, watch};

use super::{
    KernelError,
    bpf::tc,
    local_routes::LocalRoutes,
    netlink::{MAX_DUMP_ATTEMPTS, attribute},
    xdp_features::XdpReader,
};
use crate::net::{
    Device, Link, LinkAddress, LinkHeader, MacAddress, NodeFacts, SourceAddress, TUNNEL_LINK, Vlan,
    XdpFeatures,
};

type Message = NetlinkMessage<RouteNetlinkMessage>;

/// Sends all links, addresses and local routes, sorted, to `to` at once and after every change.
/// Notifies `disturbed` if another program removed a filter that may have been shunt's, or added
/// one that may run before it. The kernel sends no notification for TCX. Returns an error when
/// rtnetlink fails, and `Ok` when all receivers are gone.
///
/// The addresses of `excluded_link` and of the tunnel are left out, because they do not belong to
/// the node.
///
/// A burst of changes is read to its end before everything is listed again. If the burst was too
/// large for the socket, the kernel drops notifications; the list that follows is still complete.
pub async fn report(
    excluded_link: &str,
    to: watch::Sender<Option<NodeFacts>>,
    disturbed: Arc<Notify>,
) -> Result<(), KernelError> {
    let groups =
        [MulticastGroup::Link, MulticastGroup::Ipv4Ifaddr, MulticastGroup::Ipv6Ifaddr, MulticastGroup::Tc];
    let (mut connection, mut handle, mut changes) =
        new_multicast_connection(&groups).map_err(KernelError::call("open", "an rtnetlink socket"))?;
    // The last message of a dump may be the only one that says that the list changed meanwhile.
    connection.set_forward_done(true);
    let connection = tokio::spawn(connection);
    let outcome = async {
        let mut logged = BTreeSet::new();
        let (mut routes, mut xdp) = (LocalRoutes::watch(), XdpReader::default());
        loop {
            let (facts, excluded) = list_whole(&mut handle, &mut xdp, excluded_link).await?;
            let facts = NodeFacts { local_routes: routes.list().await, ..facts };
            log_unsupported(&facts.links, &mut logged);
            to.send_if_modified(|current| {
                let differs = current.as_ref() != Some(&facts);
                *current = Some(facts);
                differs
            });
            let mut is_current = true;
            while is_current {
                let change = tokio::select! {
                    change = changes.next() => change,
                    () = routes.changed() => break,
                    () = to.closed() => return Ok(()),
                };
                let Some((change, _)) = change else { return Err(failed("read from")(closed())) };
                let rest = std::iter::from_fn(|| changes.next().now_or_never().flatten());
                for message in std::iter::once(change).chain(rest.map(|(message, _)| message)) {
                    is_current &= concerns_no_link(&message) || is_address_of(&message, excluded);
                    if may_disturb_programs(&message) {
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

/// Returns true for messages of traffic control. Not for those about a root qdisc, which is a
/// fact of a link.
fn concerns_no_link(message: &Message) -> bool {
    let NetlinkPayload::InnerMessage(message) = &message.payload else { return false };
    if let RouteNetlinkMessage::NewQueueDiscipline(qdisc) | RouteNetlinkMessage::DelQueueDiscipline(qdisc) =
        message
    {
        return qdisc.header.parent != TcHandle::ROOT;
    }
    matches!(
        message,
        RouteNetlinkMessage::NewTrafficFilter(_)
            | RouteNetlinkMessage::DelTrafficFilter(_)
            | RouteNetlinkMessage::NewTrafficClass(_)
            | RouteNetlinkMessage::DelTrafficClass(_)
            | RouteNetlinkMessage::NewTrafficChain(_)
            | RouteNetlinkMessage::DelTrafficChain(_)
    )
}

/// Returns true if the message reports an address that was added to this link or removed from it.
fn is_address_of(message: &Message, link: Option<u32>) -> bool {
    match &message.payload {
        NetlinkPayload::InnerMessage(
            RouteNetlinkMessage::NewAddress(address) | RouteNetlinkMessage::DelAddress(address),
        ) => Some(address.header.index) == link,
        _ => false,
    }
}

/// Returns true if the message reports the removal of a filter, or of a qdisc with filters, that
/// may be shunt's, or a filter of another owner that may run before shunt's.
fn may_disturb_programs(message: &Message) -> bool {
    match &message.payload {
        NetlinkPayload::InnerMessage(RouteNetlinkMessage::DelQueueDiscipline(removed)) => {
            tc::clsact::may_have_had_ours(removed)
        }
        NetlinkPayload::InnerMessage(RouteNetlinkMessage::DelTrafficFilter(removed)) => {
            tc::clsact::may_be_ours(removed)
        }
        NetlinkPayload::InnerMessage(RouteNetlinkMessage::NewTrafficFilter(added)) => {
            tc::clsact::may_be_before_ours(added)
        }
        _ => false,
    }
}

/// Logs each link of an unsupported type once.
fn log_unsupported(links: &[Link], logged: &mut BTreeSet<u32>) {
    for link in links.iter().filter(|link| !link.is_loopback) {
        if let LinkHeader::Other(kind) = link.header
            && logged.insert(link.index)
        {
            tracing::info!(
                link = &*link.name,
                kind,
                "link type is not supported: no programs are attached to this link"
            );
        }
    }
}

/// Lists all links and addresses, again if they change meanwhile, within limits.
async fn list_whole(
    handle: &mut Handle,
    xdp: &mut XdpReader,
    excluded_link: &str,
) -> Result<(NodeFacts, Option<u32>), KernelError> {
    let mut attempts = 1..MAX_DUMP_ATTEMPTS;
    loop {
        match list(handle, xdp, excluded_link).await {
            Err(error) if error.kind() == io::ErrorKind::Interrupted && attempts.next().is_some() => {}
            listed => return listed.map_err(failed("list links and addresses over")),
        }
    }
}

/// Lists all links and addresses. Also returns the index of the excluded link, if it exists.
async fn list(
    handle: &mut Handle,
    xdp: &mut XdpReader,
    excluded_link: &str,
) -> io::Result<(NodeFacts, Option<u32>)> {
    let mut links =
        dump(handle, RouteNetlinkMessage::GetLink(LinkMessage::default()), |answer| match answer {
            RouteNetlinkMessage::NewLink(message) => link(&message),
            _ => None,
        })
        .await?;
    let features = xdp.read();
    for link in &mut links {
        link.xdp = features.get(&link.index).copied().unwrap_or_default();
    }
    links.sort();
    let names: HashMap<u32, Arc<str>> =
        links.iter().map(|link| (link.index, Arc::clone(&link.name))).collect();
    let request = RouteNetlinkMessage::GetAddress(AddressMessage::default());
    let messages = dump(handle, request, |answer| match answer {
        RouteNetlinkMessage::NewAddress(message) => Some(message),
        _ => None,
    })
    .await?;
    let mut addresses: Vec<LinkAddress> =
        messages.iter().filter_map(|message| link_address(message, &names)).collect();
    addresses.retain(|address| ![excluded_link, TUNNEL_LINK].contains(&&*address.link));
    addresses.sort();
    addresses.dedup();
    let excluded = links.iter().find(|link| &*link.name == excluded_link).map(|link| link.index);
    let source_addresses = messages.iter().filter_map(source_address);
    let source_addresses = source_addresses.filter(|source| Some(source.link) != excluded).collect();
    let kernel_chooses_tunnel_source = !*PROGRAMS_CHOOSE_TUNNEL_SOURCE;
    let facts = NodeFacts {
        addresses,
        source_addresses,
        kernel_chooses_tunnel_source,
        links,
        ..NodeFacts::default()
    };
    Ok((facts, excluded))
}

/// Sends a request for a dump, and returns what `read` makes of the answers.
async fn dump<T>(
    handle: &mut Handle,
    request: RouteNetlinkMessage,
    read: impl Fn(RouteNetlinkMessage) -> Option<T>,
) -> io::Result<Vec<T>> {
    let mut request = NetlinkMessage::from(request);
    request.header.flags = NLM_F_REQUEST | NLM_F_DUMP;
    let answers = handle.request(request).map_err(|_| closed())?;
    whole(answers.collect().await, read)
}

/// Returns what `read` makes of the answers to a dump. If the kernel's tables changed during the
/// dump, its list may lack objects: then the error is [`io::ErrorKind::Interrupted`].
fn whole<T>(answers: Vec<Message>, read: impl Fn(RouteNetlinkMessage) -> Option<T>) -> io::Result<Vec<T>> {
    if answers.iter().any(|answer| answer.header.flags & NLM_F_DUMP_INTR != 0) {
        return Err(io::ErrorKind::Interrupted.into());
    }
    let mut list = Vec::new();
    for answer in answers {
        match answer.payload {
            NetlinkPayload::InnerMessage(answer) => list.extend(read(answer)),
            NetlinkPayload::Error(error) if error.code.is_some() => return Err(error.to_io()),
            _ => {}
        }
    }
    Ok(list)
}

fn failed(operation: &'static str) -> impl FnOnce(io::Error) -> KernelError {
    KernelError::call(operation, "rtnetlink")
}

fn closed() -> io::Error {
    io::Error::other("the socket was closed")
}

/// Reads a message of rtnetlink with all readers, for fuzz targets.
#[cfg(feature = "fuzzing")]
pub(super) fn read_any(message: &Message) {
    let names = HashMap::from([(1, "eth0".into())]);
    match &message.payload {
        NetlinkPayload::InnerMessage(RouteNetlinkMessage::NewLink(message)) => drop(link(message)),
        NetlinkPayload::InnerMessage(RouteNetlinkMessage::NewAddress(message)) => {
            link_address(message, &names);
            source_address(message);
        }
        _ => {}
    }
    concerns_no_link(message);
    may_disturb_programs(message);
}

fn link(message: &LinkMessage) -> Option<Link> {
    let name = attribute!(message.attributes, LinkAttribute::IfName(name) => name.as_str().into())?;
    let master = attribute!(message.attributes, LinkAttribute::Controller(master) => *master);
    Some(Link {
        index: message.header.index,
        name,
        master: master.filter(|master| *master != 0),
        header: header(message.header.link_layer_type),
        mtu: attribute!(message.attributes, LinkAttribute::Mtu(mtu) => *mtu).unwrap_or_default(),
        is_up: message.header.flags.contains(LinkFlags::Up),
        is_loopback: message.header.flags.contains(LinkFlags::Loopback),
        is_ifb: is_kind(message, &InfoKind::Ifb),
        bridge_address: bridge_address(message),
        hardware_address: hardware_address(message),
        device: device(message),
        is_bond: is_kind(message, &InfoKind::Bond) || is_kind(message, &InfoKind::Team),
        vlan: vlan(message),
        xdp: XdpFeatures::default(),
        hands_to_peer: hands_to_peer(message),
    })
}

/// Returns which frames a VLAN link takes. `None` if the link beneath is in another network
/// namespace.
fn vlan(message: &LinkMessage) -> Option<Vlan> {
    let link = attribute!(message.attributes, LinkAttribute::Link(link) => *link)?;
    if attribute!(message.attributes, LinkAttribute::LinkNetNsId(namespace) => *namespace).is_some() {
        return None;
    }
    let infos = attribute!(message.attributes, LinkAttribute::LinkInfo(infos) => infos)?;
    let data = attribute!(infos, LinkInfo::Data(InfoData::Vlan(data)) => data)?;
    let id = attribute!(data, InfoVlan::Id(id) => *id)?;
    let protocol = attribute!(data, InfoVlan::Protocol(protocol) => u16::from(*protocol))?;
    Some(Vlan { link, id, protocol })
}

/// Returns what the link is, unless it is built over other links or has none.
fn device(message: &LinkMessage) -> Option<Device> {
    let kind = message.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::LinkInfo(infos) => infos.iter().find_map(|info| match info {
            LinkInfo::Kind(kind) => Some(kind),
            _ => None,
        }),
        _ => None,
    });
    match kind {
        None => Some(Device::Hardware),
        Some(InfoKind::Veth) => Some(Device::Veth),
        Some(_) => None,
    }
}

static COUNTS_FOR_PEER: LazyLock<bool> = LazyLock::new(|| is_kernel_since(6, 7));
static PROGRAMS_CHOOSE_TUNNEL_SOURCE: LazyLock<bool> = LazyLock::new(|| is_kernel_since(5, 19));

fn is_kernel_since(major: u8, minor: u8) -> bool {
    KernelVersion::current().is_ok_and(|version| version >= KernelVersion::new(major, minor, 0))
}

/// Returns true for a veth without a qdisc whose peer is in another network namespace, if the
/// kernel counts packets that are handed to the peer.
fn hands_to_peer(message: &LinkMessage) -> bool {
    let is_abroad =
        attribute!(message.attributes, LinkAttribute::LinkNetNsId(namespace) => *namespace).is_some();
    let has_no_qdisc =
        attribute!(message.attributes, LinkAttribute::Qdisc(kind) => kind == "noqueue").unwrap_or_default();
    *COUNTS_FOR_PEER && is_kind(message, &InfoKind::Veth) && is_abroad && has_no_qdisc
}

fn hardware_address(message: &LinkMessage) -> Option<MacAddress> {
    let address = attribute!(message.attributes, LinkAttribute::Address(address) => address);
    Some(MacAddress(address?.as_slice().try_into().ok()?))
}

fn bridge_address(message: &LinkMessage) -> Option<MacAddress> {
    hardware_address(message).filter(|_| is_kind(message, &InfoKind::Bridge))
}

fn is_kind(message: &LinkMessage, kind: &InfoKind) -> bool {
    let has_kind = |infos: &Vec<LinkInfo>| {
        infos.iter().any(|info| matches!(info, LinkInfo::Kind(other) if other == kind))
    };
    message
        .attributes
        .iter()
        .any(|attribute| matches!(attribute, LinkAttribute::LinkInfo(infos) if has_kind(infos)))
}

/// Maps a link type to its header. The types without a MAC header are those of the kernel's
/// `dev_is_mac_header_xmit` (`include/linux/if_arp.h`).
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

/// Returns the address in a message if packets may leave with it.
fn source_address(message: &AddressMessage) -> Option<SourceAddress> {
    const UNSUITABLE: AddressHeaderFlags = AddressHeaderFlags::Secondary
        .union(AddressHeaderFlags::Deprecated)
        .union(AddressHeaderFlags::Tentative)
        .union(AddressHeaderFlags::Dadfailed);
    let is_suitable =
        message.header.scope == AddressScope::Universe && !message.header.flags.intersects(UNSUITABLE);
    let (link, prefix_len) = (message.header.index, message.header.prefix_len);
    own_address(message).filter(|_| is_suitable).map(|address| SourceAddress { link, address, prefix_len })
}

/// Returns the address in a message. On point-to-point links, `IFA_ADDRESS` is the peer's address.
/// `IFA_LOCAL`, if present, is ours.
fn own_address(message: &AddressMessage) -> Option<IpAddr> {
    let local = attribute!(message.attributes, AddressAttribute::Local(address) => *address);
    local.or_else(|| attribute!(message.attributes, AddressAttribute::Address(address) => *address))
}

/// Returns the address in a message. Returns `None` for IPv6 link-local addresses, which belong to
/// a link and not to the node.
fn link_address(message: &AddressMessage, links: &HashMap<u32, Arc<str>>) -> Option<LinkAddress> {
    let link = links.get(&message.header.index)?;
    let address = own_address(message)?;
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

    use netlink_packet_core::{DoneMessage, NetlinkHeader};
    use netlink_packet_route::tc::TcMessage;

    use super::*;

    #[test]
    fn a_list_that_changed_meanwhile_is_interrupted() {
        let answer = |flags, payload| {
            let mut message = Message::new(NetlinkHeader::default(), payload);
            message.header.flags = flags;
            message
        };
        let link = || NetlinkPayload::InnerMessage(RouteNetlinkMessage::NewLink(LinkMessage::default()));
        let done = || NetlinkPayload::Done(DoneMessage::default());
        let count = |answers| whole(answers, Some).map(|list| list.len()).map_err(|error| error.kind());
        assert_eq!(count(vec![answer(0, link()), answer(0, done())]), Ok(1));
        for flags in [[NLM_F_DUMP_INTR, NLM_F_DUMP_INTR], [0, NLM_F_DUMP_INTR]] {
            let answers = vec![answer(flags[0], link()), answer(flags[1], done())];
            assert_eq!(count(answers), Err(io::ErrorKind::Interrupted));
        }
    }

    #[test]
    fn veth_hands_packets_to_its_peer_abroad_while_it_has_no_qdisc() {
        let message = |qdisc: &str, namespace: Option<i32>| {
            let mut message = LinkMessage::default();
            message.attributes = vec![
                LinkAttribute::LinkInfo(vec![LinkInfo::Kind(InfoKind::Veth)]),
                LinkAttribute::Qdisc(qdisc.into()),
            ];
            message.attributes.extend(namespace.map(LinkAttribute::LinkNetNsId));
            message
        };
        let is_counted = KernelVersion::current().expect("a kernel") >= KernelVersion::new(6, 7, 0);
        assert_eq!(hands_to_peer(&message("noqueue", Some(0))), is_counted);
        assert!(!hands_to_peer(&message("tbf", Some(0))));
        assert!(!hands_to_peer(&message("noqueue", None)));
    }

    #[test]
    fn root_qdisc_concerns_its_link_and_others_do_not() {
        let concerns = |parent| {
            let mut qdisc = TcMessage::default();
            qdisc.header.parent = parent;
            let qdisc = RouteNetlinkMessage::NewQueueDiscipline(qdisc);
            !concerns_no_link(&Message::new(NetlinkHeader::default(), NetlinkPayload::InnerMessage(qdisc)))
        };
        assert!(concerns(TcHandle::ROOT));
        assert!(!concerns(TcHandle::CLSACT));
    }

    #[tokio::test]
    async fn reports_loopback_at_once_and_ends_without_receivers() {
        let (to, mut from) = watch::channel(None);
        let reporting = tokio::spawn(report("none", to, Arc::default()));
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
        tokio::time::timeout(Duration::from_mins(1), reporting)
            .await
            .expect("ends")
            .expect("no panic")
            .expect("no error");
    }
}
