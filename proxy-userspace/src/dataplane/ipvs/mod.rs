//! The ipvs dataplane: the virtual servers, dummy link, ipsets and chains of kube-proxy.
//!
//! Each address of a service port is a virtual server of the kernel's IPVS, and the endpoints are
//! its real servers. The addresses are on a dummy link, so that the node receives packets to them.
//! Rules masquerade and filter. They match by ipsets. The cost of a change does not depend on the
//! number of Services.

mod apply;
mod counters;
mod desired;
mod drift;
mod error;
mod failures;
mod handover;
mod handover_table;
mod node;
mod plan;
mod rejections;
mod removal;
mod requirements;
mod rule_features;
mod rules;
mod rules_state;
mod sets;
mod settings;
mod state;
mod step;
mod sysctls;

#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::OnceLock,
};

pub(in crate::dataplane) use self::rules::{CHAINS, MODE};
use self::{
    apply::Applying,
    counters::CountedPorts,
    failures::ApplyFailures,
    node::PlanOptions,
    rejections::Rejections,
    rule_features::{RefusedFeatures, RuleFeature},
    rules::TABLES,
    rules_state::RulesState,
};
pub use self::{
    desired::Item,
    drift::HeldObjects,
    error::IpvsError,
    handover::hand_over,
    plan::Plan,
    removal::{LinkRemoval, has_link, remove, remove_link},
    requirements::check as check_requirements,
    sets::{Destination, Entry, Set, SetEntry},
    settings::{DUMMY_LINK, IpvsSettings},
    state::{RealServerState, State, VirtualServerState},
    sysctls::set_up_kernel,
};
use super::{
    Dataplane, FailureScope, Held, HeldReader, KernelCounts, LeftOutPort, ModeMetricsReader,
    conntrack::StaleUdpCleaner,
    families::{self, FailureCounters},
    iptables,
    iptables_text::save,
    sctp_ports,
};
use crate::{
    kernel::{
        KernelError,
        ipset::Ipset,
        iptables::Iptables as Commands,
        ipvs::{self, Ipvs as Socket, Timeouts, VirtualKey},
        own_link::OwnLink,
    },
    model::{Dirty, IpFamily, ServicePortKey, Snapshot},
};

/// Names in shunt's rules that shunt never deletes. If one disappears, another program flushed the
/// tables.
pub const RULE_NAMES: [&str; 1] = ["KUBE-MARK-MASQ"];

/// The number of requests to the kernel since the dataplane was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestCounts {
    /// Netlink messages to IPVS.
    pub ipvs: u32,
    /// Netlink messages about the dummy link and its addresses.
    pub addresses: u32,
    /// Runs of ipset.
    pub ipset: u32,
    /// Runs of iptables-restore.
    pub iptables: u32,
}

/// The ipvs dataplane.
#[derive(Debug)]
pub struct Ipvs {
    options: PlanOptions,
    commands: BTreeMap<IpFamily, Commands>,
    socket: Socket,
    link: OwnLink,
    ipset: Ipset,
    stale_udp: StaleUdpCleaner,
    /// The rejections so far. They must outlast [`Dataplane::observe`].
    rejections: Rejections,
    /// Families whose rules could not be read. `apply` returns these errors.
    unread: Vec<(IpFamily, KernelError)>,
    failed_restores: FailureCounters,
    counted: CountedPorts,
    /// The kernel's IPVS knows no SCTP. Read once, if there is an SCTP port.
    lacks_sctp: OnceLock<bool>,
    /// Without netlink messages, which the sockets count.
    requests: RequestCounts,
}

impl Ipvs {
    /// Checks the requirements of the mode and loads the kernel's modules. It changes nothing else,
    /// except that it removes what an interrupted handover left, which drops packets.
    pub fn new(settings: IpvsSettings) -> Result<Self, IpvsError> {
        requirements::check(&settings)?;
        if let Err(error) = handover_table::remove(&settings.launcher) {
            tracing::warn!(
                %error,
                "cannot remove the table of an interrupted handover: it may drop packets of connections"
            );
        }
        let mut commands = iptables::find_commands(&settings.launcher)?;
        if requirements::is_ipv6_disabled()? && commands.remove(&IpFamily::V6).is_some() {
            let why = "net.ipv6.conf.*.disable_ipv6 keeps the dummy link from having addresses of it";
            tracing::warn!(family = %IpFamily::V6, why, "Services of this IP family are not served");
        }
        let families = commands.keys().copied().collect();
        Ok(Self {
            socket: Socket::open()?,
            link: OwnLink::open(DUMMY_LINK)?,
            ipset: Ipset::new(&settings.launcher),
            counted: CountedPorts::new(settings.counted_services),
            lacks_sctp: OnceLock::new(),
            commands,
            options: PlanOptions {
                families,
                settings,
                random_fully: BTreeSet::new(),
                refused: RefusedFeatures::new(),
            },
            stale_udp: StaleUdpCleaner::new(&[]),
            rejections: Rejections::default(),
            unread: Vec::new(),
            failed_restores: FailureCounters::default(),
            requests: RequestCounts::default(),
        })
    }

