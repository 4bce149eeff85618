//! The backstop: a netfilter dataplane beneath the programs of the ebpf mode.
//!
//! Programs translate a packet before netfilter sees it. A translated packet carries no VIP any
//! more, so the rules of the backstop do not match it. They serve what still carries a VIP when
//! netfilter sees it, with the semantics of kube-proxy.
//!
//! Order: the backstop is in place before the programs change, and it is removed after they
//! changed. Connections that it translates are in conntrack and go on after its removal.

#[cfg(test)]
mod tests;

use std::{collections::BTreeSet, error::Error, fmt, mem, sync::Arc};

use super::{
    DisplacedLink, FailureScope, Held, HeldReader, KernelCounts, LeftOutPort, MapFill, Mode,
    ModeMetricsReader, RenderError, Renderer,
    conntrack::StaleUdpDeletion,
    ebpf::{TracingPrograms, depends_on_source, leaves_pods_to_links},
    sctp_ports::SctpPorts,
};
use crate::{
    causes::with_causes,
    mode::BackstopPolicy,
    model::{
        Dirty, LinkPath, LocalTrafficDetector, NodeView, ResolvedPort, ServicePortKey, Snapshot, SocketScope,
    },
};

/// Why the backstop is in place.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum BackstopNeed {
    /// The setting is `always`.
    Setting,
    /// A Service has an SCTP port. The programs translate only TCP and UDP.
    Sctp,
    /// Netfilter translates all packets that come in on links, for this reason.
    Links(Arc<str>),
    /// These links have no room for programs.
    LeftOutLinks(Vec<Arc<str>>),
    /// A Service has source ranges, about which programs at sockets of pods and of other containers
    /// cannot decide, and not all links have programs.
    SourceRanges,
    /// A Service has externalTrafficPolicy Local, programs at sockets cannot tell pods of this node
    /// from other clients, and not all links have programs.
    ExternalPolicy,
    /// The sockets of all pods are left alone, and not all links have programs.
    PodSockets,
}

impl BackstopNeed {
    /// Returns the value of the label `why`.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Setting => "setting",
            Self::Sctp => "sctp",
            Self::Links(_) => "links",
            Self::LeftOutLinks(_) => "left-out-links",
            Self::SourceRanges => "source-ranges",
            Self::ExternalPolicy => "external-policy",
            Self::PodSockets => "pod-sockets",
        }
    }
}

impl fmt::Display for BackstopNeed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Setting => "shunt.backstop is always",
            Self::Sctp => "a Service has an SCTP port, which the programs do not translate",
            Self::Links(why) => {
                return write!(f, "netfilter translates the packets that come in on links: {why}");
            }
            Self::LeftOutLinks(links) => {
                return write!(f, "there is no room for programs on the links {}", links.join(", "));
            }
            Self::SourceRanges => {
                "a Service has source ranges, which programs at sockets of pods cannot check, and not all links have programs"
            }
            Self::ExternalPolicy => {
                "a Service has externalTrafficPolicy Local, the node's pods are not known (clusterCIDR), and not all links have programs"
            }
            Self::PodSockets => {
                "the sockets of pods are left alone (masqueradeAll or shunt.sockets.scope), and not all links have programs"
            }
        })
    }
}

/// What serves as the backstop, and why it is in place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackstopStatus {
    /// The netfilter mode.
    pub mode: Mode,
    /// The needs, sorted. Not empty.
    pub needs: Vec<BackstopNeed>,
}

