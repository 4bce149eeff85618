//! Taking a node over from another mode or another proxy: once all Services are served, the other's connections are taken along, and
//! what it left is removed.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use proxy_userspace::{
    causes::with_causes,
    config::{Config, Mode},
    dataplane::{
        KernelCounts, MapFill, Readings, RenderError, Renderer,
        conntrack::StaleUdpDeletion,
        ebpf::Ebpf,
        ipvs::{Ipvs, IpvsError},
    },
    kernel::{self, command, conntrack::HandoverCounts},
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
    /// The ipvs mode's link, which may still be there.
    link: LeftLink,
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
        Self { renderer, broken, config: Some(config.clone()), link: LeftLink::default(), serves_all: false }
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

    /// What cannot be removed is told, and is no reason to serve nothing.
    fn remove_other_modes(&mut self) {
        let Some(config) = self.config.take() else { return };
        let by_itself = self.broken.take().map_or_else(Vec::new, |mut broken| broken.cleanup());
        for error in by_itself.into_iter().chain(parts::remove_other_modes(&config)) {
            tracing::warn!(error = with_causes(&error), "something of another mode is left");
        }
        self.link.is_looked_at = config.mode != Mode::Ipvs;
        // From here on little runs but changes.
        if let Err(error) = kernel::program_text::forget() {
            tracing::debug!(%error, "what ran at start stays in memory");
        }
    }
}

/// The ipvs mode's link, which stays as long as this node's own connections need its addresses.
#[derive(Debug, Default)]
struct LeftLink {
    /// Until it is gone.
    is_looked_at: bool,
    /// The addresses that were told of.
    addresses: BTreeSet<IpAddr>,
}

impl LeftLink {
    /// At every comparison; what is as it was is not told again. `remove` removes what is not needed and returns what stays.
    fn look(&mut self, remove: impl FnOnce() -> Result<BTreeSet<IpAddr>, IpvsError>) {
        if !self.is_looked_at {
            return;
        }
        let addresses = match remove() {
            Ok(addresses) => addresses,
            Err(error) => {
                tracing::debug!(error = with_causes(&error), "the ipvs mode's link stays");
                return;
            }
        };
        self.is_looked_at = !addresses.is_empty();
        if addresses == self.addresses {
            return;
        }
        if addresses.is_empty() {
            tracing::info!("the ipvs mode's link is gone: no connection of this node needs it any more");
        } else {
            tracing::info!(
                ?addresses,
                "the ipvs mode's link stays as long as this node's own connections from these addresses last"
            );
        }
        self.addresses = addresses;
    }
}

/// What became of the connections that something else translated.
fn told<E: std::error::Error + 'static>(of: &'static str, outcome: Result<HandoverCounts, E>) {
    match outcome {
        Ok(done) if done == HandoverCounts::default() => {}
        Ok(HandoverCounts { connections, lost: 0 }) => {
            tracing::info!(of, connections, "conntrack translates connections from now on");
        }
        Ok(HandoverCounts { connections, lost }) => {
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

    /// What comes after a success, and holds up nobody who waits for it. A process that is about to end leaves to the next what it
    /// cannot do whole: what is removed may be what connections need that were not handed over.
    fn delete_stale_udp(
        &mut self,
        snapshot: &Snapshot,
        dirty: &Dirty,
    ) -> Result<Vec<StaleUdpDeletion>, RenderError> {
        if !self.serves_all || command::is_ending() {
            return self.renderer.delete_stale_udp(snapshot, dirty);
        }
        // Before it: flows to endpoints that left are none to go on with.
        self.take_connections_along();
        let forgotten = self.renderer.delete_stale_udp(snapshot, dirty);
        if command::is_ending() {
            return forgotten;
        }
        self.remove_other_modes();
        if dirty.all {
            self.link.look(Ipvs::remove_link_if_unused);
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

    fn left_out(&self) -> Vec<Arc<str>> {
        self.renderer.left_out()
    }

    fn readings(&mut self) -> Option<Readings> {
        self.renderer.readings()
    }

    fn kernel_counts(&mut self) -> Option<Box<dyn KernelCounts>> {
        self.renderer.kernel_counts()
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn addresses_that_stay_are_told_once_and_again_when_they_change() {
        let (log, writer) = io::pipe().expect("a pipe");
        let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(Arc::new(writer)).finish();
        let (one, other): (IpAddr, IpAddr) = ([10, 96, 0, 1].into(), [10, 96, 0, 2].into());
        tracing::subscriber::with_default(subscriber, || {
            let mut link = LeftLink { is_looked_at: true, ..LeftLink::default() };
            for left in
                [vec![one, other], vec![one, other], vec![one, other], vec![other], vec![other], vec![]]
            {
                link.look(|| Ok(left.into_iter().collect()));
            }
            link.look(|| panic!("it is gone"));
        });
        let text = io::read_to_string(log).expect("text");
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3, "{text}");
        assert!(lines[0].contains("10.96.0.1, 10.96.0.2") && lines[1].contains("{10.96.0.2}"), "{text}");
        assert!(lines[2].contains("is gone"), "{text}");
    }
}
