//! Filters of a clsact qdisc (kernel 4.5), over rtnetlink: each under a handle of our own, so that a new program takes the
//! place of the old without a moment in which none runs.

use std::{collections::BTreeSet, io, os::fd::AsRawFd as _};

use netlink_packet_core::{NLM_F_CREATE, NLM_F_DUMP};
use netlink_packet_route::{
    RouteNetlinkMessage,
    tc::{TcAttribute, TcBpfFlags, TcFilterBpf, TcFilterBpfOption, TcHandle, TcHeader, TcMessage, TcOption},
};
use netlink_sys::protocols::NETLINK_ROUTE;

use super::{
    super::super::{KernelError, netlink::NetlinkSocket},
    Attached, Hook, LinkProgram, unless_gone,
};

/// The first of all priorities. Among filters of one priority the kernel asks the newest first (`cls_bpf_change`), so that one that
/// somebody adds later comes before ours, and may keep packets from it.
const PRIORITY: u32 = 1;
/// Of no meaning but that they are ours: "shnt", and the next. With two of them a program can come to stand before somebody else's
/// newer filter before it goes from behind it.
const HANDLES: [u32; 2] = [0x7368_6e74, 0x7368_6e75];
/// Packets of every protocol.
const ETH_P_ALL: u16 = 3;
const CLSACT: &str = "clsact";
const INGRESS: &str = "ingress";
/// The qdisc's own handle.
const QDISC: TcHandle = TcHandle { major: 0xffff, minor: 0 };

impl Hook {
    const fn parent(self) -> TcHandle {
        let minor = match self {
            Self::Ingress => TcHandle::MIN_INGRESS,
            Self::Egress => TcHandle::MIN_EGRESS,
        };
        TcHandle { major: 0xffff, minor }
    }
}

/// A filter of ours on a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filter {
    /// The name it was given: its program's.
    pub name: String,
    /// The id of its program.
    pub program: u32,
    /// No filter of somebody else is asked before it.
    pub is_first: bool,
}

/// A socket to ask and tell through, in the network namespace of the thread that opened it.
pub struct Clsact {
    socket: NetlinkSocket,
}

impl std::fmt::Debug for Clsact {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Clsact").finish_non_exhaustive()
    }
}

impl Clsact {
    /// Opens it.
    pub fn open() -> Result<Self, KernelError> {
        let socket =
            NetlinkSocket::open(NETLINK_ROUTE).map_err(KernelError::call("open", "an rtnetlink socket"))?;
        Ok(Self { socket })
    }

    /// Makes a program run on a link before all others, in the place of ours that is there. Makes the qdisc if there is none.
    pub fn attach(&self, program: LinkProgram<'_>, index: u32, hook: Hook) -> Result<Attached, KernelError> {
        let qdisc = TcMessage::from_parts(header(index, QDISC, TcHandle::CLSACT, 0), vec![kind(CLSACT)]);
        // Without NLM_F_EXCL one that is there is fine, and one of kind ingress, which has no egress, is an error.
        let made = self.tell(NLM_F_CREATE, RouteNetlinkMessage::NewQueueDiscipline(qdisc));
        if let Err(error) = made {
            if self.with_ingress_qdisc().is_ok_and(|links| links.contains(&index)) {
                return Ok(Attached::NoEgress);
            }
            return unless_gone(error, KernelError::call("add a clsact qdisc to", described(index, hook)));
        }
        let options = [
            TcFilterBpfOption::ProgFd(program.fd.as_raw_fd().cast_unsigned()),
            TcFilterBpfOption::ProgName(program.name.into()),
            TcFilterBpfOption::Flags(TcBpfFlags::DirectAction),
        ];
        let options = TcAttribute::Options(options.map(TcOption::Bpf).into());
        let (handle, behind) = self.place(index, hook)?;
        let message = filter(index, hook, handle, vec![kind(TcFilterBpf::KIND), options]);
        match self.tell(NLM_F_CREATE, RouteNetlinkMessage::NewTrafficFilter(message)) {
            Ok(()) => behind.map_or(Ok(Attached::Runs), |behind| {
                self.remove(index, hook, behind).map(|()| Attached::Runs)
            }),
            Err(error) => {
                unless_gone(error, KernelError::call("add a filter of priority 1 to", described(index, hook)))
            }
        }
    }

