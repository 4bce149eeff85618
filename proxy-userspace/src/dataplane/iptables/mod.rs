//! The iptables dataplane: upstream kube-proxy's rules in upstream's chains, written by iptables-restore.
//!
//! One input a family and sync; rules are compared chain by chain with what was written before, and only chains that change are
//! written. What was there before this process is read once; afterwards its own memory is relied on as long as nobody has
//! flushed the tables, which the canary chains and the jumps tell.

mod cleanup;
mod counters;
mod detect;
mod failure;
mod fixed;
mod input;
mod isolation;
mod jumps;
mod names;
mod plan;
mod removal;
mod rules;
mod saved;
mod state;
mod terms;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

pub(in crate::dataplane) use self::detect::in_use as commands_in_use;
use self::{
    counters::Counters,
    input::TableInput,
    jumps::JUMPS,
    names::{CANARY, Chain, Table},
    plan::FamilyPlan,
    rules::{INVALID_DROPPED, LOCALHOST_ACCEPTED},
    state::{FamilyState, PortState, TableState},
};
pub use self::{failure::IptablesError, plan::Plan, state::State, terms::Offer};
use super::{Dataplane, Readings, conntrack::StaleUdpCleaner, families};
use crate::{
    kernel::{
        KernelError,
        command::SearchPath,
        iptables::{Backend, Iptables as Commands},
        nfacct,
        sysctl::NetSetting,
    },
    model::{Dirty, IpFamily, ServicePortKey, Snapshot},
};

const ROUTE_LOCALNET: NetSetting = NetSetting("ipv4/conf/all/route_localnet");
const BE_LIBERAL: NetSetting = NetSetting("netfilter/nf_conntrack_tcp_be_liberal");
/// `MASQUERADE --random-fully` came with it.
const RANDOM_FULLY: [u32; 3] = [1, 6, 2];

/// A name that rules of ours carry and that we never remove: where it goes, somebody flushes the tables.
pub const RULE_NAMES: [&str; 1] = ["KUBE-PROXY-CANARY"];

/// What the iptables dataplane needs to know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IptablesSettings {
    /// The bit of a packet's mark that has it masqueraded.
    pub masquerade_mark: u32,
    /// Node ports are served on 127.0.0.1 too, if `nodePortAddresses` has it.
    pub localhost_node_ports: bool,
    /// Where commands are looked for.
    pub path: SearchPath,
}

/// The dataplane: which commands to use, and what they turned out not to take.
#[derive(Debug)]
pub struct Iptables {
    settings: IptablesSettings,
    commands: BTreeMap<IpFamily, Commands>,
    /// Words that a restore failed for.
    refused: Vec<&'static str>,
    /// Service ports that a restore failed for.
    left_out: BTreeMap<IpFamily, BTreeMap<ServicePortKey, PortState>>,
    /// Chains that a restore failed to remove.
    held_by_others: BTreeMap<IpFamily, BTreeSet<Chain>>,
    /// Families of which a table cannot be shown as a whole.
    not_shown: BTreeSet<IpFamily>,
    /// `route_localnet` was off before this mode, also if the chain that tells so is flushed.
    set_route_localnet: bool,
    stale_udp: StaleUdpCleaner,
    counters: Counters,
    /// Families that could not be read, and why; not told yet.
    unread: Vec<(IpFamily, IptablesError)>,
}

impl Iptables {
    /// Finds out which iptables the node uses. Nothing is changed yet.
    pub fn new(settings: IptablesSettings) -> Result<Self, IptablesError> {
        let commands = detect::in_use(&settings.path)?;
        for family in IpFamily::ALL {
            match commands.get(&family) {
                Some(commands) => tracing::info!(%family, %commands, "working with"),
                None => {
                    tracing::warn!(%family, "Services of this family are not served: it has no iptables here");
                }
            }
        }
        let counters = Counters::default();
        for family in commands.keys() {
            counters.add(*family);
        }
        let loopback: &[IpFamily] = if settings.localhost_node_ports { &[IpFamily::V4] } else { &[] };
        Ok(Self {
            settings,
            commands,
            refused: Vec::new(),
            left_out: BTreeMap::new(),
            held_by_others: BTreeMap::new(),
            not_shown: BTreeSet::new(),
            set_route_localnet: false,
            stale_udp: StaleUdpCleaner::new(loopback),
            counters,
            unread: Vec::new(),
        })
    }

