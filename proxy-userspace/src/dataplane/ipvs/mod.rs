//! The ipvs dataplane: upstream kube-proxy's virtual servers, dummy link, ipsets and chains.
//!
//! Each service port's addresses are virtual servers of the kernel's IPVS, and its endpoints their real servers. Addresses are on a
//! dummy link, so that packets to them come to IPVS at all; rules, which match by sets, masquerade and filter. Changes are
//! messages and set entries of what differs, whatever the number of Services.

mod claims;
mod counts;
mod failure;
mod handover;
mod held;
mod hold;
mod listing;
mod node;
mod plan;
mod refusals;
mod removal;
mod requirements;
mod rules;
mod sets;
mod settings;
mod state;
mod steps;

#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use ipnet::IpNet;
use nix::sys::utsname::uname;

pub(in crate::dataplane) use self::rules::{has_chain, has_jump};
use self::{
    counts::Counted,
    held::Held,
    node::Terms,
    refusals::{Refusals, Refusing},
    removal::LinkGoes,
    rules::Table,
    sets::{Entry, Set},
    state::{Real, Running},
};
pub use self::{failure::IpvsError, plan::Plan, state::State};
use super::{
    Dataplane, KernelCounts, Readings,
    conntrack::StaleUdpCleaner,
    families::{self, Failures},
    iptables,
};
use crate::{
    kernel::{
        KernelError,
        command::{self, SearchPath},
        conntrack::HandoverCounts,
        dummy_link::DummyLink,
        ipset::Ipset,
        iptables::Iptables as Commands,
        ipvs::{self, Ipvs as Socket, RealServer, Timeouts},
        probe,
        sysctl::NetSetting,
    },
    model::{Dirty, IpFamily, Snapshot},
};

/// The link that holds the VIPs in the ipvs mode, kube-proxy's and shunt's. The node does not own
/// these addresses.
pub const DUMMY_LINK: &str = "kube-ipvs0";
/// Names that rules of ours carry and that we never remove: where one goes, somebody flushes the tables.
pub const RULE_NAMES: [&str; 1] = [rules::MARK_MASQ];

/// What the ipvs dataplane needs to know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IpvsSettings {
    /// The name of the scheduler of all virtual servers, as in `rr`.
    pub scheduler: Arc<str>,
    /// Virtual servers in these ranges that no Service has are somebody else's.
    pub exclude_cidrs: Vec<IpNet>,
    /// ARP requests for addresses of Services are not answered.
    pub strict_arp: bool,
    /// Timeouts of connections; where zero, they stay as they are.
    pub timeouts: Timeouts,
    /// The bit of a packet's mark that has it masqueraded.
    pub masquerade_mark: u32,
    /// So many service ports are counted apart for metrics; 0 for no counts at all.
    pub counted_services: u32,
    /// Where commands are looked for.
    pub path: SearchPath,
}

impl Default for IpvsSettings {
    fn default() -> Self {
        Self {
            scheduler: "rr".into(),
            exclude_cidrs: Vec::new(),
            strict_arp: false,
            timeouts: Timeouts::default(),
            masquerade_mark: 1 << 14,
            counted_services: 4_000,
            path: SearchPath::default(),
        }
    }
}

/// What was sent to the kernel since the dataplane was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// Netlink messages to IPVS.
    pub ipvs: u64,
    /// Messages about the dummy link and its addresses.
    pub addresses: u64,
    /// Times that ipset ran.
    pub ipset: u64,
    /// Times that iptables-restore ran.
    pub iptables: u64,
}

/// The dataplane.
#[derive(Debug)]
pub struct Ipvs {
    settings: IpvsSettings,
    commands: BTreeMap<IpFamily, Commands>,
    socket: Socket,
    link: DummyLink,
    ipset: Ipset,
    terms: Terms,
    stale_udp: StaleUdpCleaner,
    /// What outlasts [`Dataplane::observe`].
    refused: Refusals,
    /// Families whose rules could not be read, and why; not told yet.
    unread: Vec<(IpFamily, KernelError)>,
    failed_restores: Failures,
    counted: Counted,
    runs: (u64, u64),
}