    /// The links that have a qdisc of kind ingress, by index. It has clsact's handle, so that a link has one or the other.
    pub fn with_ingress_qdisc(&self) -> Result<BTreeSet<u32>, KernelError> {
        let every = TcMessage::from_parts(header(0, TcHandle::UNSPEC, TcHandle::UNSPEC, 0), Vec::new());
        let question = RouteNetlinkMessage::GetQueueDiscipline(every);
        let answers =
            self.socket.query(None, NLM_F_DUMP, question).map_err(KernelError::call("list", "qdiscs"))?;
        let of_ingress = |message| match message {
            RouteNetlinkMessage::NewQueueDiscipline(qdisc) => {
                qdisc.attributes.contains(&kind(INGRESS)).then(|| qdisc.header.index.cast_unsigned())
            }
            _ => None,
        };
        Ok(answers.into_iter().filter_map(of_ingress).collect())
    }

    /// The handle under which a filter is asked first: that of ours that is the first already, else one that is free. With it the
    /// handle of ours that stands behind somebody else's.
    fn place(&self, index: u32, hook: Hook) -> Result<(u32, Option<u32>), KernelError> {
        let filters = self.list(index, hook)?;
        let handle = |message: &TcMessage| u32::from(message.header.handle);
        let ours = filters.iter().position(is_ours);
        Ok(match ours.map(|place| (place, handle(&filters[place]))) {
            None => (HANDLES[0], None),
            Some((0, ours)) => (ours, None),
            Some((_, behind)) => (HANDLES[usize::from(behind == HANDLES[0])], Some(behind)),
        })
    }

    /// The filters of a hook in the order in which they are asked, without what stands for a whole priority, which has no handle.
    fn list(&self, index: u32, hook: Hook) -> Result<Vec<TcMessage>, KernelError> {
        let listed = self.filters(index, hook);
        let mut filters = listed.map_err(KernelError::call("list filters of", described(index, hook)))?;
        filters.retain(|message| u32::from(message.header.handle) != 0);
        Ok(filters)
    }

    /// Our filter on a hook of a link, if there is one.
    pub fn attached(&self, index: u32, hook: Hook) -> Result<Option<Filter>, KernelError> {
        let filters = self.list(index, hook)?;
        let ours = filters.iter().position(is_ours);
        Ok(ours.and_then(|place| our_filter(&filters[place], place == 0)))
    }

    /// Removes our filter of a handle; none is no error.
    fn remove(&self, index: u32, hook: Hook, handle: u32) -> Result<(), KernelError> {
        let filter = filter(index, hook, handle, vec![kind(TcFilterBpf::KIND)]);
        match self.tell(0, RouteNetlinkMessage::DelTrafficFilter(filter)) {
            Err(error) if !is_gone(&error) => {
                Err(KernelError::call("remove the filter of", described(index, hook))(error))
            }
            _ => Ok(()),
        }
    }

    /// Takes our filter off a hook of a link, and the qdisc if that leaves no filter in it: an empty one does nothing. What is
    /// not there is no error.
    pub fn detach(&self, index: u32, hook: Hook) -> Result<(), KernelError> {
        if !self.list(index, hook)?.iter().any(is_ours) {
            return Ok(());
        }
        HANDLES.iter().try_for_each(|handle| self.remove(index, hook, *handle))?;
        for hook in [Hook::Ingress, Hook::Egress] {
            if !self.filters(index, hook).is_ok_and(|filters| filters.is_empty()) {
                return Ok(());
            }
        }
        let qdisc = TcMessage::from_parts(header(index, QDISC, TcHandle::CLSACT, 0), vec![kind(CLSACT)]);
        match self.tell(0, RouteNetlinkMessage::DelQueueDiscipline(qdisc)) {
            Err(error) if !is_gone(&error) => {
                Err(KernelError::call("remove the empty clsact qdisc of", described(index, hook))(error))
            }
            _ => Ok(()),
        }
    }

