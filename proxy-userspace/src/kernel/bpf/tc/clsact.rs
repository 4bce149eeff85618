//! Attaches programs as filters of a clsact qdisc (kernel 4.5), over rtnetlink. Each filter has one
//! of our handles, so that a new program replaces the old one without a gap.

use std::{collections::BTreeSet, io, os::fd::AsRawFd as _};

use netlink_packet_core::{NLM_F_CREATE, NLM_F_DUMP};
use netlink_packet_route::{
    RouteNetlinkMessage,
    tc::{TcAttribute, TcBpfFlags, TcFilterBpf, TcFilterBpfOption, TcHandle, TcHeader, TcMessage, TcOption},
};
use netlink_sys::protocols::NETLINK_ROUTE;

use super::{
    super::super::{
        KernelError,
        netlink::{NetlinkSocket, attribute},
    },
    AttachOutcome, Attached, Hook, LinkProgram, link_gone_or,
};

/// The first priority. Among filters of one priority the kernel runs the newest first
/// (`cls_bpf_change`). A filter that another owner adds later runs before ours, and may keep
/// packets from it.
const PRIORITY: u32 = 1;
/// Our handles: "shnt" and the next number. With two handles a program can be attached before a
/// newer filter of another owner, and only then removed from behind it.
const HANDLES: [u32; 2] = [0x7368_6e74, 0x7368_6e75];
/// All protocols.
const ETH_P_ALL: u16 = 3;
const CLSACT: &str = "clsact";
const INGRESS: &str = "ingress";
/// The handle of the qdisc.
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

/// One of our filters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filter {
    /// The name, which is that of its program.
    pub name: String,
    /// Its program, and the filter of another owner that runs before it.
    pub attached: Attached,
}

/// An rtnetlink socket in the network namespace of the thread that opened it.
#[derive(Debug)]
pub struct Clsact {
    socket: NetlinkSocket,
}

impl Clsact {
    /// Opens a socket.
    pub fn open() -> Result<Self, KernelError> {
        let socket =
            NetlinkSocket::open(NETLINK_ROUTE).map_err(KernelError::call("open", "an rtnetlink socket"))?;
        Ok(Self { socket })
    }

    /// Attaches a program to a link, before all others. It replaces our filter if there is one.
    /// Creates the qdisc if there is none.
    pub fn attach(
        &self,
        program: LinkProgram<'_>,
        index: u32,
        hook: Hook,
    ) -> Result<AttachOutcome, KernelError> {
        let qdisc = TcMessage::from_parts(header(index, QDISC, TcHandle::CLSACT, 0), vec![kind(CLSACT)]);
        // Without NLM_F_EXCL an existing clsact qdisc is no error. A qdisc of kind ingress is one:
        // it has no egress hook.
        let created = self.request(NLM_F_CREATE, RouteNetlinkMessage::NewQueueDiscipline(qdisc));
        if let Err(error) = created {
            if self.with_ingress_qdisc().is_ok_and(|links| links.contains(&index)) {
                return Ok(AttachOutcome::NoEgressHook);
            }
            return link_gone_or(error, KernelError::call("add a clsact qdisc to", describe(index, hook)));
        }
        let options = [
            TcFilterBpfOption::ProgFd(program.fd.as_raw_fd().cast_unsigned()),
            TcFilterBpfOption::ProgName(program.name.into()),
            TcFilterBpfOption::Flags(TcBpfFlags::DirectAction),
        ];
        let options = TcAttribute::Options(options.map(TcOption::Bpf).into());
        let (handle, behind) = self.choose_handle(index, hook)?;
        let message = filter(index, hook, handle, vec![kind(TcFilterBpf::KIND), options]);
        match self.request(NLM_F_CREATE, RouteNetlinkMessage::NewTrafficFilter(message)) {
            Ok(()) => behind.map_or(Ok(AttachOutcome::Attached), |behind| {
                self.remove(index, hook, behind).map(|()| AttachOutcome::Attached)
            }),
            Err(error) => {
                link_gone_or(error, KernelError::call("add a filter of priority 1 to", describe(index, hook)))
            }
        }
    }

    /// Returns the indexes of the links that have a qdisc of kind ingress. It has the same handle
    /// as a clsact qdisc, so that a link has one or the other.
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

    /// Returns the handle for a filter that runs first: that of our filter if it is the first
    /// already, otherwise a free one. Also returns the handle of our filter that runs behind
    /// another owner's.
    fn choose_handle(&self, index: u32, hook: Hook) -> Result<(u32, Option<u32>), KernelError> {
        let filters = self.list(index, hook)?;
        let handle = |message: &TcMessage| u32::from(message.header.handle);
        let ours = filters.iter().position(is_ours);
        Ok(match ours.map(|position| (position, handle(&filters[position]))) {
            None => (HANDLES[0], None),
            Some((0, ours)) => (ours, None),
            Some((_, behind)) => (HANDLES[usize::from(behind == HANDLES[0])], Some(behind)),
        })
    }

    /// Returns the filters of a hook in the order in which they run. Leaves out items that stand
    /// for a whole priority, which have no handle.
    fn list(&self, index: u32, hook: Hook) -> Result<Vec<TcMessage>, KernelError> {
        let listed = self.filters(index, hook);
        let mut filters = listed.map_err(KernelError::call("list filters of", describe(index, hook)))?;
        filters.retain(|message| u32::from(message.header.handle) != 0);
        Ok(filters)
    }

