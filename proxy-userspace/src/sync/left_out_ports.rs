//! Service ports that are left out: counted, logged, and reported as Kubernetes Events on their
//! Services, once.

use std::collections::{BTreeMap, BTreeSet};

use super::Outputs;
use crate::{
    dataplane::{LeftOutPort, LeftOutReason},
    metrics::SyncExtent,
    model::{Dirty, NamespacedName, ServicePortKey},
};

/// How many Services get an Event, and how many service ports a log line, while service ports are
/// left out. A node can leave out thousands, and every node of the cluster the same ones.
const MAX_REPORTED: usize = 10;
const REASON: &str = "ServiceLeftOut";
/// The name of upstream's function that programs Services.
const ACTION: &str = "SyncProxyRules";

/// The service ports that are left out.
#[derive(Debug, Default)]
pub(super) struct LeftOutPorts {
    node: String,
    ports: BTreeMap<ServicePortKey, (LeftOutReason, String)>,
    /// Service ports that were logged, and Services that got an Event or wait for it.
    logged: BTreeSet<ServicePortKey>,
    reported: BTreeSet<NamespacedName>,
    /// The notes of Events that wait for a place in the queue.
    waiting: BTreeMap<NamespacedName, String>,
    many_are_reported: bool,
}

impl LeftOutPorts {
    pub(super) fn new(node: String) -> Self {
        Self { node, ..Self::default() }
    }

    /// Returns the service ports that are left out.
    pub(super) const fn ports(&self) -> &BTreeMap<ServicePortKey, (LeftOutReason, String)> {
        &self.ports
    }

    /// Takes in what a sync left out, and reports it. A partial sync says nothing about service
    /// ports that were not dirty.
    pub(super) fn update(
        &mut self,
        left_out: Vec<LeftOutPort>,
        extent: SyncExtent,
        dirty: &Dirty,
        outputs: &Outputs,
    ) {
        if self.ports.is_empty() && left_out.is_empty() {
            return;
        }
        let mut before = match extent {
            SyncExtent::Full => std::mem::take(&mut self.ports),
            SyncExtent::Partial => {
                dirty.ports.iter().filter_map(|port| self.ports.remove_entry(port)).collect()
            }
        };
        for LeftOutPort { port, reason, message } in left_out {
            before.remove(&port);
            self.ports.insert(port, (reason, message));
        }
        let served = before.len();
        if served > 0 {
            tracing::info!(
                service_ports = served,
                left_out = self.ports.len(),
                "service ports are not left out any more"
            );
        }
        self.forget();
        self.log_new();
        self.report(outputs);
    }

    /// A Service that is left out again later is reported again.
    fn forget(&mut self) {
        let Self { ports, logged, reported, waiting, .. } = self;
        logged.retain(|port| ports.contains_key(port));
        let services: BTreeSet<&NamespacedName> = ports.keys().map(|port| &port.name.service).collect();
        reported.retain(|service| services.contains(service));
        waiting.retain(|service, _| services.contains(service));
        self.many_are_reported &= !self.ports.is_empty();
    }

    fn log_new(&mut self) {
        for (port, (reason, message)) in &self.ports {
            if self.logged.len() >= MAX_REPORTED {
                return;
            }
            if self.logged.insert(port.clone()) {
                tracing::warn!(
                    service_port = %port,
                    %reason,
                    error = message,
                    "cannot serve this service port: it is left out, and all others are served; shunt tries again"
                );
            }
        }
    }

    fn report(&mut self, outputs: &Outputs) {
        let count = |reason| self.ports.values().filter(|(of, _)| *of == reason).count();
        for reason in LeftOutReason::ALL {
            outputs.metrics.set_service_ports_left_out(reason, count(reason));
        }
        for (port, (_, message)) in &self.ports {
            let service = &port.name.service;
            if self.reported.len() < MAX_REPORTED && self.reported.insert(service.clone()) {
                let note = format!("node {} does not serve {port}: {message}", self.node);
                self.waiting.insert(service.clone(), note);
            }
        }
        self.waiting.retain(|service, note| {
            !outputs.events.service_warning(service.clone(), REASON, ACTION, note.clone())
        });
        self.report_many(outputs);
    }

