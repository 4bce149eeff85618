//! The iptables dataplane: upstream kube-proxy's rules in upstream's chains, written by
//! iptables-restore.
//!
//! A sync gives iptables-restore one input for each family. It contains only the chains whose rules
//! change. The tables are read once, at the start. After that shunt relies on its own memory until
//! somebody flushes the tables, which missing canary chains and missing jumps show.

mod counters;
mod detect;
mod drift;
mod error;
mod fixed_chains;
mod isolation;
mod node;
mod plan;
mod removal;
mod rules;
mod state;
mod udp_destinations;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

pub(in crate::dataplane) use self::detect::find_commands;
use self::{
    counters::Counters,
    fixed_chains::MODE,
    plan::FamilyPlan,
    rules::{INVALID_DROPPED, LOCALHOST_ACCEPTED},
    state::{FamilyState, PortState},
    udp_destinations::udp_destinations,
};
pub use self::{drift::HeldTables, error::IptablesError, node::RuleOptions, plan::Plan, state::State};
use super::{
    Dataplane, FailureScope, Held, HeldReader, LeftOutPort, LeftOutReason, ModeMetricsReader,
    conntrack::StaleUdpCleaner,
    families,
    iptables_text::{self, CANARY, Chain, Layout, Table, TableInput, TableState, save},
    sctp_ports,
};
use crate::{
    kernel::{
        KernelError,
        command::Launcher,
        iptables::{Backend, Iptables as Commands},
        nfacct,
        sysctl::Sysctl,
    },
    model::{Dirty, IpFamily, ServicePortKey, Snapshot},
};

const ROUTE_LOCALNET: Sysctl = Sysctl("ipv4/conf/all/route_localnet");
const BE_LIBERAL: Sysctl = Sysctl("netfilter/nf_conntrack_tcp_be_liberal");

/// The name of a chain that this mode never removes. If it is removed, somebody flushes the tables.
pub const RULE_NAMES: [&str; 1] = ["KUBE-PROXY-CANARY"];

/// The settings of the iptables dataplane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IptablesSettings {
    /// The bit that marks packets to be masqueraded.
    pub masquerade_mark: u32,
    /// Node ports are also served on 127.0.0.1 if `nodePortAddresses` contains it.
    pub localhost_node_ports: bool,
    /// Starts the commands.
    pub launcher: Launcher,
}

/// The iptables dataplane.
#[derive(Debug)]
pub struct Iptables {
    settings: IptablesSettings,
    commands: BTreeMap<IpFamily, Commands>,
    /// Options that made a restore fail.
    unsupported_options: Vec<&'static str>,
    /// Service ports that made a restore fail.
    left_out: BTreeMap<IpFamily, BTreeMap<ServicePortKey, PortState>>,
    /// Chains that a restore could not remove.
    undeletable: BTreeMap<IpFamily, BTreeSet<Chain>>,
    /// Families in which iptables cannot list a table completely.
    incomplete: BTreeSet<IpFamily>,
    /// This mode set `route_localnet`. Kept here too, because somebody may flush the chain that
    /// records it.
    set_route_localnet: bool,
    stale_udp: StaleUdpCleaner,
    counters: Counters,
    /// Families that `observe` could not read, and why. `apply` returns these errors.
    unread: Vec<(IpFamily, IptablesError)>,
}

impl Iptables {
    /// Finds out which iptables the node uses. Changes nothing.
    pub fn new(settings: IptablesSettings) -> Result<Self, IptablesError> {
        let commands = find_commands(&settings.launcher)?;
        let counters = Counters::default();
        for family in commands.keys() {
            counters.add(*family);
        }
        let loopback: &[IpFamily] = if settings.localhost_node_ports { &[IpFamily::V4] } else { &[] };
        Ok(Self {
            settings,
            commands,
            unsupported_options: Vec::new(),
            left_out: BTreeMap::new(),
            undeletable: BTreeMap::new(),
            incomplete: BTreeSet::new(),
            set_route_localnet: false,
            stale_udp: StaleUdpCleaner::new(loopback),
            counters,
            unread: Vec::new(),
        })
    }

