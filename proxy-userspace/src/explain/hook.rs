//! Finds out what sees the first packet of a connection.

use super::{Hook, Location, Question, Situation, client::Whereabouts};
use crate::{
    dataplane::ebpf::leaves_sockets_of_pods,
    mode::Mode,
    model::{FrontendKind, IpFamily, LinkPath, Owner, Protocol, SocketScope},
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

/// Returns what sees a connection to this Service. Where the source of packets decides, the socket
/// programs leave the sockets of pods alone, because these have no source before they connect.
pub(super) fn of_service(
    situation: Situation<'_>,
    client: &Whereabouts,
    seen: Seen,
    owner: Owner<'_>,
    family: IpFamily,
) -> Seen {
    let Owner { port, kind, .. } = owner;
    let node = &situation.model.snapshot().node;
    let is_of_pod = seen.is_socket() && client.location == Location::Pod;
    if !is_of_pod || !leaves_sockets_of_pods(port, kind, node, family) {
        return seen;
    }
    let has_ranges = kind == FrontendKind::LoadBalancerIp && !port.source_ranges.is_empty();
    let why = if has_ranges {
        "the Service has source ranges"
    } else {
        "the policy is Local, and no local detection tells pods from others"
    };
    link(situation, &format!("{why}, so the socket is left alone; its packets come in on the pod's link"))
}

/// Returns that the backstop sees a connection to no service port, which the programs pass
/// unchanged.
pub(super) fn passed_to_backstop(mode: Mode, seen: &Seen) -> Seen {
    let by = if seen.is_socket() { "socket" } else { "link" };
    let reason =
        format!("the {by} program passes it unchanged; the {mode} rules of the backstop see it next");
    Seen::new(Hook::Backstop, Some(mode), reason)
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