    fn offer(&self, commands: &Commands) -> Result<Offer, KernelError> {
        let takes = |word: &str| !self.refused.contains(&word);
        Ok(Offer {
            masquerade_mark: self.settings.masquerade_mark,
            localhost_node_ports: self.settings.localhost_node_ports,
            random_fully: masquerades_randomly(commands)? && takes(failure::RANDOM_FULLY),
            be_liberal: BE_LIBERAL.read()?.is_some_and(|value| value != 0),
            counters: takes(failure::NFACCT) && has_counters(),
        })
    }

    fn observe_family(&mut self, family: IpFamily, commands: &Commands) -> Result<FamilyState, KernelError> {
        let mut tables = BTreeMap::new();
        self.not_shown.remove(&family);
        for table in Table::ALL {
            let saved = commands.save(table.name())?;
            if !Commands::is_shown(&saved) {
                tracing::warn!(%family, table = table.name(), "it holds rules that iptables does not know: chains that an earlier process left may stay");
                self.not_shown.insert(family);
                tables.insert(table, glance(commands, table)?);
                continue;
            }
            if table == Table::Nat {
                for destination in saved::udp_destinations(&saved, family) {
                    self.stale_udp.add_former_destination(destination);
                }
            }
            tables.insert(table, saved::table(table, &saved));
        }
        let mut state = FamilyState::observed(self.offer(commands)?, tables, routes_localnet()?);
        self.set_route_localnet |= state.set_route_localnet;
        state.set_route_localnet = self.set_route_localnet && family == IpFamily::V4;
        state.left_out = self.left_out.get(&family).cloned().unwrap_or_default();
        state.held_by_others = self.held_by_others.get(&family).cloned().unwrap_or_default();
        Ok(state)
    }

