//! Plays a conformance case to the planner of the iptables mode: objects in, rules out, without a
//! kernel.

use anyhow::Result;
use proxy_userspace::{
    assembly,
    dataplane::{
        Dataplane as _, PlanSize as _,
        iptables::{Iptables, RuleOptions, State},
    },
    kernel::{command::Launcher, iptables::Backend},
    model::{Dirty, IpFamily},
};
use shunt_tests::{
    case::{Case, Step},
    planned::{PlannedCase, Tables},
};

/// The state of a case between steps.
pub(crate) struct Scene {
    case: PlannedCase,
    state: State,
    /// The rules of IPv4 and IPv6.
    pub(crate) tables: [Tables; 2],
}

impl Scene {
    /// Returns the state before the first step.
    pub(crate) fn new(case: &Case) -> Result<Self> {
        let case = PlannedCase::new(case, "iptables")?;
        let settings = assembly::iptables(case.config(), &Launcher::default());
        let options = RuleOptions {
            masquerade_mark: settings.masquerade_mark,
            localhost_node_ports: settings.localhost_node_ports,
            random_fully: true,
            be_liberal: false,
            counters: true,
        };
        Ok(Self { case, state: State::of_empty_tables(options), tables: Default::default() })
    }

    /// Makes the changes of a step, plans them, and applies the plan to the tables.
    pub(crate) fn apply_step(&mut self, step: &Step) -> Result<()> {
        let dirty = self.case.apply_step(step)?;
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
