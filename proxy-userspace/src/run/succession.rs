//! Taking a node over from another mode or another proxy: once all Services are served, the other's connections are taken along, and
//! what it left is removed.

use proxy_userspace::{
    causes::with_causes,
    config::{Config, Mode},
    dataplane::{
        KernelCounts, MapFill, Readings, RenderError, Renderer, conntrack::Forgotten, ebpf::Ebpf, ipvs::Ipvs,
    },
    kernel::{self, conntrack::HandedOver},
    model::{Dirty, Snapshot},
};

use super::parts;

/// A renderer that clears up after the modes before it, once, when it has succeeded for the first time.
pub(super) struct Successor {
    renderer: Box<dyn Renderer>,
    /// The mode before this one, where it broke in this process.
    broken: Option<Box<dyn Renderer>>,
    /// Until it is done.
    config: Option<Config>,
    /// The ipvs mode's link may still be there, since this node's own connections need its addresses.
    waits_for_link: bool,
    /// The last look at everything left no Service out, nor did a change since. Until then the other's rules serve what this one
    /// does not.
    serves_all: bool,
}

impl Successor {
    pub(super) fn new(
        renderer: Box<dyn Renderer>,
        broken: Option<Box<dyn Renderer>>,
        config: &Config,
    ) -> Self {
        Self { renderer, broken, config: Some(config.clone()), waits_for_link: false, serves_all: false }
    }

    /// Rules leave connections to conntrack, which goes on with them; programs and IPVS have to hand theirs over.
    fn take_connections_along(&self) {
        let Some(config) = &self.config else { return };
        if config.mode != Mode::Ebpf {
            told("programs on links", Ebpf::hand_over(&config.ebpf.pin_dir));
        }
        if config.mode != Mode::Ipvs {
            told("IPVS", Ipvs::hand_over(&config.ipvs));
        }
    }

    /// A look at every comparison, until it is gone.
    fn remove_unused_link(&mut self) {
        if self.waits_for_link {
            match Ipvs::remove_link_if_unused() {
                Ok(is_gone) => self.waits_for_link = !is_gone,
                Err(error) => tracing::debug!(error = with_causes(&error), "the ipvs mode's link stays"),
            }
        }
    }

    /// What cannot be removed is told, and is no reason to serve nothing.
    fn remove_other_modes(&mut self) {
        let Some(config) = self.config.take() else { return };
        let by_itself = self.broken.take().map_or_else(Vec::new, |mut broken| broken.cleanup());
        for error in by_itself.into_iter().chain(parts::remove_other_modes(&config)) {
            tracing::warn!(error = with_causes(&error), "something of another mode is left");
        }
        self.waits_for_link = config.mode != Mode::Ipvs;
        // From here on little runs but changes.
        if let Err(error) = kernel::program_text::forget() {
            tracing::debug!(%error, "what ran at start stays in memory");
        }
    }
}

/// What became of the connections that something else translated.
fn told<E: std::error::Error + 'static>(of: &'static str, outcome: Result<HandedOver, E>) {
    match outcome {
        Ok(done) if done == HandedOver::default() => {}
        Ok(HandedOver { connections, lost: 0 }) => {
            tracing::info!(of, connections, "conntrack translates connections from now on");
        }
        Ok(HandedOver { connections, lost }) => {
            tracing::warn!(of, connections, lost, "not all connections go on");
        }
        Err(error) => tracing::warn!(of, error = with_causes(&error), "connections may end"),
    }
}

impl Renderer for Successor {
    fn observe(&mut self) -> Result<(), RenderError> {
        self.renderer.observe()
    }

    fn distrust(&mut self) {
        self.renderer.distrust();
    }

    fn render(&mut self, snapshot: &Snapshot, dirty: &Dirty) -> Result<usize, RenderError> {
        let rendered = self.renderer.render(snapshot, dirty);
        self.serves_all = rendered.is_ok() && (self.serves_all || dirty.all);
        rendered
    }

    /// What comes after a success, and holds up nobody who waits for it.
    fn forget_stale_udp(
        &mut self,
        snapshot: &Snapshot,
        dirty: &Dirty,
    ) -> Result<Vec<Forgotten>, RenderError> {
        if !self.serves_all {
            return self.renderer.forget_stale_udp(snapshot, dirty);
        }
        // Before it: flows to endpoints that left are none to go on with.
        self.take_connections_along();
        let forgotten = self.renderer.forget_stale_udp(snapshot, dirty);
        self.remove_other_modes();
        if dirty.all {
            self.remove_unused_link();
        }
        forgotten
    }

    fn cleanup(&mut self) -> Vec<RenderError> {
        let mut errors = self.broken.take().map_or_else(Vec::new, |mut broken| broken.cleanup());
        errors.extend(self.renderer.cleanup());
        errors
    }

    fn map_fill(&self) -> Vec<MapFill> {
        self.renderer.map_fill()
    }

    fn readings(&mut self) -> Option<Readings> {
        self.renderer.readings()
    }

    fn kernel_counts(&mut self) -> Option<Box<dyn KernelCounts>> {
        self.renderer.kernel_counts()
    }
}
