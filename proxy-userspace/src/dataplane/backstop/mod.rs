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

use std::{collections::BTreeSet, error::Error, fmt, sync::Arc};

use super::{
    DisplacedLink, KernelCounts, MapFill, Mode, ModeMetricsReader, RenderError, Renderer,
    conntrack::StaleUdpDeletion,
};
use crate::{
    mode::BackstopPolicy,
    model::{Dirty, Protocol, ServicePortKey, Snapshot},
};

/// Why the backstop is in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum BackstopNeed {
    /// The setting is `always`.
    Setting,
    /// A Service has an SCTP port. The programs translate only TCP and UDP.
    Sctp,
}

impl BackstopNeed {
    /// All needs.
    pub const ALL: [Self; 2] = [Self::Setting, Self::Sctp];

    /// Returns the value of the label `why`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Setting => "setting",
            Self::Sctp => "sctp",
        }
    }
}

impl fmt::Display for BackstopNeed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Setting => "shunt.backstop is always",
            Self::Sctp => "a Service has an SCTP port, which the programs do not translate",
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
#[error("cannot program the backstop, so what the programs cannot translate is not served")]
pub struct BackstopError(#[source] Box<dyn Error + Send + Sync>);

/// Creates the renderer of a netfilter mode that works on this node.
pub type CreateBackstop =
    Box<dyn FnMut() -> Result<(Mode, Box<dyn Renderer>), Box<dyn Error + Send + Sync>> + Send>;

/// The programs of the ebpf mode, with a backstop if something needs it.
pub struct Backstopped {
    programs: Box<dyn Renderer>,
    policy: BackstopPolicy,
    create: CreateBackstop,
    /// Created when it is needed first.
    backstop: Option<(Mode, Box<dyn Renderer>)>,
    /// All Services were rendered to the backstop, and it was not removed since.
    is_in_place: bool,
    sctp_ports: BTreeSet<ServicePortKey>,
}

impl Backstopped {
    /// Adds a backstop to the programs.
    pub fn new(programs: Box<dyn Renderer>, policy: BackstopPolicy, create: CreateBackstop) -> Self {
        Self { programs, policy, create, backstop: None, is_in_place: false, sctp_ports: BTreeSet::new() }
    }

    fn needs(&self) -> Vec<BackstopNeed> {
        let is_needed = |need: &BackstopNeed| match need {
            BackstopNeed::Setting => self.policy == BackstopPolicy::Always,
            BackstopNeed::Sctp => self.policy != BackstopPolicy::Never && !self.sctp_ports.is_empty(),
        };
        BackstopNeed::ALL.into_iter().filter(is_needed).collect()
    }

    /// Costs as much as the change, not as much as the cluster.
    fn update_needs(&mut self, snapshot: &Snapshot, dirty: &Dirty) {
        let is_sctp = |key: &&ServicePortKey| key.name.protocol == Protocol::Sctp;
        if dirty.all {
            self.sctp_ports = snapshot.ports.keys().filter(is_sctp).cloned().collect();
            return;
        }
        for key in dirty.ports.iter().filter(is_sctp) {
            if snapshot.ports.contains_key(key) {
                self.sctp_ports.insert(key.clone());
            } else {
                self.sctp_ports.remove(key);
            }
        }
    }

    /// Renders everything if the backstop is not in place yet.
    fn render_backstop(&mut self, snapshot: &Snapshot, dirty: &Dirty) -> Result<usize, BackstopError> {
        let backstop = match &mut self.backstop {
            Some((_, backstop)) => backstop,
            none => &mut none.insert((self.create)().map_err(BackstopError)?).1,
        };
        let everything = Dirty::everything();
        if !self.is_in_place {
            backstop.invalidate();
        }
        let dirty = if self.is_in_place { dirty } else { &everything };
        let operations = backstop.render(snapshot, dirty).map_err(|error| BackstopError(error.into()))?;
        self.is_in_place = true;
        Ok(operations)
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

    fn invalidate(&mut self) {
        if let Some(backstop) = self.in_place() {
            backstop.invalidate();
        }
        self.programs.invalidate();
    }

    /// If the backstop fails, the programs are rendered nevertheless.
    fn render(&mut self, snapshot: &Snapshot, dirty: &Dirty) -> Result<usize, RenderError> {
        self.update_needs(snapshot, dirty);
        let beneath = if self.needs().is_empty() { Ok(0) } else { self.render_backstop(snapshot, dirty) };
        let operations = self.programs.render(snapshot, dirty)?;
        match beneath {
            Ok(beneath) => Ok(operations + beneath),
            Err(error) => Err(RenderError::Apply { partial: true, family: None, source: error.into() }),
        }
    }

    fn delete_stale_udp(
        &mut self,
        snapshot: &Snapshot,
        dirty: &Dirty,
    ) -> Result<Vec<StaleUdpDeletion>, RenderError> {
        let mut deletions = self.programs.delete_stale_udp(snapshot, dirty)?;
        if let Some(backstop) = self.in_place() {
            deletions.extend(backstop.delete_stale_udp(snapshot, dirty)?);
        }
        Ok(deletions)
    }

    fn remove_unneeded(&mut self) -> Vec<RenderError> {
        if !self.needs().is_empty() {
            return Vec::new();
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

    fn map_fill(&self) -> Vec<MapFill> {
        self.programs.map_fill()
    }

    fn left_out(&self) -> Vec<Arc<str>> {
        self.programs.left_out()
    }

    fn displaced(&self) -> Vec<DisplacedLink> {
        self.programs.displaced()
    }

    fn mode_metrics(&mut self) -> Option<ModeMetricsReader> {
        self.programs.mode_metrics()
    }

    fn kernel_counts(&mut self) -> Option<Box<dyn KernelCounts>> {
        self.programs.kernel_counts()
    }
}
