//! Lists the filters and programs that others attached to links, at the hooks where shunt's link
//! programs are: those of clsact and ingress qdiscs (rtnetlink), and of TCX (kernel 6.6).

use std::{collections::BTreeMap, io, sync::Arc};

use libc::{IFLA_IFNAME, IFLA_INFO_KIND, IFLA_LINKINFO, RTM_GETLINK, RTM_GETQDISC, RTM_GETTFILTER, c_int};
use netlink_packet_core::NLM_F_DUMP;
use netlink_sys::protocols::NETLINK_ROUTE;

use super::{
    KernelError,
    bpf::tc::{Hook, tcx},
    netlink::{Attributes, NetlinkSocket, kernel_constants, uninterrupted},
};

// include/uapi/linux/rtnetlink.h, pkt_cls.h and tc_act/tc_mirred.h.
kernel_constants! {
    TCA_KIND = 1,
    TCA_OPTIONS = 2,
    TCA_BPF_NAME = 7,
    TCA_U32_DIVISOR = 4,
    TCA_U32_ACT = 7,
    TCA_MATCHALL_ACT = 2,
    TCA_ACT_KIND = 1,
    TCA_ACT_OPTIONS = 2,
    TCA_MIRRED_PARMS = 2,
    TCA_EGRESS_REDIR = 1,
}

/// The length of `struct ifinfomsg`.
const LINK_HEADER: usize = 16;
/// The length of `struct tcmsg`.
const TC_HEADER: usize = 20;
/// The position of the link's index in both headers.
const INDEX: usize = 4;

/// A filter or program of another owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkFilter {
    /// The name of the link.
    pub link: Arc<str>,
    /// The hook.
    pub hook: Hook,
    /// The kind of the filter, such as `bpf` or `u32`; `tcx` for programs of TCX.
    pub kind: String,
    /// The name of the program, if it has one.
    pub name: Option<String>,
    /// The kind of the link to which the filter redirects packets, if it does nothing else.
    pub redirects_to: Option<String>,
}

/// A link's name and kind. The kind is empty for physical links.
struct LinkName {
    name: Arc<str>,
    kind: String,
}

/// Lists the filters and programs of this network namespace, without programs whose names begin
/// with `own_prefix`.
pub fn list(own_prefix: &str) -> Result<Vec<LinkFilter>, KernelError> {
    let failed = || KernelError::call("list", "filters of links");
    let socket = NetlinkSocket::open(NETLINK_ROUTE).map_err(failed())?;
    let links = uninterrupted(|| links(&socket)).map_err(failed())?;
    let mut filters = Vec::new();
    for (index, hook) in uninterrupted(|| hooks_with_qdiscs(&socket)).map_err(failed())? {
        let of_hook = uninterrupted(|| filters_of(&socket, index, hook, &links));
        filters.extend(of_hook.map_err(failed())?);
    }
    if tcx::probe().is_ok() {
        for LinkName { name, .. } in links.values() {
            for hook in [Hook::Ingress, Hook::Egress] {
                let program = |program: String| LinkFilter {
                    link: Arc::clone(name),
                    hook,
                    kind: "tcx".into(),
                    name: Some(program).filter(|name| !name.is_empty()),
                    redirects_to: None,
                };
                filters.extend(tcx::names(name, hook)?.into_iter().map(program));
            }
        }
    }
    filters.retain(|filter| filter.name.as_ref().is_none_or(|name| !name.starts_with(own_prefix)));
    Ok(filters)
}

fn links(socket: &NetlinkSocket) -> io::Result<BTreeMap<u32, LinkName>> {
    let mut links = BTreeMap::new();
    let mut answers = socket.request(RTM_GETLINK, NLM_F_DUMP, [0; LINK_HEADER], |_| {})?;
    while let Some(answer) = answers.next()? {
        let attributes = attributes_after(answer.payload(), LINK_HEADER);
        let kind =
            attributes.nested(c_int::from(IFLA_LINKINFO)).and_then(|info| info.string(IFLA_INFO_KIND.into()));
        let name = attributes.string(IFLA_IFNAME.into()).unwrap_or_default().into();
        let kind = kind.unwrap_or_default().to_owned();
        links.extend(word(answer.payload(), INDEX).map(|index| (index, LinkName { name, kind })));
    }
    Ok(links)
}

fn attributes_after(payload: &[u8], header: usize) -> Attributes<'_> {
    Attributes(payload.get(header..).unwrap_or_default())
}

fn word(payload: &[u8], at: usize) -> Option<u32> {
    payload.get(at..)?.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes))
}