    /// Returns the number of requests so far.
    pub fn requests(&self) -> RequestCounts {
        RequestCounts {
            ipvs: self.socket.message_count(),
            addresses: self.link.message_count(),
            ..self.requests
        }
    }

    fn observe_sets(&mut self, state: &mut State) -> Result<(), KernelError> {
        self.requests.ipset += 1;
        for (name, saved) in self.ipset.save()? {
            let Some((family, set)) = Set::from_name(&name) else { continue };
            if !set.is_compatible(family, &saved.definition) {
                let expected = set.definition(family);
                let message = format!("it is of type {}, not {expected}", saved.definition);
                return Err(KernelError::call("use the ipset", name)(std::io::Error::other(message)));
            }
            state.sets.insert((family, set));
            for entry in saved.entries.iter().filter_map(|text| Entry::parse(set, text)) {
                state.record_entry(SetEntry { family, set, entry });
            }
        }
        Ok(())
    }

    /// Reads the rules. If the rules of one family cannot be read, they stay as they are,
    /// everything else continues, and `apply` returns the error.
    fn observe_rules(&mut self, state: &mut State) -> Result<(), KernelError> {
        self.unread.clear();
        for (family, commands) in &self.commands {
            match read_rules(commands) {
                Ok((rules, random_fully)) => {
                    state.rules.insert(*family, rules);
                    let is_refused = self.options.refused.contains_key(&(*family, RuleFeature::RandomFully));
                    if random_fully && !is_refused {
                        state.options.random_fully.insert(*family);
                    }
                }
                Err(error) => {
                    state.rules.remove(family);
                    self.unread.push((*family, error));
                }
            }
        }
        if state.rules.is_empty()
            && let Some((_, error)) = self.unread.pop()
        {
            return Err(error);
        }
        Ok(())
    }

    fn observe_servers(&mut self, state: &mut State) -> Result<(), KernelError> {
        state.servers = read_servers(&mut self.socket)?;
        Ok(())
    }

    /// Returns the configured timeouts that differ from those of the kernel.
    fn timeouts_to_change(&mut self) -> Result<Timeouts, KernelError> {
        let held = self.socket.timeouts()?;
        let wanted = self.options.settings.timeouts;
        let differs = |wanted: u32, held: u32| if wanted == held { 0 } else { wanted };
        Ok(Timeouts {
            tcp: differs(wanted.tcp, held.tcp),
            tcp_fin: differs(wanted.tcp_fin, held.tcp_fin),
            udp: differs(wanted.udp, held.udp),
        })
    }
}

/// Returns the virtual servers with their real servers.
fn read_servers(socket: &mut Socket) -> Result<BTreeMap<VirtualKey, VirtualServerState>, KernelError> {
    let mut servers = BTreeMap::new();
    for (key, server) in socket.servers()? {
        let reals = socket.real_servers(key)?.into_iter();
        let mut reals: Vec<_> = reals.map(RealServerState::from).collect();
        reals.sort_unstable_by_key(|real| real.address);
        servers.insert(key, VirtualServerState { server, reals });
    }
    Ok(servers)
}

/// Returns the rules of a family, and whether they can contain `--random-fully`.
fn read_rules(commands: &Commands) -> Result<(RulesState, bool), KernelError> {
    let mut rules = RulesState::default();
    for (table, saved) in save(commands, &TABLES) {
        rules.read(table, &saved?);
    }
    Ok((rules, commands.supports_random_fully()?))
}

impl Dataplane for Ipvs {
    type State = State;
    type Plan = Plan;
    type Error = IpvsError;