    fn filters(&self, index: u32, hook: Hook) -> io::Result<Vec<TcMessage>> {
        let any = TcMessage::from_parts(header(index, TcHandle::UNSPEC, hook.parent(), 0), Vec::new());
        let answers = match self.socket.query(None, NLM_F_DUMP, RouteNetlinkMessage::GetTrafficFilter(any)) {
            Err(error) if is_gone(&error) => return Ok(Vec::new()),
            answers => answers?,
        };
        let filter = |message| match message {
            RouteNetlinkMessage::NewTrafficFilter(filter) => Some(filter),
            _ => None,
        };
        Ok(answers.into_iter().filter_map(filter).collect())
    }

    fn tell(&self, flags: u16, message: RouteNetlinkMessage) -> io::Result<()> {
        self.socket.query(None, flags, message).map(drop)
    }
}

/// Whether a filter that was removed may have been ours: with its whole priority it is removed without a handle.
pub fn may_be_ours(removed: &TcMessage) -> bool {
    let TcHeader { handle, parent, info, .. } = &removed.header;
    let is_of_clsact = [Hook::Ingress, Hook::Egress].iter().any(|hook| hook.parent() == *parent);
    let handle = u32::from(*handle);
    is_of_clsact && info >> 16 <= PRIORITY && (handle == 0 || HANDLES.contains(&handle))
}

/// Whether a qdisc that was removed may have held filters of ours.
pub fn may_have_held_ours(removed: &TcMessage) -> bool {
    removed.header.parent == TcHandle::CLSACT
}

fn is_ours(filter: &TcMessage) -> bool {
    filter.header.info >> 16 == PRIORITY && HANDLES.contains(&u32::from(filter.header.handle))
}

fn our_filter(message: &TcMessage, is_first: bool) -> Option<Filter> {
    let options = message.attributes.iter().find_map(|attribute| match attribute {
        TcAttribute::Options(options) => Some(options),
        _ => None,
    })?;
    let name = options.iter().find_map(|option| match option {
        TcOption::Bpf(TcFilterBpfOption::ProgName(name)) => Some(name.clone()),
        _ => None,
    })?;
    let program = options.iter().find_map(|option| match option {
        TcOption::Bpf(TcFilterBpfOption::ProgId(id)) => Some(*id),
        _ => None,
    })?;
    Some(Filter { name, program, is_first })
}

/// There is no such filter, qdisc or link. The kernel says EINVAL where there is no qdisc, and EOPNOTSUPP where it knows none.
fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EINVAL | libc::ENODEV | libc::EOPNOTSUPP))
}

fn filter(index: u32, hook: Hook, handle: u32, attributes: Vec<TcAttribute>) -> TcMessage {
    let every_protocol = u32::from(ETH_P_ALL.to_be());
    TcMessage::from_parts(
        header(index, handle.into(), hook.parent(), PRIORITY << 16 | every_protocol),
        attributes,
    )
}

fn header(index: u32, handle: TcHandle, parent: TcHandle, info: u32) -> TcHeader {
    TcHeader { index: index.cast_signed(), handle, parent, info, ..TcHeader::default() }
}

fn kind(kind: &str) -> TcAttribute {
    TcAttribute::Kind(kind.into())
}

fn described(index: u32, hook: Hook) -> String {
    let hook = match hook {
        Hook::Ingress => "ingress",
        Hook::Egress => "egress",
    };
    format!("{hook} of link {index}")
}