    /// Reports once on the Node that more Services are left out than get an Event.
    fn report_many(&mut self, outputs: &Outputs) {
        let Some((first, (_, message))) = self.ports.first_key_value() else { return };
        let services: BTreeSet<_> = self.ports.keys().map(|port| &port.name.service).collect();
        if services.len() > MAX_REPORTED && !std::mem::replace(&mut self.many_are_reported, true) {
            let ports = self.ports.len();
            let note = format!(
                "{ports} service ports of {} Services are not served; the first is {first}: {message}",
                services.len()
            );
            outputs.events.warning("ServicesLeftOut", note);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{
        model::testing,
        node::{NodeEvent, NodeEvents},
    };

    fn left_out(name: &str) -> LeftOutPort {
        let port = testing::key(&format!("default/{name}"), "http");
        LeftOutPort { port, reason: LeftOutReason::MapFull, message: "the map is full".into() }
    }

    fn dirty(name: &str) -> Dirty {
        Dirty { ports: [left_out(name).port].into(), ..Dirty::default() }
    }

    struct Reports {
        ports: LeftOutPorts,
        outputs: Outputs,
        received: tokio::sync::mpsc::Receiver<NodeEvent>,
    }

    impl Reports {
        fn new() -> Self {
            let (events, received) = NodeEvents::channel();
            let outputs = Outputs::new(Duration::from_mins(1), events);
            Self { ports: LeftOutPorts::new("n1".into()), outputs, received }
        }

        /// Returns the Events of a sync that leaves out these Services.
        fn sync(&mut self, names: &[&str], extent: SyncExtent, dirty: &Dirty) -> Vec<NodeEvent> {
            let left_out = names.iter().map(|name| left_out(name)).collect();
            self.ports.update(left_out, extent, dirty, &self.outputs);
            std::iter::from_fn(|| self.received.try_recv().ok()).collect()
        }

        fn counted(&self) -> String {
            let (_, text) = self.outputs.metrics.exposition().encode(None).unwrap();
            let prefix = r#"shunt_service_ports_left_out{reason="map-full"} "#;
            text.lines().find_map(|line| line.strip_prefix(prefix)).expect("a series").to_owned()
        }
    }

    fn services(events: &[NodeEvent]) -> Vec<String> {
        events
            .iter()
            .map(|event| event.service.as_ref().map_or_else(String::new, ToString::to_string))
            .collect()
    }

    #[test]
    fn a_left_out_service_gets_one_event_until_it_is_served_again() {
        let mut reports = Reports::new();
        assert_eq!(reports.counted(), "0");
        let events = reports.sync(&["a"], SyncExtent::Partial, &dirty("a"));
        assert_eq!(services(&events), ["default/a"]);
        let NodeEvent { is_warning, reason, note, .. } = &events[0];
        assert!(*is_warning && *reason == "ServiceLeftOut", "{events:?}");
        assert_eq!(note, "node n1 does not serve default/a:http TCP IPv4: the map is full");
        // It changes and is still left out, others change, and everything is compared.
        assert_eq!(reports.sync(&["a"], SyncExtent::Partial, &dirty("a")), []);
        assert_eq!(reports.sync(&[], SyncExtent::Partial, &dirty("b")), []);
        assert_eq!(reports.sync(&["a"], SyncExtent::Full, &Dirty::default()), []);
        assert_eq!(reports.counted(), "1");
        assert_eq!(reports.sync(&[], SyncExtent::Partial, &dirty("a")), []);
        assert_eq!(reports.counted(), "0");
        assert_eq!(services(&reports.sync(&["a"], SyncExtent::Partial, &dirty("a"))), ["default/a"]);
        assert_eq!(reports.sync(&[], SyncExtent::Full, &Dirty::default()), []);
        assert_eq!(reports.counted(), "0");
    }

    #[test]
    fn many_left_out_services_get_a_few_events_and_the_node_one() {
        let mut reports = Reports::new();
        let names: Vec<String> = (0..40).map(|number| format!("s{number:02}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let mut events = Vec::new();
        for _ in 0..5 {
            events.extend(reports.sync(&names, SyncExtent::Full, &Dirty::default()));
        }
        let of_node: Vec<_> = events.iter().filter(|event| event.service.is_none()).collect();
        assert_eq!((events.len(), of_node.len()), (MAX_REPORTED + 1, 1), "{events:?}");
        assert!(of_node[0].note.contains("40 service ports of 40 Services"), "{of_node:?}");
        assert_eq!(reports.counted(), "40");
    }
}
