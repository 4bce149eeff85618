//! Taking a node over from another mode or another proxy: once all Services are served, the other's connections are taken along, and
//! what it left is removed.

use proxy_userspace::{
    causes::with_causes,
    config::{Config, Mode},
    dataplane::{KernelCounts, MapFill, Readings, RenderError, Renderer, conntrack::Forgotten, ebpf::Ebpf},
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
        Self { renderer, broken, config: Some(config.clone()), serves_all: false }
    }

    /// Rules leave connections to conntrack, which goes on with them; programs have to hand theirs over.
    fn take_connections_along(&self) {
        let Some(config) = self.config.as_ref().filter(|config| config.mode != Mode::Ebpf) else { return };
        match Ebpf::hand_over(&config.ebpf.pin_dir) {
            Ok(done) if done == HandedOver::default() => {}
            Ok(HandedOver { connections, lost: 0 }) => {
                tracing::info!(connections, "conntrack translates what programs on links did");
            }
            Ok(HandedOver { connections, lost }) => {
                tracing::warn!(connections, lost, "not all connections that programs translated go on");
            }
            Err(error) => {
                tracing::warn!(error = with_causes(&error), "connections that programs translated may end");
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
        // From here on little runs but changes.
        if let Err(error) = kernel::program_text::forget() {
            tracing::debug!(%error, "what ran at start stays in memory");
        }
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