impl Ipvs {
    /// Tries whether all is there that the mode needs, and loads the kernel's modules for it. Nothing else is changed yet, but that a
    /// hand-over which was cut off keeps back no packets any more.
    pub fn new(settings: IpvsSettings) -> Result<Self, IpvsError> {
        requirements::check(&settings)?;
        if let Err(error) = hold::remove_left(&settings.path) {
            tracing::warn!(%error, "connections may be kept back by what handed them over");
        }
        let commands = iptables::commands_in_use(&settings.path)?;
        for family in IpFamily::ALL {
            match commands.get(&family) {
                Some(commands) => tracing::info!(%family, %commands, "working with"),
                None => {
                    tracing::warn!(%family, "Services of this family are not served: it has no iptables here");
                }
            }
        }
        let terms = Terms::new(&settings, commands.keys().copied().collect());
        Ok(Self {
            socket: Socket::open()?,
            link: DummyLink::open(DUMMY_LINK)?,
            ipset: Ipset::new(&settings.path),
            counted: Counted::new(settings.counted_services),
            settings,
            commands,
            terms,
            stale_udp: StaleUdpCleaner::new(&[]),
            refused: Refusals::default(),
            unread: Vec::new(),
            failed_restores: Failures::default(),
            runs: (0, 0),
        })
    }

    /// Removes what any process of this mode left but for rules, which must be gone before; goes on past errors and returns them all.
    /// So does upstream's `--cleanup`.
    pub fn remove(settings: &IpvsSettings) -> Vec<IpvsError> {
        removal::remove(settings, LinkGoes::AtOnce).into_iter().map(IpvsError::Kernel).collect()
    }

    /// The same, but that addresses of Services stay from which this node's own connections were made, until
    /// [`Self::remove_link_if_unused`] finds no such connection any more.
    pub fn remove_unused(settings: &IpvsSettings) -> Vec<IpvsError> {
        removal::remove(settings, LinkGoes::Unused).into_iter().map(IpvsError::Kernel).collect()
    }

    /// Removes from the dummy link those addresses from which this node has no connections, and the link with the last of them;
    /// returns those that stay.
    pub fn remove_link_if_unused() -> Result<BTreeSet<IpAddr>, IpvsError> {
        Ok(removal::remove_link(LinkGoes::Unused)?)
    }

    /// Removes the virtual servers of this mode, and makes conntrack translate the connections that IPVS carries to them: another
    /// mode serves all Services by now.
    pub fn hand_over(settings: &IpvsSettings) -> Result<HandoverCounts, IpvsError> {
        Ok(handover::hand_over(settings)?)
    }

    /// Makes the kernel's settings for this mode, which a process that may not write them relies on; goes on past errors.
    pub fn set_up_kernel(settings: &IpvsSettings) -> Vec<IpvsError> {
        ipvs::load_module(&settings.path);
        match settings::to_change(settings, kernel_version()) {
            Ok(changes) => {
                let failed = changes.into_iter().filter_map(|(setting, value)| set(setting, value).err());
                failed.map(IpvsError::Kernel).collect()
            }
            Err(error) => vec![IpvsError::Kernel(error)],
        }
    }

    /// What was sent so far.
    pub fn sent(&self) -> Sent {
        let (ipset, iptables) = self.runs;
        Sent { ipvs: self.socket.sent(), addresses: self.link.sent(), ipset, iptables }
    }

    fn observe_sets(&mut self, state: &mut State) -> Result<(), KernelError> {
        self.runs.0 += 1;
        for (name, saved) in self.ipset.save()? {
            let Some((family, set)) = Set::named(&name) else { continue };
            if !set.fits(family, &saved.made_as) {
                return Err(KernelError::call("use the ipset", name)(std::io::Error::other(format!(
                    "it is made as {}, and not as {}",
                    saved.made_as,
                    set.made_as(family)
                ))));
            }
            state.sets.insert((family, set));
            for entry in saved.entries.iter().filter_map(|text| Entry::read(set, text)) {
                state.found(family, set, entry);
            }
        }
        Ok(())
    }