    /// Returns our filter on a hook of a link, if there is one.
    pub fn attached(&self, index: u32, hook: Hook) -> Result<Option<Filter>, KernelError> {
        let filters = self.list(index, hook)?;
        let ours = filters.iter().position(is_ours);
        Ok(ours.and_then(|position| {
            let behind = filters.first().filter(|_| position > 0).map(filter_name);
            our_filter(&filters[position], behind)
        }))
    }

    /// Removes our filter with a handle. It is no error if there is none.
    fn remove(&self, index: u32, hook: Hook, handle: u32) -> Result<(), KernelError> {
        let filter = filter(index, hook, handle, vec![kind(TcFilterBpf::KIND)]);
        match self.request(0, RouteNetlinkMessage::DelTrafficFilter(filter)) {
            Err(error) if !is_gone(&error) => {
                Err(KernelError::call("remove the filter of", describe(index, hook))(error))
            }
            _ => Ok(()),
        }
    }

    /// Removes our filter from a hook of a link, and the qdisc if it has no other filter. It is no
    /// error if there is none.
    pub fn detach(&self, index: u32, hook: Hook) -> Result<(), KernelError> {
        if !self.list(index, hook)?.iter().any(is_ours) {
            return Ok(());
        }
        self.remove_filter(index, hook)?;
        self.remove_empty_qdisc(index)
    }

    /// Removes our filter from a hook of a link. It is no error if there is none. The qdisc stays.
    pub fn remove_filter(&self, index: u32, hook: Hook) -> Result<(), KernelError> {
        HANDLES.iter().try_for_each(|handle| self.remove(index, hook, *handle))
    }

    /// Removes the qdisc of a link if it has no filter. It is no error if there is none.
    ///
    /// The kernel drops all packets that leave on the link for some milliseconds: `qdisc_graft`
    /// deactivates the link and waits for an RCU grace period (`net/sched/sch_api.c`).
    pub fn remove_empty_qdisc(&self, index: u32) -> Result<(), KernelError> {
        for hook in [Hook::Ingress, Hook::Egress] {
            if !self.filters(index, hook).is_ok_and(|filters| filters.is_empty()) {
                return Ok(());
            }
        }
        let qdisc = TcMessage::from_parts(header(index, QDISC, TcHandle::CLSACT, 0), vec![kind(CLSACT)]);
        match self.request(0, RouteNetlinkMessage::DelQueueDiscipline(qdisc)) {
            Err(error) if !is_gone(&error) => {
                Err(KernelError::call("remove the empty clsact qdisc of", format!("link {index}"))(error))
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

    fn request(&self, flags: u16, message: RouteNetlinkMessage) -> io::Result<()> {
        self.socket.query(None, flags, message).map(drop)
    }
}

/// Returns true if a removed filter may have been ours. If a whole priority is removed, the message
/// has no handle.
pub fn may_be_ours(removed: &TcMessage) -> bool {
    let handle = u32::from(removed.header.handle);
    is_of_our_hooks(removed) && (handle == 0 || HANDLES.contains(&handle))
}

/// Returns true for filters of a clsact qdisc with our priority, or a lower number.
fn is_of_our_hooks(filter: &TcMessage) -> bool {
    let TcHeader { parent, info, .. } = &filter.header;
    let is_of_clsact = [Hook::Ingress, Hook::Egress].iter().any(|hook| hook.parent() == *parent);
    is_of_clsact && info >> 16 <= PRIORITY
}

/// Returns true if an added filter is another owner's and may run before ours.
pub fn may_be_before_ours(added: &TcMessage) -> bool {
    is_of_our_hooks(added) && !is_ours(added)
}

/// Returns true if a removed qdisc may have had our filters.
pub fn may_have_had_ours(removed: &TcMessage) -> bool {
    removed.header.parent == TcHandle::CLSACT
}

fn is_ours(filter: &TcMessage) -> bool {
    filter.header.info >> 16 == PRIORITY && HANDLES.contains(&u32::from(filter.header.handle))
}

fn our_filter(message: &TcMessage, behind: Option<String>) -> Option<Filter> {
    let options = attribute!(message.attributes, TcAttribute::Options(options) => options)?;
    let name = attribute!(options, TcOption::Bpf(TcFilterBpfOption::ProgName(name)) => name.clone())?;
    let program = attribute!(options, TcOption::Bpf(TcFilterBpfOption::ProgId(id)) => *id)?;
    Some(Filter { name, attached: Attached { program, behind } })
}

/// Returns the name of a filter's program, or the kind of a filter without one.
fn filter_name(message: &TcMessage) -> String {
    let options = attribute!(message.attributes, TcAttribute::Options(options) => options);
    let name = options.and_then(
        |options| attribute!(options, TcOption::Bpf(TcFilterBpfOption::ProgName(name)) => name.clone()),
    );
    let kind = || attribute!(message.attributes, TcAttribute::Kind(kind) => kind.clone());
    name.or_else(kind).unwrap_or_else(|| "a filter".into())
}

/// Returns true if the filter, qdisc or link does not exist. The kernel returns EINVAL if the link
/// has no qdisc, and EOPNOTSUPP if it was built without this kind of qdisc.
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

fn describe(index: u32, hook: Hook) -> String {
    let hook = match hook {
        Hook::Ingress => "ingress",
        Hook::Egress => "egress",
    };
    format!("{hook} of link {index}")
}