/// The backstop could not be programmed. The programs serve everything that they can.
#[derive(Debug, thiserror::Error)]
pub enum BackstopError {
    /// It cannot be created, or its rules cannot be written.
    #[error("cannot program the backstop, so what the programs cannot translate is not served")]
    Failed(#[source] Arc<dyn Error + Send + Sync>),
    /// Its rules leave out some service ports.
    #[error("the backstop leaves out service ports")]
    LeftOut(#[source] Box<dyn Error + Send + Sync>),
}

const SCTP_NEEDS_RULES: &str =
    "the programs do not translate SCTP, and shunt.backstop is never: set it to auto";

/// Returns true if an error leaves out service ports, and everything else was rendered.
fn leaves_only_ports_out(error: &RenderError) -> bool {
    error.scope() == FailureScope::ServicePorts
}

/// Creates the renderer of a netfilter mode that works on this node.
pub type CreateBackstop =
    Box<dyn FnMut() -> Result<(Mode, Box<dyn Renderer>), Box<dyn Error + Send + Sync>> + Send>;

/// The programs of the ebpf mode, with a backstop if something needs it.
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub struct Backstopped {
    programs: Box<dyn Renderer>,
    policy: BackstopPolicy,
    create: CreateBackstop,
    /// Created when it is needed first.
    backstop: Option<(Mode, Box<dyn Renderer>)>,
    /// All Services were rendered to the backstop, and it was not removed since.
    is_in_place: bool,
    /// It was put in place since stale UDP entries of conntrack were looked for. What it did not
    /// see meanwhile makes entries stale too.
    is_fresh: bool,
    sctp_ports: SctpPorts,
    /// Service ports with source ranges.
    ranged_ports: BTreeSet<ServicePortKey>,
    /// Service ports whose external addresses the sockets of pods leave to the links.
    pod_ports: BTreeSet<ServicePortKey>,
    /// [`Self::pod_ports`] depends on it.
    local_detector: LocalTrafficDetector,
    has_unserved_links: bool,
    /// Set if the sockets of all pods are left alone, and not all links have programs.
    pods_need: Option<BackstopNeed>,
    /// Why netfilter is to translate what comes in on links.
    links_need: Option<Arc<str>>,
    /// The programs were removed from the links.
    links_are_left: bool,
    /// The last attempt to program the backstop, if it failed.
    failure: Option<FailedAttempt>,
}

/// An attempt to program the backstop that failed.
struct FailedAttempt {
    error: Arc<dyn Error + Send + Sync>,
    /// What needed the backstop.
    needs: Vec<BackstopNeed>,
}

impl Backstopped {
    /// Adds a backstop to the programs.
    pub fn new(programs: Box<dyn Renderer>, policy: BackstopPolicy, create: CreateBackstop) -> Self {
        Self {
            programs,
            policy,
            create,
            backstop: None,
            is_in_place: false,
            is_fresh: false,
            sctp_ports: SctpPorts::default(),
            ranged_ports: BTreeSet::new(),
            pod_ports: BTreeSet::new(),
            local_detector: LocalTrafficDetector::None,
            has_unserved_links: false,
            pods_need: None,
            links_need: None,
            links_are_left: false,
            failure: None,
        }
    }

    /// Returns why SCTP is not served, if it is not.
    fn lacks_sctp(&self) -> Option<String> {
        if self.policy == BackstopPolicy::Never {
            return Some(SCTP_NEEDS_RULES.into());
        }
        let error = with_causes(&*self.failure.as_ref()?.error);
        Some(format!("the programs do not translate SCTP, and the backstop does not work: {error}"))
    }

    /// Returns what a failure of the backstop concerns. If only SCTP needs it, the service ports
    /// that are not served are known.
    fn scope_of_failure(&self, error: &BackstopError) -> FailureScope {
        match error {
            BackstopError::LeftOut(_) => FailureScope::ServicePorts,
            BackstopError::Failed(_) if self.needs() == [BackstopNeed::Sctp] => FailureScope::ServicePorts,
            BackstopError::Failed(_) => FailureScope::Node,
        }
    }

    /// Returns the needs, sorted.
    fn needs(&self) -> Vec<BackstopNeed> {
        let left_out = self.programs.left_out();
        let setting = (self.policy == BackstopPolicy::Always).then_some(BackstopNeed::Setting);
        let found = [
            (!self.sctp_ports.is_empty()).then_some(BackstopNeed::Sctp),
            self.links_need.clone().map(BackstopNeed::Links),
            (!left_out.is_empty()).then_some(BackstopNeed::LeftOutLinks(left_out)),
            (!self.ranged_ports.is_empty() && self.has_unserved_links).then_some(BackstopNeed::SourceRanges),
            (!self.pod_ports.is_empty() && self.has_unserved_links).then_some(BackstopNeed::ExternalPolicy),
            self.pods_need.clone(),
        ];
        let is_allowed = self.policy != BackstopPolicy::Never;
        setting.into_iter().chain(found.into_iter().flatten().filter(|_| is_allowed)).collect()
    }

    /// Costs as much as the change, not as much as the cluster.
    fn update_needs(&mut self, snapshot: &Snapshot, dirty: &Dirty) {
        self.has_unserved_links = snapshot.node.has_unserved_links;
        let leaves_pod_sockets = snapshot.node.socket_scope == SocketScope::Node;
        self.pods_need = (leaves_pod_sockets && self.has_unserved_links).then_some(BackstopNeed::PodSockets);
        self.links_need = match &snapshot.node.link_path {
            LinkPath::Programs | LinkPath::Direct { .. } => None,
            LinkPath::Netfilter { why } => Some(Arc::clone(why)),
        };
        self.sctp_ports.update(snapshot, dirty);
        let detector = &snapshot.node.local_detector;
        if dirty.all || self.local_detector != *detector {
            self.local_detector = detector.clone();
            self.ranged_ports.clear();
            self.pod_ports.clear();
            for (key, port) in &snapshot.ports {
                self.update_needs_of(key, Some(port), &snapshot.node);
            }
        } else {
            for key in &dirty.ports {
                self.update_needs_of(key, snapshot.ports.get(key).map(Arc::as_ref), &snapshot.node);
            }
        }
    }

    fn update_needs_of(&mut self, key: &ServicePortKey, port: Option<&ResolvedPort>, node: &NodeView) {
        let is_ranged = port.is_some_and(|port| depends_on_source(port, key.family));
        let is_left = port.is_some_and(|port| leaves_pods_to_links(port, node, key.family));
        for (is_member, ports) in [(is_ranged, &mut self.ranged_ports), (is_left, &mut self.pod_ports)] {
            if is_member {
                ports.insert(key.clone());
            } else if !ports.is_empty() {
                ports.remove(key);
            }
        }
    }

    /// Renders everything if the backstop is not in place yet.
    fn render_backstop(&mut self, snapshot: &Snapshot, dirty: &Dirty) -> Result<usize, BackstopError> {
        let backstop = match &mut self.backstop {
            Some((_, backstop)) => backstop,
            none => &mut none.insert((self.create)().map_err(|error| BackstopError::Failed(error.into()))?).1,
        };
        let everything = Dirty::everything();
        if !self.is_in_place {
            backstop.invalidate();
        }
        let dirty = if self.is_in_place { dirty } else { &everything };
        let rendered = backstop.render(snapshot, dirty);
        let is_in_place = rendered.as_ref().map_or_else(leaves_only_ports_out, |_| true);
        self.is_fresh |= is_in_place && !self.is_in_place;
        self.is_in_place |= is_in_place;
        rendered.map_err(|error| {
            if leaves_only_ports_out(&error) {
                BackstopError::LeftOut(error.into())
            } else {
                BackstopError::Failed(Arc::new(error))
            }
        })
    }

    /// Renders the backstop if something needs it. While attempts to put it in place fail, others
    /// get the same error.
    fn render_needed_backstop(&mut self, snapshot: &Snapshot, dirty: &Dirty) -> Result<usize, BackstopError> {
        let needs = self.needs();
        if let Some(failed) = self.failure.as_ref().filter(|failed| self.waits(failed, &needs, dirty)) {
            return Err(BackstopError::Failed(Arc::clone(&failed.error)));
        }
        let rendered = match (needs.is_empty(), self.is_in_place) {
            (false, _) => self.render_backstop(snapshot, dirty),
            // It translates packets until it is removed, which waits while the programs fail.
            (true, true) => Ok(self.render_backstop(snapshot, dirty).unwrap_or_default()),
            (true, false) => Ok(0),
        };
        self.failure = match &rendered {
            Err(BackstopError::Failed(error)) => Some(FailedAttempt { error: Arc::clone(error), needs }),
            Ok(_) | Err(BackstopError::LeftOut(_)) => None,
        };
        rendered
    }

    /// Returns true if the backstop waits for the next full sync, because an attempt renders
    /// everything and may take seconds. Other needs of the node do not wait.
    fn waits(&self, failed: &FailedAttempt, needs: &[BackstopNeed], dirty: &Dirty) -> bool {
        let differs = dirty.node && failed.needs != needs;
        !(self.is_in_place || needs.is_empty() || dirty.all || differs)
    }

    /// Renders the programs. They leave the links to netfilter only if the backstop serves there.
    fn render_programs(
        &mut self,
        snapshot: &Snapshot,
        dirty: &Dirty,
        backstop_works: bool,
    ) -> Result<usize, RenderError> {
        let leaves_links = self.links_need.is_some() && (backstop_works || self.links_are_left);
        let rendered = if leaves_links == self.links_need.is_some() {
            self.programs.render(snapshot, dirty)
        } else {
            let node = NodeView { link_path: LinkPath::Programs, ..snapshot.node.clone() };
            self.programs.render(&Snapshot { ports: snapshot.ports.clone(), node }, dirty)
        };
        if rendered.as_ref().map_or_else(leaves_only_ports_out, |_| true) {
            self.links_are_left = leaves_links;
        }
        rendered
    }

    fn in_place(&mut self) -> Option<&mut dyn Renderer> {
        let (_, backstop) = self.backstop.as_mut().filter(|_| self.is_in_place)?;
        Some(&mut **backstop)
    }
}

impl Renderer for Backstopped {
    /// An error of the backstop is returned by the next [`Self::render`], which observes again.
    fn observe(&mut self) -> Result<(), RenderError> {
        if let Some(backstop) = self.in_place() {
            let _ = backstop.observe();
        }
        self.programs.observe()
    }

    /// The rules of the backstop are always rendered as a whole.
    fn is_current(&self) -> bool {
        self.programs.is_current() && !self.is_in_place && self.needs().is_empty()
    }

    fn invalidate(&mut self) {
        if let Some(backstop) = self.in_place() {
            backstop.invalidate();
        }
        self.programs.invalidate();
    }

    fn distrust(&mut self) {
        if let Some(backstop) = self.in_place() {
            backstop.distrust();
        }
        self.programs.distrust();
    }

    /// If the backstop fails, the programs are rendered nevertheless.
    fn render(&mut self, snapshot: &Snapshot, dirty: &Dirty) -> Result<usize, RenderError> {
        self.update_needs(snapshot, dirty);
        let mut beneath = self.render_needed_backstop(snapshot, dirty);
        let rendered = self.render_programs(snapshot, dirty, self.failure.is_none());
        if rendered.as_ref().is_err_and(|error| !leaves_only_ports_out(error)) {
            return rendered;
        }
        // Only the programs find out which links have no room for them.
        if !self.is_in_place && self.failure.is_none() {
            beneath = self.render_needed_backstop(snapshot, dirty);
        }
        match (rendered, beneath) {
            (Ok(operations), Ok(beneath)) => Ok(operations + beneath),
            (rendered, Err(error)) => {
                let operations = rendered.unwrap_or_default();
                Err(RenderError::Apply {
                    scope: self.scope_of_failure(&error),
                    operations,
                    source: error.into(),
                })
            }
            (left_out, Ok(_)) => left_out,
        }
    }

    fn left_out_ports(&self) -> Vec<LeftOutPort> {
        let mut ports = self.programs.left_out_ports();
        if let Some((_, backstop)) = self.backstop.as_ref().filter(|_| self.is_in_place) {
            ports.extend(backstop.left_out_ports());
        }
        if let Some(why) = self.lacks_sctp() {
            ports.extend(self.sctp_ports.left_out(&why));
        }
        ports
    }

    fn delete_stale_udp(
        &mut self,
        snapshot: &Snapshot,
        dirty: &Dirty,
    ) -> Result<Vec<StaleUdpDeletion>, RenderError> {
        let mut deletions = self.programs.delete_stale_udp(snapshot, dirty)?;
        let everything = Dirty::everything();
        let dirty = if mem::take(&mut self.is_fresh) { &everything } else { dirty };
        if let Some(backstop) = self.in_place() {
            deletions.extend(backstop.delete_stale_udp(snapshot, dirty)?);
        }
        Ok(deletions)
    }

    fn remove_unneeded(&mut self) -> Vec<RenderError> {
        if !self.needs().is_empty() {
            return Vec::new();
        }
        if self.in_place().is_some() {
            // It may have masqueraded connections that the programs translate.
            self.programs.keep_nat();
        }
        let errors = self.in_place().map(Renderer::cleanup).unwrap_or_default();
        self.is_in_place &= !errors.is_empty();
        errors
    }

    fn backstop(&self) -> Option<BackstopStatus> {
        let (mode, _) = self.backstop.as_ref().filter(|_| self.is_in_place)?;
        Some(BackstopStatus { mode: *mode, needs: self.needs() })
    }

    /// Removes the programs only: the next mode may be the one that is the backstop, and would lose
    /// its rules. The takeover removes the rules of all other modes.
    fn cleanup(&mut self) -> Vec<RenderError> {
        self.programs.cleanup()
    }

    fn held_reader(&self) -> Option<HeldReader> {
        let programs = self.programs.held_reader()?;
        let Some((_, backstop)) = self.backstop.as_ref().filter(|_| self.is_in_place) else {
            return Some(programs);
        };
        let backstop = backstop.held_reader()?;
        Some(Box::new(move || Ok(Held::Both(Box::new((programs()?, backstop()?))))))
    }

    fn differences(
        &self,
        held: &Held,
        snapshot: &Snapshot,
        of: Option<&ServicePortKey>,
    ) -> Option<Vec<String>> {
        let (programs, beneath) = match held {
            Held::Both(both) => (&both.0, Some(&both.1)),
            programs => (programs, None),
        };
        let mut found = self.programs.differences(programs, snapshot, of)?;
        if let (Some((_, backstop)), Some(beneath)) = (&self.backstop, beneath) {
            let found_beneath = backstop.differences(beneath, snapshot, of)?.into_iter();
            found.extend(found_beneath.map(|difference| format!("backstop: {difference}")));
        }
        Some(found)
    }

    fn map_fill(&self) -> Vec<MapFill> {
        self.programs.map_fill()
    }

    fn left_out(&self) -> Vec<Arc<str>> {
        self.programs.left_out()
    }

    fn displaced(&self) -> Vec<DisplacedLink> {
        self.programs.displaced()
    }

    fn trace(&mut self, programs: Option<TracingPrograms>) -> bool {
        self.programs.trace(programs)
    }

    fn mode_metrics(&mut self) -> Option<ModeMetricsReader> {
        self.programs.mode_metrics()
    }

    fn kernel_counts(&mut self) -> Option<Box<dyn KernelCounts>> {
        self.programs.kernel_counts()
    }
}
