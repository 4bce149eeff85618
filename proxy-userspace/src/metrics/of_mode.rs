//! The metrics about the mode that runs: why it runs, and what it serves and leaves out.

use std::sync::PoisonError;

use super::{Fallback, Metrics, gauge_value};
use crate::{
    dataplane::{
        BackstopStatus, DisplacedLink, KernelCounts, LeftOutReason, MaglevCount, MapFill, ModeMetricsReader,
        ServiceCount,
    },
    model::ChosenPath,
};

impl Metrics {
    /// Sets the source of the kernel counters of the current mode.
    pub fn set_kernel_counts(&self, counts: Option<Box<dyn KernelCounts>>) {
        self.kernel_counts.set(counts);
    }

    /// Returns the counts of service ports, and whether refusals and drops are among them.
    pub fn service_counts(&self) -> (Vec<ServiceCount>, bool) {
        self.kernel_counts.services()
    }

    /// Sets the source of the current mode's own metrics.
    pub fn set_mode_metrics(&self, mode_metrics: Option<ModeMetricsReader>) {
        self.of_mode.set(mode_metrics);
    }

    /// Sets the current mode and the reason for it.
    pub fn set_mode(&self, mode: &'static str, why: &str) {
        self.mode.clear();
        self.mode.get_or_create(&[("mode", mode)]).set(1);
        self.mode_info.clear();
        self.mode_info.get_or_create(&vec![("mode", mode.into()), ("why", why.into())]).set(1);
        *self.running_mode.write().unwrap_or_else(PoisonError::into_inner) = mode;
        // The backstop, the links and the maps belong to the previous mode.
        self.backstop_info.clear();
        self.link_path_info.clear();
        self.exempt_namespaces.set(0);
        self.links_displaced.clear();
        for reason in LeftOutReason::ALL {
            self.set_service_ports_left_out(reason, 0);
        }
        self.set_maglev(MaglevCount::default());
        self.map_entries.clear();
        self.map_capacity.clear();
    }

    /// Returns the current mode. Empty before the first mode runs.
    pub fn mode(&self) -> &'static str {
        *self.running_mode.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a mode that failed permanently, so that another one takes over.
    pub fn mode_broke(&self, mode: &'static str) {
        self.modes_broken.get_or_create(&[("mode", mode)]).inc();
    }

    /// Sets why `auto` runs another mode than the one that it prefers; `None` if it does not.
    pub fn set_fallback(&self, why: Option<Fallback>) {
        for reason in Fallback::ALL {
            self.fell_back.get_or_create(&[("reason", reason.name())]).set((Some(reason) == why).into());
        }
    }

    /// Sets the backstop that is in place; `None` if there is none.
    pub fn set_backstop(&self, backstop: Option<&BackstopStatus>) {
        self.backstop_info.clear();
        let needs =
            backstop.into_iter().flat_map(|backstop| backstop.needs.iter().map(|need| (backstop.mode, need)));
        for (mode, need) in needs {
            self.backstop_info.get_or_create(&[("mode", mode.name()), ("why", need.name())]).set(1);
        }
    }

    /// Sets what translates packets that come in on links.
    pub fn set_link_path(&self, ChosenPath { path, why }: &ChosenPath) {
        self.link_path_info.clear();
        let labels = vec![("path", path.name().into()), ("why", (**why).into())];
        self.link_path_info.get_or_create(&labels).set(1);
    }

    /// Sets the number of network namespaces whose sockets are left alone.
    pub fn set_exempt_namespaces(&self, count: usize) {
        self.exempt_namespaces.set(gauge_value(count));
    }

    /// Sets the number of links that should have link programs but have none.
    pub fn set_links_left_out(&self, links: usize) {
        self.links_left_out.set(gauge_value(links));
    }

    /// Sets the links on which a program of another owner runs before the link program.
    pub fn set_links_displaced(&self, links: &[DisplacedLink]) {
        self.links_displaced.clear();
        for DisplacedLink { link, .. } in links {
            self.links_displaced.get_or_create(&vec![("link", link.to_string())]).set(1);
        }
    }

    /// Sets the number of entries and the capacity of one of the dataplane's maps.
    pub fn set_map_fill(&self, fill: MapFill) {
        self.map_entries.get_or_create(&[("map", fill.map)]).set(gauge_value(fill.entries));
        self.map_capacity.get_or_create(&[("map", fill.map)]).set(fill.capacity.into());
    }

    /// Sets how many service ports have Maglev tables.
    pub fn set_maglev(&self, count: MaglevCount) {
        let MaglevCount { with_tables, without_room } = count;
        for (state, ports) in [("with_tables", with_tables), ("without_room", without_room)] {
            self.maglev_service_ports.get_or_create(&[("state", state)]).set(gauge_value(ports));
        }
    }

    /// Sets the number of service ports that are left out for this reason.
    pub fn set_service_ports_left_out(&self, reason: LeftOutReason, ports: usize) {
        self.service_ports_left_out.get_or_create(&[("reason", reason.name())]).set(gauge_value(ports));
    }
}