    /// Those of a family that cannot be read stay as they are, which `apply` tells: all else goes on.
    fn observe_rules(&mut self, state: &mut State) -> Result<(), KernelError> {
        self.unread.clear();
        for (family, commands) in &self.commands {
            match read_rules(commands) {
                Ok((held, random_fully)) => {
                    state.rules.insert(*family, held);
                    state.terms.take_randomly(*family, random_fully);
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
        for (key, server) in self.socket.servers()? {
            let mut reals: Vec<Real> = self.socket.real_servers(key)?.into_iter().map(Real::from).collect();
            reals.sort_unstable_by_key(|real| real.address);
            state.servers.insert(key, Running { server, reals });
        }
        Ok(())
    }

    /// What the kernel does not have yet of the timeouts asked for.
    fn timeouts_to_change(&mut self) -> Result<Timeouts, KernelError> {
        let held = self.socket.timeouts()?;
        let wanted = self.settings.timeouts;
        let differs = |wanted: u32, held: u32| if wanted == held { 0 } else { wanted };
        Ok(Timeouts {
            tcp: differs(wanted.tcp, held.tcp),
            tcp_fin: differs(wanted.tcp_fin, held.tcp_fin),
            udp: differs(wanted.udp, held.udp),
        })
    }
}

/// The rules that are there, and whether there may be `--random-fully` in them.
fn read_rules(commands: &Commands) -> Result<(Held, bool), KernelError> {
    let mut held = Held::default();
    for table in Table::ALL {
        held.read(table, &commands.save(table.name())?);
    }
    Ok((held, iptables::masquerades_randomly(commands)?))
}

fn kernel_version() -> Option<(u32, u32)> {
    probe::version(&uname().ok()?.release().to_string_lossy())
}

fn set(setting: NetSetting, value: i64) -> Result<(), KernelError> {
    tracing::info!(setting = setting.0, value, "setting");
    setting.write(value)
}

impl From<RealServer> for Real {
    fn from(real: RealServer) -> Self {
        Self { address: real.address, weight: real.weight, is_idle: real.connections == 0 }
    }
}

impl Dataplane for Ipvs {
    type State = State;
    type Plan = Plan;
    type Error = IpvsError;

    fn observe(&mut self) -> Result<State, IpvsError> {
        let mut state = State::empty(self.terms.clone());
        state.settings = settings::to_change(&self.settings, kernel_version())?;
        state.timeouts = self.timeouts_to_change()?;
        state.has_link = self.link.is_there();
        state.refused.clone_from(&self.refused);
        state.addresses = self.link.addresses()?;
        self.observe_sets(&mut state)?;
        self.observe_rules(&mut state)?;
        self.observe_servers(&mut state)?;
        Ok(state)
    }

    fn plan(state: &State, snapshot: &Snapshot, dirty: &Dirty) -> Plan {
        plan::plan(state, snapshot, dirty)
    }

    /// Goes on past steps that fail, so that one address or rule does not keep all else from being served; but not where the process
    /// is about to end, after which every command fails and messages to the kernel do not.
    fn apply(&mut self, state: &mut State, mut plan: Plan) -> Result<(), IpvsError> {
        let unread = std::mem::take(&mut self.unread).into_iter();
        let mut errors: Vec<_> = unread.map(|(family, error)| (Some(family), error.into())).collect();
        let (mut refusing, mut is_left) = (Refusing::default(), false);
        for step in std::mem::take(&mut plan.steps) {
            let step = refusing.rest_of(step, state);
            let Err(error) = self.step(state, step, &mut refusing) else { continue };
            errors.push((error.family(), error));
            is_left = command::is_ending();
            if is_left {
                break;
            }
        }
        let is_complete = !is_left && errors.iter().all(|(family, _)| family.is_some());
        if is_complete {
            self.counted.update(plan.owners());
        }
        let is_full = plan.is_full();
        let noted = plan.note(state, refusing, is_complete);
        if is_full && is_complete {
            self.counted.keep(state);
        }
        errors.extend(noted.err().map(|error| (None, error)));
        self.refused.clone_from(&state.refused);
        let Some(error) = families::error_of(errors) else { return state.refused.outcome() };
        if Self::failed_family(&error).is_none() {
            state.node = None;
        }
        Err(error)
    }

    fn is_partial(error: &IpvsError) -> bool {
        matches!(error, IpvsError::LeftOut { .. })
    }

    fn failed_family(error: &IpvsError) -> Option<IpFamily> {
        if let IpvsError::OfFamily(one) = error { Some(one.family) } else { None }
    }

    fn readings(&mut self) -> Option<Readings> {
        let (name, help) =
            ("sync_proxy_rules_iptables_restore_failures", "Cumulative proxy iptables restore failures");
        Some(self.failed_restores.readings(name, help))
    }

    fn kernel_counts(&mut self) -> Option<Box<dyn KernelCounts>> {
        match self.counted.reader(&self.terms)? {
            Ok(reader) => Some(Box::new(reader)),
            Err(error) => {
                tracing::warn!(%error, "what IPVS counts cannot be read");
                None
            }
        }
    }

    fn stale_udp(&mut self) -> Option<&mut StaleUdpCleaner> {
        Some(&mut self.stale_udp)
    }

    fn cleanup(&mut self) -> Vec<IpvsError> {
        Self::remove(&self.settings)
    }
}
