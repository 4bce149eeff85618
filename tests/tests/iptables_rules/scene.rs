//! A conformance case played to the planning of the iptables mode alone: objects in, rules out, no kernel.

use anyhow::Result;
use proxy_userspace::{
    dataplane::{
        Dataplane as _, PlanSize as _,
        iptables::{Iptables, Offer, State},
    },
    kernel::iptables::Backend,
    model::{Dirty, IpFamily},
};
use shunt_tests::{
    case::{Case, Step},
    planned::{PlannedCase, Tables},
};

/// A case in the middle of its steps.
pub(crate) struct Scene {
    case: PlannedCase,
    state: State,
    /// IPv4's rules and IPv6's.
    pub(crate) tables: [Tables; 2],
}

impl Scene {
    /// Before the first step.
    pub(crate) fn new(case: &Case) -> Result<Self> {
        let case = PlannedCase::new(case, "iptables")?;
        let settings = &case.config().iptables;
        let offer = Offer {
            masquerade_mark: settings.masquerade_mark,
            localhost_node_ports: settings.localhost_node_ports,
            random_fully: true,
            be_liberal: false,
            counters: true,
        };
        Ok(Self { case, state: State::of_empty_tables(offer), tables: Default::default() })
    }

    /// Makes the changes of a step, plans what changed, and has the tables take it.
    pub(crate) fn play(&mut self, step: &Step) -> Result<()> {
        let dirty = self.case.play(step)?;
        let plan = Iptables::plan(&self.state, self.case.snapshot(), &dirty);
        for (family, input) in plan.inputs(Backend::Nft) {
            self.tables[usize::from(family == IpFamily::V6)].restore(&input);
        }
        plan.record(&mut self.state);
        let rest = Iptables::plan(&self.state, self.case.snapshot(), &Dirty::everything());
        anyhow::ensure!(rest.is_empty(), "left out: {rest:#?}");
        Ok(())
    }
}