    /// Whether what was written is there still, as far as a look at canaries and jumps tells. Reading all rules takes
    /// too long to do it now and then.
    fn is_undisturbed(&self, commands: &Commands, held: &FamilyState) -> Result<bool, KernelError> {
        if self.offer(commands)? != held.offer || (held.routes_localnet && !routes_localnet()?) {
            return Ok(false);
        }
        for table in Table::ALL {
            let seen = glance(commands, table)?;
            if !seen.chains.contains_key(&CANARY) || !seen.missing_jumps(table).is_empty() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// To iptables-nft, an input that asks for all chains would be an error where it cannot show them; the old iptables needs none.
    fn written_for(&self, family: IpFamily, commands: &Commands) -> Backend {
        if self.not_shown.contains(&family) { Backend::Legacy } else { commands.backend }
    }

    /// What the next plan is to go without.
    fn learn(&mut self, plan: &FamilyPlan, failure: &IptablesError, commands: &Commands) {
        let refused = failure.refused();
        self.refused.extend(refused);
        let unremovable = failure.unremovable();
        if let Some(chain) = unremovable {
            tracing::warn!(?chain, "rules of others lead to this chain: it stays until the next start");
            self.held_by_others.entry(plan.family).or_default().insert(chain);
        }
        let owner = failure.rule().filter(|_| refused.is_none()).and_then(|rule| plan.owner(rule));
        let mut guilty: Vec<_> = owner.into_iter().collect();
        if guilty.is_empty() && refused.is_none() && unremovable.is_none() && failure.is_refusal() {
            tracing::warn!(family = %plan.family, "no rule is named: looking for the Services that are refused");
            let backend = self.written_for(plan.family, commands);
            let mut restore = |part: &[TableInput]| commands.restore_all(input::text(part, backend)).is_ok();
            guilty = isolation::isolate(plan, &mut restore);
        }
        let guilty = guilty.into_iter().map(|(key, port)| (key.clone(), port.clone()));
        self.left_out.entry(plan.family).or_default().extend(guilty);
    }

    /// What is left out is an error as long as it is there, but of no other service port.
    fn tell_left_out(&mut self, state: &State) -> Result<(), IptablesError> {
        for (family, held) in &state.families {
            self.left_out.insert(*family, held.left_out.clone());
        }
        let mut keys = self.left_out.values().flat_map(BTreeMap::keys);
        let count = keys.clone().count();
        keys.next().map_or(Ok(()), |first| Err(IptablesError::LeftOut { count, first: first.clone() }))
    }

    fn apply_family(&mut self, plan: &FamilyPlan) -> Result<(), IptablesError> {
        let Some(commands) = self.commands.get(&plan.family).cloned() else { return Ok(()) };
        if !plan.tables.is_empty() {
            let text = input::text(&plan.tables, self.written_for(plan.family, &commands));
            tracing::trace!(family = %plan.family, text, "restoring");
            if let Err(source) = commands.restore_all(text.clone()) {
                self.counters.failed(plan);
                let failure = failure::of_restore(plan.family, &text, source);
                self.learn(plan, &failure, &commands);
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

/// Whether iptables takes `MASQUERADE --random-fully`.
pub(in crate::dataplane) fn masquerades_randomly(commands: &Commands) -> Result<bool, KernelError> {
    Ok(commands.version()?.is_none_or(|version| version >= RANDOM_FULLY))
}

fn has_counters() -> bool {
    let made = [INVALID_DROPPED, LOCALHOST_ACCEPTED].into_iter().try_for_each(nfacct::ensure);
    made.inspect_err(|error| tracing::debug!(%error, "packets are not counted")).is_ok()
}

fn routes_localnet() -> Result<bool, KernelError> {
    Ok(ROUTE_LOCALNET.read()?.is_some_and(|value| value != 0))
}

/// The canary and the jumps of a table. To list a chain costs nftables next to nothing, and the old iptables as much as
/// to save the table.
fn glance(commands: &Commands, table: Table) -> Result<TableState, KernelError> {
    if commands.backend == Backend::Legacy {
        return Ok(saved::table(table, &commands.save(table.name())?));
    }
    let canary = CANARY.to_string();
    let mut chains: Vec<&str> =
        JUMPS.iter().filter(|jump| jump.table == table).map(|jump| jump.from).collect();
    chains.sort_unstable();
    chains.dedup();
    chains.push(&canary);
    let listed = chains.into_iter().map(|chain| commands.list(table.name(), chain));
    let text: String = listed.collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect();
    Ok(saved::table(table, &text))
}

impl Dataplane for Iptables {
    type State = State;
    type Plan = Plan;
    type Error = IptablesError;

    /// A family that cannot be read is left out, and told of by `apply`: the other goes on.
    fn observe(&mut self) -> Result<State, IptablesError> {
        let mut state = State::default();
        self.unread.clear();
        for (family, commands) in self.commands.clone() {
            match self.observe_family(family, &commands) {
                Ok(held) => drop(state.families.insert(family, held)),
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

    /// A family whose rules were refused is not in the state any more.
    fn is_certain(&mut self, state: &State) -> bool {
        self.commands.iter().all(|(family, commands)| {
            let held = state.families.get(family);
            held.is_some_and(|held| self.is_undisturbed(commands, held).unwrap_or(false))
        })
    }

    fn plan(state: &State, snapshot: &Snapshot, dirty: &Dirty) -> Plan {
        plan::plan(state, snapshot, dirty)
    }

    /// Goes on with the other family where one fails; nothing of that one is relied on any more.
    fn apply(&mut self, state: &mut State, plan: Plan) -> Result<(), IptablesError> {
        let mut errors = std::mem::take(&mut self.unread);
        for plan in plan.families {
            match self.apply_family(&plan) {
                Ok(()) => {
                    if let Some(held) = state.families.get_mut(&plan.family) {
                        let family = plan.family;
                        let written = plan.tables.iter().map(|input| (input.table, input.rules())).collect();
                        plan.record(held);
                        self.counters.wrote(family, &written, held);
                    }
                }
                Err(error) => {
                    state.families.remove(&plan.family);
                    errors.push((plan.family, error));
                }
            }
        }
        let errors = errors.into_iter().map(|(family, error)| (Some(family), error)).collect();
        families::error_of(errors).map_or_else(|| self.tell_left_out(state), Err)
    }

    fn failed_family(error: &IptablesError) -> Option<IpFamily> {
        if let IptablesError::OfFamily(one) = error { Some(one.family) } else { None }
    }

    fn readings(&mut self) -> Option<Readings> {
        Some(self.counters.readings())
    }

    fn stale_udp(&mut self) -> Option<&mut StaleUdpCleaner> {
        Some(&mut self.stale_udp)
    }

    fn is_partial(error: &IptablesError) -> bool {
        matches!(error, IptablesError::LeftOut { .. })
    }

    fn cleanup(&mut self) -> Vec<IptablesError> {
        Self::remove(&self.settings)
    }
}