    fn rule_options(&self, commands: &Commands) -> Result<RuleOptions, KernelError> {
        let is_supported = |option: &str| !self.unsupported_options.contains(&option);
        Ok(RuleOptions {
            masquerade_mark: self.settings.masquerade_mark,
            localhost_node_ports: self.settings.localhost_node_ports,
            random_fully: commands.supports_random_fully()? && is_supported(error::RANDOM_FULLY),
            be_liberal: BE_LIBERAL.read()?.is_some_and(|value| value != 0),
            counters: is_supported(error::NFACCT) && create_counters(),
        })
    }

    fn observe_family(&mut self, family: IpFamily, commands: &Commands) -> Result<FamilyState, KernelError> {
        let mut tables = BTreeMap::new();
        self.incomplete.remove(&family);
        for (table, saved) in save(commands, &Table::ALL) {
            let saved = saved?;
            if !Commands::is_complete(&saved) {
                tracing::warn!(
                    %family,
                    table = table.name(),
                    "iptables cannot list this table, because it holds rules that iptables does not know: stale chains of an \
                     earlier process may stay; remove those rules with nft"
                );
                self.incomplete.insert(family);
                tables.insert(table, read_canary_and_jumps(commands, table)?);
                continue;
            }
            if table == Table::Nat {
                for destination in udp_destinations(&saved, family) {
                    self.stale_udp.add_former_destination(destination);
                }
            }
            tables.insert(table, read_table(table, &saved));
        }
        let mut state = FamilyState::observed(self.rule_options(commands)?, tables, routes_localnet()?);
        self.set_route_localnet |= state.set_route_localnet;
        state.set_route_localnet = self.set_route_localnet && family == IpFamily::V4;
        state.left_out = self.left_out.get(&family).cloned().unwrap_or_default();
        state.undeletable = self.undeletable.get(&family).cloned().unwrap_or_default();
        Ok(state)
    }