    fn observe(&mut self) -> Result<State, IpvsError> {
        let mut state = State::empty(self.options.clone());
        state.sysctls = sysctls::to_change(&self.options.settings)?;
        state.timeouts = self.timeouts_to_change()?;
        state.has_link = self.link.exists();
        state.rejections.clone_from(&self.rejections);
        state.addresses = self.link.addresses()?;
        self.observe_sets(&mut state)?;
        self.observe_rules(&mut state)?;
        self.observe_servers(&mut state)?;
        Ok(state)
    }

    fn plan(state: &State, snapshot: &Snapshot, dirty: &Dirty) -> Plan {
        plan::plan(state, snapshot, dirty)
    }

    /// Continues after a step that fails, so that one address or rule does not stop everything else
    /// from being served. It stops if the process is about to end: every command then fails, but
    /// messages to the kernel do not.
    fn apply(&mut self, state: &mut State, mut plan: Plan) -> Result<(), IpvsError> {
        let unread = std::mem::take(&mut self.unread).into_iter();
        let mut errors: Vec<_> = unread.map(|(family, error)| (Some(family), error.into())).collect();
        let mut is_stopped = false;
        let mut applying = Applying { ipvs: self, state, failures: ApplyFailures::default() };
        for step in std::mem::take(&mut plan.steps) {
            let Err(error) = applying.apply(step) else { continue };
            errors.push((error.family(), error));
            is_stopped = applying.ipvs.options.settings.launcher.is_shutting_down();
            if is_stopped {
                break;
            }
        }
        let failures = applying.failures;
        let is_complete = !is_stopped && errors.iter().all(|(family, _)| family.is_some());
        if is_complete {
            self.counted.update(&plan.server_users);
        }
        let is_full = plan.is_full;
        let finished = plan.finish(state, failures, is_complete);
        if is_full && is_complete {
            self.counted.retain(state);
        }
        errors.extend(finished.err().map(|error| (None, error)));
        self.rejections.clone_from(&state.rejections);
        let Some(error) = families::first_error(errors) else { return state.rejections.check() };
        if Self::failure_scope(&error) == FailureScope::Everything {
            state.node = None;
        }
        Err(error)
    }

    fn failure_scope(error: &IpvsError) -> FailureScope {
        match error {
            IpvsError::LeftOut { .. } => FailureScope::ServicePorts,
            IpvsError::OfFamily(one) => FailureScope::Family(one.family),
            _ => FailureScope::Everything,
        }
    }

    fn lacks_sctp(&self) -> Option<&'static str> {
        if *self.lacks_sctp.get_or_init(ipvs::lacks_sctp) {
            return Some("IPVS of this kernel has no SCTP (CONFIG_IP_VS_PROTO_SCTP)");
        }
        sctp_ports::lacked_by_conntrack()
    }

    fn left_out_ports(&self) -> Vec<LeftOutPort> {
        self.rejections.left_out_ports()
    }

    fn held_reader(&self) -> Option<HeldReader> {
        let (launcher, commands) = (self.options.settings.launcher.clone(), self.commands.clone());
        Some(Box::new(move || HeldObjects::read(&launcher, &commands).map(Held::Ipvs)))
    }

    fn differences(state: &State, held: &Held, _: &Snapshot, of: Option<&ServicePortKey>) -> Vec<String> {
        let Held::Ipvs(held) = held else { return Vec::new() };
        of.map_or_else(|| held.differences_of_node(state), |key| held.differences(state, key))
    }

    fn mode_metrics(&mut self) -> Option<ModeMetricsReader> {
        let (name, help) =
            ("sync_proxy_rules_iptables_restore_failures", "Cumulative proxy iptables restore failures");
        Some(self.failed_restores.metrics(name, help))
    }

    fn kernel_counts(&mut self) -> Option<Box<dyn KernelCounts>> {
        match self.counted.reader(&self.options.settings)? {
            Ok(reader) => Some(Box::new(reader)),
            Err(error) => {
                tracing::warn!(%error, "cannot read the counters of IPVS: metrics have no counts of Services");
                None
            }
        }
    }

    fn stale_udp(&mut self) -> Option<&mut StaleUdpCleaner> {
        Some(&mut self.stale_udp)
    }

    fn cleanup(&mut self) -> Vec<IpvsError> {
        let errors = remove(&self.options.settings, LinkRemoval::Now);
        errors.into_iter().map(IpvsError::from).collect()
    }
}