/// Returns the hooks of all links that have a qdisc for filters.
fn hooks_with_qdiscs(socket: &NetlinkSocket) -> io::Result<Vec<(u32, Hook)>> {
    let mut answers = match socket.request(RTM_GETQDISC, NLM_F_DUMP, [0; TC_HEADER], |_| {}) {
        // The kernel was built without traffic control.
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => return Ok(Vec::new()),
        answers => answers?,
    };
    let mut hooks = Vec::new();
    while let Some(answer) = answers.next()? {
        let kind = attributes_after(answer.payload(), TC_HEADER).string(TCA_KIND);
        let found: &[Hook] = match kind {
            Some("clsact") => &[Hook::Ingress, Hook::Egress],
            Some("ingress") => &[Hook::Ingress],
            _ => &[],
        };
        let index = word(answer.payload(), INDEX).unwrap_or_default();
        hooks.extend(found.iter().map(|hook| (index, *hook)));
    }
    Ok(hooks)
}

/// Lists the filters of a hook. A link that is gone has none.
fn filters_of(
    socket: &NetlinkSocket,
    index: u32,
    hook: Hook,
    links: &BTreeMap<u32, LinkName>,
) -> io::Result<Vec<LinkFilter>> {
    // TC_H_CLSACT with TC_H_MIN_INGRESS or TC_H_MIN_EGRESS. The ingress qdisc takes the first, too.
    let parent: u32 = match hook {
        Hook::Ingress => 0xffff_fff2,
        Hook::Egress => 0xffff_fff3,
    };
    let mut header = [0; TC_HEADER];
    header[INDEX..8].copy_from_slice(&index.to_ne_bytes());
    header[12..16].copy_from_slice(&parent.to_ne_bytes());
    let link =
        links.get(&index).map_or_else(|| format!("link {index}").into(), |link| Arc::clone(&link.name));
    let mut filters = Vec::new();
    let mut answers = socket.request(RTM_GETTFILTER, NLM_F_DUMP, header, |_| {})?;
    loop {
        match answers.next() {
            Err(error)
                if matches!(error.raw_os_error(), Some(libc::ENODEV | libc::EINVAL | libc::ENOENT)) =>
            {
                return Ok(Vec::new());
            }
            answer => match answer? {
                Some(answer) => {
                    filters.extend(filter(attributes_after(answer.payload(), TC_HEADER), &link, hook, links));
                }
                None => return Ok(filters),
            },
        }
    }
}

/// Reads an answer as a filter of a link, for fuzz targets.
#[cfg(feature = "fuzzing")]
pub(super) fn read_any(payload: &[u8]) -> Option<LinkFilter> {
    let links = BTreeMap::from([(1, LinkName { name: "eth0".into(), kind: "ifb".into() })]);
    filter(attributes_after(payload, TC_HEADER), &"eth0".into(), Hook::Ingress, &links)
}

/// Reads a filter; `None` for items that stand for a whole priority, or for a hash table of u32.
fn filter(
    attributes: Attributes<'_>,
    link: &Arc<str>,
    hook: Hook,
    links: &BTreeMap<u32, LinkName>,
) -> Option<LinkFilter> {
    let kind = attributes.string(TCA_KIND)?.to_owned();
    let options = attributes.nested(TCA_OPTIONS)?;
    if kind == "u32" && options.get(TCA_U32_DIVISOR).is_some() {
        return None;
    }
    let name = options.string(TCA_BPF_NAME).filter(|_| kind == "bpf").map(str::to_owned);
    let actions = match &*kind {
        "u32" => options.nested(TCA_U32_ACT),
        "matchall" => options.nested(TCA_MATCHALL_ACT),
        _ => None,
    };
    let target = actions.and_then(redirection).and_then(|index| links.get(&index));
    let redirects_to = target.map(|target| target.kind.clone());
    Some(LinkFilter { link: Arc::clone(link), hook, kind, name, redirects_to })
}

/// Returns the index of the link to which the only action of a filter redirects packets.
fn redirection(actions: Attributes<'_>) -> Option<u32> {
    let mut actions = actions.iter();
    let (Some((_, action)), None) = (actions.next(), actions.next()) else { return None };
    let action = Attributes(action);
    let parameters = action.nested(TCA_ACT_OPTIONS)?.get(TCA_MIRRED_PARMS)?;
    // `struct tc_mirred`: five words that all actions have, the kind of redirection, the link.
    let is_redirection = word(parameters, 20)? == TCA_EGRESS_REDIR.cast_unsigned();
    (action.string(TCA_ACT_KIND)? == "mirred" && is_redirection).then(|| word(parameters, 24)).flatten()
}
