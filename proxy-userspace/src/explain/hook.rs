//! Finds out what sees the first packet of a connection.

use super::{Hook, Location, Question, Situation, client::Whereabouts};
use crate::{
    mode::Mode,
    model::{LinkPath, Protocol, SocketScope},
};

/// What sees the connection.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    pub(super) hook: Hook,
    /// Whose rules decide. `None` if nothing sees it.
    pub(super) rules: Option<Mode>,
    pub(super) reason: String,
}

impl Seen {
    fn new(hook: Hook, rules: Option<Mode>, reason: impl Into<String>) -> Self {
        Self { hook, rules, reason: reason.into() }
    }

    /// Returns true at the client's socket.
    pub(super) fn is_socket(&self) -> bool {
        self.hook == Hook::Socket
    }
}

/// Finds the hook.
pub(super) fn find(situation: Situation<'_>, client: &Whereabouts, question: &Question) -> Seen {
    if situation.mode != Mode::Ebpf {
        let reason = format!("the rules of the {} mode translate every packet", situation.mode);
        return Seen::new(Hook::Netfilter, Some(situation.mode), reason);
    }
    if question.protocol == Protocol::Sctp {
        return backstop(situation, "the programs do not translate SCTP");
    }
    match client.location {
        Location::Outside => link(situation, "packets from outside come in on a link"),
        _ if question.outside_cgroup && client.location == Location::Node => {
            backstop(situation, "the process is outside the cgroup whose sockets are served")
        }
        _ if question.outside_cgroup => link(
            situation,
            "the process is outside the cgroup whose sockets are served; its packets come in on the pod's link",
        ),
        Location::Node => socket("sockets of this node are served"),
        Location::Pod => of_pod(situation, client),
    }
}

fn of_pod(situation: Situation<'_>, client: &Whereabouts) -> Seen {
    let node = &situation.model.snapshot().node;
    let is_exempt = client.address.is_some_and(|address| node.exempt_addresses.contains(&address));
    match &node.socket_scope {
        SocketScope::Node => link(
            situation,
            "only sockets of the node itself are served; the pod's packets come in on its link",
        ),
        SocketScope::AllBut(_) if is_exempt => link(
            situation,
            "the pod redirects its own packets, so its sockets are left alone; its packets come in on its link",
        ),
        _ => socket("sockets of pods are served"),
    }
}

fn socket(reason: &str) -> Seen {
    Seen::new(Hook::Socket, Some(Mode::Ebpf), reason)
}

fn link(situation: Situation<'_>, reason: &str) -> Seen {
    match &situation.model.snapshot().node.link_path {
        LinkPath::Programs | LinkPath::Direct { .. } => Seen::new(Hook::Link, Some(Mode::Ebpf), reason),
        LinkPath::Netfilter { why } => {
            backstop(situation, &format!("{reason}, and netfilter translates on links: {why}"))
        }
    }
}

fn backstop(situation: Situation<'_>, reason: &str) -> Seen {
    match situation.backstop {
        Some(mode) => Seen::new(
            Hook::Backstop,
            Some(mode),
            format!("{reason}; the {mode} rules of the backstop translate it"),
        ),
        None => Seen::new(Hook::Nothing, None, format!("{reason}, and there is no backstop (--backstop)")),
    }
}
