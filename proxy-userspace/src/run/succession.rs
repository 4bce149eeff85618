//! Taking a node over from another mode or another proxy: once all Services are served, what the other left is removed.

use proxy_userspace::{
    causes::with_causes,
    config::Config,
    dataplane::{MapFill, PacketCounts, Readings, RenderError, Renderer, conntrack::Forgotten},
    model::{Dirty, Snapshot},
};

use super::parts;

/// A renderer that clears up after the modes before it, once, when it has succeeded for the first time.
pub(super) struct Successor {
    renderer: Box<dyn Renderer>,
    /// Until it is done.
    config: Option<Config>,
}

impl Successor {
    pub(super) fn new(renderer: Box<dyn Renderer>, config: &Config) -> Self {
        Self { renderer, config: Some(config.clone()) }
    }

    /// What cannot be removed is told, and is no reason to serve nothing.
    fn remove_other_modes(&mut self) {
        let Some(config) = self.config.take() else { return };
        for error in parts::remove_other_modes(&config) {
            tracing::warn!(error = with_causes(&error), "something of another mode is left");
        }
    }
}

impl Renderer for Successor {
    fn observe(&mut self) -> Result<(), RenderError> {
        self.renderer.observe()
    }

    fn render(&mut self, snapshot: &Snapshot, dirty: &Dirty) -> Result<usize, RenderError> {
        let operations = self.renderer.render(snapshot, dirty)?;
        self.remove_other_modes();
        Ok(operations)
    }

    fn forget_stale_udp(
        &mut self,
        snapshot: &Snapshot,
        dirty: &Dirty,
    ) -> Result<Vec<Forgotten>, RenderError> {
        self.renderer.forget_stale_udp(snapshot, dirty)
    }

    fn cleanup(&mut self) -> Vec<RenderError> {
        self.renderer.cleanup()
    }

    fn map_fill(&self) -> Vec<MapFill> {
        self.renderer.map_fill()
    }

    fn readings(&mut self) -> Option<Readings> {
        self.renderer.readings()
    }

    fn packet_counts(&mut self) -> Option<PacketCounts> {
        self.renderer.packet_counts()
    }
}