    /// Returns true if canaries, jumps and options are as before. It takes too long to read all
    /// rules again.
    fn is_undisturbed(&self, commands: &Commands, state: &FamilyState) -> Result<bool, KernelError> {
        if self.rule_options(commands)? != state.options || (state.routes_localnet && !routes_localnet()?) {
            return Ok(false);
        }
        for table in Table::ALL {
            let current = read_canary_and_jumps(commands, table)?;
            if !current.chains.contains_key(&CANARY) || !current.missing_jumps(&MODE, table).is_empty() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The layout of inputs for this family. iptables-nft rejects an input that lists all chains if
    /// it cannot list them; the layout for legacy iptables does not list them.
    fn layout(&self, family: IpFamily, commands: &Commands) -> Layout {
        let is_incomplete = self.incomplete.contains(&family);
        Layout::TargetsFirst(if is_incomplete { Backend::Legacy } else { commands.backend })
    }

    /// Finds out why iptables-restore rejected a plan, and what the next plan has to leave out.
    fn leave_out_rejected(&mut self, plan: &FamilyPlan, failure: &IptablesError, commands: &Commands) {
        let option = failure.unsupported_option();
        self.unsupported_options.extend(option);
        let undeletable = failure.line().and_then(|line| Chain::parse(line.strip_prefix("-X ")?));
        if let Some(chain) = undeletable {
            tracing::warn!(
                ?chain,
                "cannot remove this chain, because rules of other programs lead to it: shunt empties it and keeps it until the \
                 next start"
            );
            self.undeletable.entry(plan.family).or_default().insert(chain);
        }
        let rejected_rule = failure.line().filter(|line| line.starts_with("-A ") && option.is_none());
        let owner = rejected_rule.and_then(|rule| plan.owner(rule));
        let mut rejected: Vec<_> = owner.into_iter().collect();
        if rejected.is_empty() && option.is_none() && undeletable.is_none() && failure.is_rejection() {
            rejected = self.search_rejected(plan, commands);
        }
        let rejected = rejected.into_iter().map(|(key, port)| (key.clone(), port.clone()));
        self.left_out.entry(plan.family).or_default().extend(rejected);
    }

    /// Finds the service ports of a rejected plan by trying parts of it. If it is rejected without
    /// any of them too, the next plan has no rules that count packets: old versions of legacy
    /// iptables do not say that the kernel lacks the match for these.
    fn search_rejected<'a>(
        &mut self,
        plan: &'a FamilyPlan,
        commands: &Commands,
    ) -> Vec<(&'a ServicePortKey, &'a PortState)> {
        tracing::warn!(
            family = %plan.family,
            "iptables-restore named no rule: trying groups of Services to find those whose rules it rejects"
        );
        let layout = self.layout(plan.family, commands);
        let mut restore = |part: &[TableInput]| accepts(commands, plan.family, layout, part);
        let found = isolation::isolate(plan, &mut restore);
        if found.has_other_cause && plan.has_counters() {
            tracing::warn!(
                option = error::NFACCT,
                "iptables-restore rejects rules of no Service: rules are written without this option"
            );
            self.unsupported_options.push(error::NFACCT);
        }
        found.rejected
    }

    /// Returns an error while any service port is left out. All other service ports are served.
    fn check_left_out(&mut self, state: &State) -> Result<(), IptablesError> {
        for (family, state) in &state.families {
            self.left_out.insert(*family, state.left_out.clone());
        }
        let mut keys = self.left_out.values().flat_map(BTreeMap::keys);
        let count = keys.clone().count();
        keys.next().map_or(Ok(()), |first| Err(IptablesError::LeftOut { count, first: first.clone() }))
    }

    fn apply_family(&mut self, plan: &FamilyPlan) -> Result<(), IptablesError> {
        let Some(commands) = self.commands.get(&plan.family).cloned() else { return Ok(()) };
        if !plan.tables.is_empty() {
            let text = iptables_text::text(&plan.tables, self.layout(plan.family, &commands));
            tracing::trace!(family = %plan.family, text, "writing rules with iptables-restore");
            if let Err(source) = commands.restore_all(text.clone()) {
                self.counters.record_failure(plan);
                let failure = IptablesError::of_restore(plan.family, &text, source);
                self.leave_out_rejected(plan, &failure, &commands);
                return Err(failure);
            }
        }
        if plan.route_localnet {
            tracing::info!(
                "setting route_localnet: node ports are served on 127.0.0.1 (iptables.localhostNodePorts)"
            );
            ROUTE_LOCALNET.write(1)?;
            self.set_route_localnet = true;
        }
        Ok(())
    }
}

/// Returns true if iptables-restore accepts an input, and false if it rejects it.
fn accepts(
    commands: &Commands,
    family: IpFamily,
    layout: Layout,
    input: &[TableInput],
) -> Result<bool, IptablesError> {
    let text = iptables_text::text(input, layout);
    let Err(source) = commands.restore_all(text.clone()) else { return Ok(true) };
    let error = IptablesError::of_restore(family, &text, source);
    if error.is_rejection() { Ok(false) } else { Err(error) }
}

fn create_counters() -> bool {
    let created = [INVALID_DROPPED, LOCALHOST_ACCEPTED].into_iter().try_for_each(nfacct::ensure);
    created
        .inspect_err(|error| tracing::debug!(%error, "cannot create nfacct objects: packets are not counted"))
        .is_ok()
}

fn routes_localnet() -> Result<bool, KernelError> {
    Ok(ROUTE_LOCALNET.read()?.is_some_and(|value| value != 0))
}

fn read_table(table: Table, saved: &str) -> TableState {
    // iptables prints two spaces before the name of a counter. shunt writes one.
    TableState::read(&MODE, table, &saved.replace("--nfacct-name  ", "--nfacct-name "))
}

/// Reads the canary and the jumps of a table. Listing a chain is cheap with nftables. With legacy
/// iptables it costs as much as saving the table.
fn read_canary_and_jumps(commands: &Commands, table: Table) -> Result<TableState, KernelError> {
    if commands.backend == Backend::Legacy {
        return Ok(read_table(table, &commands.save(table.name())?));
    }
    let canary = CANARY.to_string();
    let jumps = MODE.jumps.iter().filter(|jump| jump.table == table);
    let chains: BTreeSet<&str> = jumps.map(|jump| jump.from).chain([&*canary]).collect();
    let listed = chains.into_iter().map(|chain| commands.list(table.name(), chain));
    let text: String = listed.collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect();
    Ok(read_table(table, &text))
}

impl Dataplane for Iptables {
    type State = State;
    type Plan = Plan;
    type Error = IptablesError;

