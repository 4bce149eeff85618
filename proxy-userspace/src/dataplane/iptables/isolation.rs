//! Finds the service ports that iptables-restore rejects when it names no rule: by trying parts of
//! a plan, half by half. All other service ports are served meanwhile.
//!
//! Legacy iptables hands over a table as a whole, and the kernel does not say which rule it
//! rejects.

use std::collections::{BTreeSet, HashSet};

use super::{error::IptablesError, plan::FamilyPlan, rules::SHARED_CHAINS, state::PortState};
use crate::{
    dataplane::iptables_text::{Chain, ChainRules, TableInput},
    model::ServicePortKey,
};

/// The number of inputs to try after one rejection: enough for three service ports among ten
/// thousand. The next sync finds the others; it has fewer service ports to try.
const MAX_TRIES: usize = 64;

/// A service port that the plan writes.
type Port<'a> = (&'a ServicePortKey, &'a PortState);

/// Runs iptables-restore. Returns true if it accepted an input, and false if it rejected it. An
/// error says nothing about the input: for example, the lock was taken for too long.
type Restore<'a> = dyn FnMut(&[TableInput]) -> Result<bool, IptablesError> + 'a;

/// What [`isolate`] found.
#[derive(Debug, Default)]
pub(super) struct Isolation<'a> {
    /// The service ports whose rules are rejected.
    pub(super) rejected: Vec<Port<'a>>,
    /// The plan is rejected without any service port, too.
    pub(super) has_other_cause: bool,
}

/// Applies a plan without the service ports that are rejected, and returns these. After an error,
/// returns what was found so far: the next attempt continues.
pub(super) fn isolate<'a>(plan: &'a FamilyPlan, restore: &mut Restore<'_>) -> Isolation<'a> {
    let mut found = Isolation::default();
    if let Err(error) = search(plan, restore, &mut found) {
        tracing::warn!(%error, "cannot find all Services whose rules iptables-restore rejects; shunt will try again");
    }
    found
}

fn search<'a>(
    plan: &'a FamilyPlan,
    restore: &mut Restore<'_>,
    found: &mut Isolation<'a>,
) -> Result<(), IptablesError> {
    let Some(ports) = suspects(plan, restore)? else {
        found.has_other_cause = true;
        return Ok(());
    };
    let mut tries = 0;
    let mut left_out: BTreeSet<&ServicePortKey> = ports.iter().map(|(key, _)| *key).collect();
    let mut untried = vec![&ports[..]];
    while let Some(tried) = untried.pop().filter(|_| tries < MAX_TRIES) {
        tries += 1;
        for (key, _) in tried {
            left_out.remove(key);
        }
        let others: Vec<Port<'_>> = ports.iter().copied().filter(|(key, _)| left_out.contains(key)).collect();
        if restore(&part(plan, tried, &others))? {
            continue;
        }
        left_out.extend(tried.iter().map(|(key, _)| *key));
        match tried {
            [] => {}
            [one] => found.rejected.push(*one),
            _ => untried.extend(<[_; 2]>::from(tried.split_at(tried.len() / 2))),
        }
    }
    Ok(())
}

/// Applies a plan without the service ports that may be the rejected ones, and returns these. All
/// others stay served. Returns `None` if the plan is rejected without any service port, too.
///
/// A plan after an observation writes the service ports of all Services, also those whose chains
/// the kernel holds already. The kernel accepted those before.
fn suspects<'a>(
    plan: &'a FamilyPlan,
    restore: &mut Restore<'_>,
) -> Result<Option<Vec<Port<'a>>>, IptablesError> {
    let filled: BTreeSet<Chain> =
        plan.tables.iter().flat_map(|input| &input.filled).map(|rules| rules.chain).collect();
    let is_new = |(_, port): &Port<'_>| {
        port.chains.is_empty() || port.chains.iter().any(|chain| filled.contains(chain))
    };
    let (new, known): (Vec<Port<'a>>, Vec<_>) = plan.written().partition(is_new);
    if restore(&part(plan, &[], &new))? {
        return Ok(Some(new));
    }
    // The rules of a service port in shared chains can change without its own chains.
    let all = [new, known].concat();
    Ok(restore(&part(plan, &[], &all))?.then_some(all))
}

