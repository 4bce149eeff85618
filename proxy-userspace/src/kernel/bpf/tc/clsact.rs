//! Filters of a clsact qdisc (kernel 4.5), over rtnetlink: each under a handle of our own, so that a new program takes the
//! place of the old without a moment in which none runs.

use std::{io, os::fd::AsRawFd as _};

use netlink_packet_core::{NLM_F_CREATE, NLM_F_DUMP};
use netlink_packet_route::{
    RouteNetlinkMessage,
    tc::{TcAttribute, TcBpfFlags, TcFilterBpf, TcFilterBpfOption, TcHandle, TcHeader, TcMessage, TcOption},
};
use netlink_sys::{Socket, protocols::NETLINK_ROUTE};

use super::{
    super::super::{KernelError, netlink},
    Attached, Hook, LinkProgram, unless_gone,
};

/// The first of all priorities: others are asked after ours.
const PRIORITY: u32 = 1;
/// Of no meaning but that it is ours: "shnt".
const HANDLE: u32 = 0x7368_6e74;
/// Packets of every protocol.
const ETH_P_ALL: u16 = 3;
const CLSACT: &str = "clsact";
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
}

/// A socket to ask and tell through, in the network namespace of the thread that opened it.
pub struct Clsact {
    socket: Socket,
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
            netlink::open(NETLINK_ROUTE).map_err(KernelError::call("open", "an rtnetlink socket"))?;
        Ok(Self { socket })
    }

    /// Makes a program run on a link, in the place of what is there under our handle. Makes the qdisc if there is none.
    pub fn attach(&self, program: LinkProgram<'_>, index: u32, hook: Hook) -> Result<Attached, KernelError> {
        let qdisc = TcMessage::from_parts(header(index, QDISC, TcHandle::CLSACT, 0), vec![kind(CLSACT)]);
        // Without NLM_F_EXCL one that is there is fine, and one of kind ingress, which has no egress, is an error.
        let made = self.tell(NLM_F_CREATE, RouteNetlinkMessage::NewQueueDiscipline(qdisc));
        if let Err(error) = made {
            return unless_gone(error, KernelError::call("add a clsact qdisc to", described(index, hook)));
        }
        let options = [
            TcFilterBpfOption::ProgFd(program.fd.as_raw_fd().cast_unsigned()),
            TcFilterBpfOption::ProgName(program.name.into()),
            TcFilterBpfOption::Flags(TcBpfFlags::DirectAction),
        ];
        let options = TcAttribute::Options(options.map(TcOption::Bpf).into());
        let filter = filter(index, hook, vec![kind(TcFilterBpf::KIND), options]);
        match self.tell(NLM_F_CREATE, RouteNetlinkMessage::NewTrafficFilter(filter)) {
            Ok(()) => Ok(Attached::Runs),
            Err(error) => {
                unless_gone(error, KernelError::call("add a filter of priority 1 to", described(index, hook)))
            }
        }
    }

    /// Our filter on a hook of a link, if there is one.
    pub fn attached(&self, index: u32, hook: Hook) -> Result<Option<Filter>, KernelError> {
        let filters = self
            .filters(index, hook)
            .map_err(KernelError::call("list filters of", described(index, hook)))?;
        Ok(filters.iter().filter(|message| is_ours(message)).find_map(our_filter))
    }

    /// Takes our filter off a hook of a link, and the qdisc if that leaves no filter in it: an empty one does nothing. What is
    /// not there is no error.
    pub fn detach(&self, index: u32, hook: Hook) -> Result<(), KernelError> {
        let removed = self.tell(
            0,
            RouteNetlinkMessage::DelTrafficFilter(filter(index, hook, vec![kind(TcFilterBpf::KIND)])),
        );
        match removed {
            Ok(()) => {}
            Err(error) if is_gone(&error) => return Ok(()),
            Err(error) => {
                return Err(KernelError::call("remove the filter of", described(index, hook))(error));
            }
        }
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
        let answers =
            match netlink::ask(&self.socket, None, NLM_F_DUMP, RouteNetlinkMessage::GetTrafficFilter(any)) {
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
        netlink::tell(&self.socket, None, flags, message)
    }
}

/// Whether a filter that was removed may have been ours: with its whole priority it is removed without a handle.
pub fn may_be_ours(removed: &TcMessage) -> bool {
    let TcHeader { handle, parent, info, .. } = &removed.header;
    let is_of_clsact = [Hook::Ingress, Hook::Egress].iter().any(|hook| hook.parent() == *parent);
    is_of_clsact && info >> 16 <= PRIORITY && [0, HANDLE].contains(&u32::from(*handle))
}

/// Whether a qdisc that was removed may have held filters of ours.
pub fn may_have_held_ours(removed: &TcMessage) -> bool {
    removed.header.parent == TcHandle::CLSACT
}

fn is_ours(filter: &TcMessage) -> bool {
    filter.header.info >> 16 == PRIORITY && u32::from(filter.header.handle) == HANDLE
}

fn our_filter(message: &TcMessage) -> Option<Filter> {
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
    Some(Filter { name, program })
}

/// There is no such filter, qdisc or link. The kernel says EINVAL where there is no qdisc, and EOPNOTSUPP where it knows none.
fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EINVAL | libc::ENODEV | libc::EOPNOTSUPP))
}

fn filter(index: u32, hook: Hook, attributes: Vec<TcAttribute>) -> TcMessage {
    let every_protocol = u32::from(ETH_P_ALL.to_be());
    TcMessage::from_parts(
        header(index, HANDLE.into(), hook.parent(), PRIORITY << 16 | every_protocol),
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