    /// Leaves out a family that cannot be read, and serves the other. `apply` returns the error.
    fn observe(&mut self) -> Result<State, IptablesError> {
        let mut state = State::default();
        self.unread.clear();
        for (family, commands) in self.commands.clone() {
            match self.observe_family(family, &commands) {
                Ok(observed) => drop(state.families.insert(family, observed)),
                Err(error) => self.unread.push((family, error.into())),
            }
        }
        if state.families.is_empty()
            && let Some((_, error)) = self.unread.pop()
        {
            return Err(error);
        }
        Ok(state)
    }

    /// The state does not contain a family whose rules were rejected.
    fn is_certain(&mut self, state: &State) -> bool {
        self.commands.iter().all(|(family, commands)| {
            let state = state.families.get(family);
            state.is_some_and(|state| self.is_undisturbed(commands, state).unwrap_or(false))
        })
    }

    fn plan(state: &State, snapshot: &Snapshot, dirty: &Dirty) -> Plan {
        plan::plan(state, snapshot, dirty)
    }

    /// If a family fails, forgets its state and continues with the other family.
    fn apply(&mut self, state: &mut State, plan: Plan) -> Result<(), IptablesError> {
        let mut errors = std::mem::take(&mut self.unread);
        for plan in plan.families {
            let family = plan.family;
            if let Err(error) = self.apply_family(&plan) {
                state.families.remove(&family);
                errors.push((family, error));
            } else if let Some(state) = state.families.get_mut(&family) {
                let written = plan.tables.iter().map(|input| (input.table, input.rules())).collect();
                plan.record(state);
                self.counters.record_sync(family, &written, state);
            }
        }
        let errors = errors.into_iter().map(|(family, error)| (Some(family), error)).collect();
        families::first_error(errors).map_or_else(|| self.check_left_out(state), Err)
    }

    fn lacks_sctp(&self) -> Option<&'static str> {
        sctp_ports::lacked_by_conntrack()
    }

    fn failure_scope(error: &IptablesError) -> FailureScope {
        match error {
            IptablesError::LeftOut { .. } => FailureScope::ServicePorts,
            IptablesError::OfFamily(one) => FailureScope::Family(one.family),
            IptablesError::Kernel(_) | IptablesError::Restore { .. } => FailureScope::Everything,
        }
    }

    fn left_out_ports(&self) -> Vec<LeftOutPort> {
        let left_out = |port: &ServicePortKey| LeftOutPort {
            port: port.clone(),
            reason: LeftOutReason::Rejected,
            message: "iptables-restore rejects its rules".into(),
        };
        self.left_out.values().flat_map(BTreeMap::keys).map(left_out).collect()
    }

    fn held_reader(&self) -> Option<HeldReader> {
        let commands = self.commands.clone();
        Some(Box::new(move || HeldTables::read(&commands).map(Held::Iptables)))
    }

    fn differences(
        state: &State,
        held: &Held,
        snapshot: &Snapshot,
        of: Option<&ServicePortKey>,
    ) -> Vec<String> {
        let Held::Iptables(held) = held else { return Vec::new() };
        match of {
            Some(key) => held.differences(state, snapshot, key),
            None => held.differences_of_node(state, snapshot),
        }
    }

    fn mode_metrics(&mut self) -> Option<ModeMetricsReader> {
        Some(self.counters.metrics())
    }

    fn stale_udp(&mut self) -> Option<&mut StaleUdpCleaner> {
        Some(&mut self.stale_udp)
    }

    fn cleanup(&mut self) -> Vec<IptablesError> {
        Self::remove(&self.settings)
    }
}