/// Returns the plan's input with the own chains of some service ports, and without the rules of
/// others in shared chains. It removes no chains.
fn part(plan: &FamilyPlan, with: &[Port<'_>], without: &[Port<'_>]) -> Vec<TableInput> {
    let (included, excluded) = (RuleOwners::of(with), RuleOwners::of(without));
    let of_table = |input: &TableInput| {
        let is_included = |rules: &&ChainRules| {
            matches!(rules.chain, Chain::Fixed(_)) || included.chains.contains(&rules.chain)
        };
        let mut filled: Vec<ChainRules> = input.filled.iter().filter(is_included).cloned().collect();
        for rules in &mut filled {
            if SHARED_CHAINS.contains(&(input.table, rules.chain)) {
                let others = rules.lines.lines().filter(|rule| !excluded.own(rule));
                rules.lines = others.flat_map(|rule| [rule, "\n"]).collect();
            }
        }
        TableInput { filled, removed: Vec::new(), jumps: input.jumps.clone(), table: input.table }
    };
    plan.tables.iter().map(of_table).filter(|input| !input.is_empty()).collect()
}

/// Service ports that own rules.
pub(super) struct RuleOwners {
    chains: BTreeSet<Chain>,
    names: HashSet<String>,
}

impl RuleOwners {
    pub(super) fn of(ports: &[Port<'_>]) -> Self {
        let chains = ports.iter().flat_map(|(_, port)| port.chains.iter().copied()).collect();
        Self { chains, names: ports.iter().map(|(key, _)| key.name.to_string()).collect() }
    }

    /// Returns true if a rule belongs to one of them, by the first chain of a service port in it,
    /// or by its comment.
    pub(super) fn own(&self, rule: &str) -> bool {
        let mut chains = rule.split([' ', '"']).filter_map(Chain::parse);
        if let Some(chain) = chains.find(|chain| matches!(chain, Chain::Of(..))) {
            return self.chains.contains(&chain);
        }
        let comment = rule.split_once("--comment \"").map_or("", |(_, comment)| comment);
        comment.split([' ', '"']).next().is_some_and(|name| self.names.contains(name))
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::{
        super::{
            plan,
            state::{FamilyState, State},
            tests::OPTIONS,
        },
        *,
    };
    use crate::{
        dataplane::iptables_text::{SERVICES, Table},
        kernel::KernelError,
        model::{Dirty, IpFamily, Snapshot, testing},
    };

    /// Returns a Snapshot of this number of Services with an endpoint, web-0 and so on.
    fn services(count: usize) -> Snapshot {
        let mut world = testing::World::default();
        for number in 0..count {
            let service =
                testing::service(&format!("default/web-{number}"), &format!("10.96.0.{}", number + 10));
            world.services.insert(service.name.clone(), service);
            let endpoints = vec![testing::endpoint(&format!("10.244.1.{}", number + 10))];
            let slice =
                testing::slice(&format!("default/web-{number}-1"), &format!("web-{number}"), endpoints);
            world.slices.insert(slice.name.clone(), slice);
        }
        let facts = testing::facts(&[("eth0", "192.168.57.11/24")]);
        world.model(&testing::settings(), &facts).snapshot().clone()
    }

    /// Returns the full plan of IPv4 for a Snapshot, after an observation of a kernel that holds
    /// another one.
    fn plan_after_restart(held: &Snapshot, wanted: &Snapshot) -> FamilyPlan {
        let mut state = State::of_empty_tables(OPTIONS);
        plan::plan(&state, held, &Dirty::everything()).record(&mut state);
        let read = |state: &FamilyState| FamilyState::observed(OPTIONS, state.tables.clone(), true);
        let families = state.families.iter().map(|(family, state)| (*family, read(state))).collect();
        let plan = plan::plan(&State { families }, wanted, &Dirty::everything());
        plan.families.into_iter().find(|plan| plan.family == IpFamily::V4).unwrap()
    }

    /// Returns the rules that an input has for nat KUBE-SERVICES, without the last ones.
    fn rules_of_services(inputs: &[TableInput]) -> Vec<String> {
        let nat = inputs.iter().filter(|input| input.table == Table::Nat);
        let filled = nat.flat_map(|input| &input.filled).filter(|rules| rules.chain == SERVICES);
        let lines = filled.flat_map(|rules| rules.lines.lines().map(str::to_owned));
        lines.filter(|line| line.contains("cluster IP")).collect()
    }

    fn names(ports: &[Port<'_>]) -> Vec<String> {
        ports.iter().map(|(key, _)| key.name.to_string()).collect()
    }

    fn refuses(inputs: &[TableInput], address: &str) -> bool {
        rules_of_services(inputs).iter().any(|rule| rule.contains(address))
    }

    #[test]
    fn services_that_the_kernel_holds_stay_served_during_the_search() {
        let (held, wanted) = (services(20), services(21));
        let plan = plan_after_restart(&held, &wanted);
        assert_eq!(plan.written().count(), 21, "the plan does not know what the kernel holds");
        let mut counts = Vec::new();
        let mut restore = |inputs: &[TableInput]| {
            counts.push(rules_of_services(inputs).len());
            Ok(!refuses(inputs, "10.96.0.30/32"))
        };
        let Isolation { rejected, has_other_cause } = isolate(&plan, &mut restore);
        assert!(!has_other_cause);
        assert_eq!(names(&rejected), ["default/web-20"]);
        assert_eq!(counts, [20, 21]);
    }

    #[test]
    fn a_rejected_service_port_without_new_chains_is_found() {
        let held = services(9);
        let mut plan = plan_after_restart(&held, &held);
        let mut with_new = plan_after_restart(&Snapshot::default(), &held);
        // The kernel holds the chains of all Services, but not their rules in KUBE-SERVICES.
        for input in &mut with_new.tables {
            input.filled.retain(|rules| SHARED_CHAINS.contains(&(input.table, rules.chain)));
        }
        plan.tables = with_new.tables;
        let mut restore = |inputs: &[TableInput]| Ok(!refuses(inputs, "10.96.0.14/32"));
        assert_eq!(names(&isolate(&plan, &mut restore).rejected), ["default/web-4"]);
    }

    #[test]
    fn no_service_port_is_left_out_because_the_lock_is_taken() {
        let held = services(8);
        let plan = plan_after_restart(&Snapshot::default(), &held);
        for accepted_tries in 0..8 {
            let mut tries = 0;
            let mut restore = |inputs: &[TableInput]| {
                tries += 1;
                if tries > accepted_tries {
                    let source = KernelError::call("lock", "xtables")(io::ErrorKind::TimedOut.into());
                    return Err(IptablesError::of_restore(IpFamily::V4, "", source));
                }
                Ok(!refuses(inputs, "10.96.0.17/32"))
            };
            let rejected = names(&isolate(&plan, &mut restore).rejected);
            assert!(rejected.iter().all(|name| name == "default/web-7"), "{rejected:?}");
            assert!(tries <= accepted_tries + 1, "the search goes on after an error");
        }
    }

    #[test]
    fn rejected_counters_are_no_fault_of_service_ports() {
        let plan = plan_after_restart(&Snapshot::default(), &services(3));
        let counts = |inputs: &[TableInput]| {
            inputs.iter().flat_map(|input| &input.filled).any(|rules| rules.lines.contains("-m nfacct"))
        };
        let empty = State::of_empty_tables(OPTIONS);
        let first = plan::plan(&empty, &services(3), &Dirty::everything()).families.remove(0);
        let found = isolate(&first, &mut |inputs| Ok(!counts(inputs)));
        assert!(found.rejected.is_empty() && found.has_other_cause && first.has_counters());
        assert!(!plan.has_counters(), "the kernel holds the rules that count");
    }
}
