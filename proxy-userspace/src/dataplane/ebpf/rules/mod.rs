//! The netfilter rules that work with the link programs: the programs mark packets, and the rules
//! masquerade, refuse or accept marked packets. They do not depend on Services.
//!
//! The rules are in nftables, or in iptables if nftables does not accept them. In both cases shunt
//! also adds a rule to iptables' FORWARD chain if this chain filters packets: a packet that one
//! table accepts may still be dropped by another.

mod backend_tables;
mod foreign;
mod iptables;
mod nft;
mod table;

#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::RangeInclusive,
};

use self::{
    backend_tables::BackendTables,
    iptables::{Extent, SavedTable, TABLES},
};
use crate::{
    dataplane::iptables_text::Table,
    kernel::{
        KernelError,
        command::Launcher,
        iptables::{Backend, Iptables, is_available},
        nft::Nft,
    },
    model::IpFamily,
};

/// Names that only these rules have. If one of them is removed, shunt installs the rules again at
/// once.
pub const NAMES: [&str; 4] = ["shunt", "SHUNT-FORWARD", "SHUNT-REJECT", "SHUNT-POSTROUTING"];

/// The source ports of masqueraded datagrams.
///
/// If such a port is also a node port, a reply to it looks like a client's datagram to the program
/// on the socket that sends it, which does not know conntrack. If the ports were chosen among all
/// ports, each node port would cost one of 64,512 flows its replies. Node ports end at 32767,
/// unless the API server's `--service-node-port-range` has others. TCP connections may have any
/// port, because an endpoint accepts them and does not make them. Link programs insert a flow for
/// packets that leave from such a port.
pub const MASQUERADED_PORTS: RangeInclusive<u16> = 32_768..=u16::MAX;

/// Bits of a packet's mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Marks {
    /// The packet is masqueraded.
    pub masquerade: u32,
    /// The packet is refused.
    pub reject: u32,
}

impl Marks {
    /// Returns the bits of both; `None` if a bit would have both meanings.
    fn union(self, other: Self) -> Option<Self> {
        let both =
            Self { masquerade: self.masquerade | other.masquerade, reject: self.reject | other.reject };
        (both.masquerade & both.reject == 0).then_some(both)
    }
}

/// What the rules are to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RuleDuties {
    /// They masquerade. Otherwise the link programs do.
    pub masquerade: bool,
    /// They refuse. Otherwise the link programs do, unless conntrack may have connections of
    /// Services: rules tell those from connections that nothing knows.
    pub refuse: bool,
}

impl RuleDuties {
    /// They do all.
    pub const ALL: Self = Self { masquerade: true, refuse: true };
}

/// Where the rules are that masquerade and refuse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Location {
    /// Not known yet: shunt tries nftables. An earlier process may have installed them in iptables.
    Unknown,
    /// In nftables, and none of them in iptables.
    Nftables,
    /// In iptables, because nftables did not accept them.
    Iptables,
}

/// The rules of this network namespace.
#[derive(Clone, Debug)]
pub struct Rules {
    marks: Marks,
    duties: RuleDuties,
    /// The link programs refuse packets, so there is no table.
    programs_refuse: bool,
    launcher: Launcher,
    nft: Nft,
    location: Location,
    random_fully: bool,
    /// shunt's rules as iptables-save printed them after they were installed. Not every version
    /// prints the words that it was given.
    installed: BTreeMap<(Backend, IpFamily), Vec<String>>,
    /// Backends whose iptables cannot hold the rules of IPv6 on this kernel.
    without_ipv6: BTreeSet<Backend>,
    /// The listing of the table in nftables after it was installed.
    installed_nft: Option<String>,
    warned_of_dropping_tables: bool,
}

impl Rules {
    /// Rules for these marks. Changes nothing yet.
    pub fn new(marks: Marks, masquerade: bool, launcher: Launcher) -> Self {
        Self {
            marks,
            duties: RuleDuties { masquerade, refuse: true },
            programs_refuse: false,
            nft: Nft::new(launcher.clone()),
            launcher,
            location: Location::Unknown,
            random_fully: true,
            installed: BTreeMap::new(),
            without_ipv6: BTreeSet::new(),
            installed_nft: None,
            warned_of_dropping_tables: false,
        }
    }

    /// Returns true if commands are not started any more.
    pub fn is_shutting_down(&self) -> bool {
        self.launcher.is_shutting_down()
    }

    /// Makes the rules cover the previous marks too, until [`Self::set_marks`]. If a bit would have
    /// both meanings, they cover only the previous marks: until then no packet has other marks.
    pub(super) fn with_previous_marks(self, previous: Marks) -> Self {
        Self { marks: self.marks.union(previous).unwrap_or(previous), ..self }
    }

    /// Makes the rules cover these marks only. The caller installs them again.
    pub(super) fn set_marks(&mut self, marks: Marks) {
        self.marks = marks;
        self.installed.clear();
        self.installed_nft = None;
    }

    /// Returns true if all rules are installed. Returns false if they cannot be read: installing
    /// them reports why.
    pub fn are_installed(&self) -> bool {
        self.check().unwrap_or_else(|error| {
            tracing::debug!(%error, "cannot read the netfilter rules");
            false
        })
    }

    fn check(&self) -> Result<bool, KernelError> {
        let listing = match self.location {
            Location::Iptables => None,
            Location::Unknown | Location::Nftables => self.nft.list_table(nft::TABLE)?,
        };
        let is_table_right = match listing {
            _ if self.location == Location::Iptables => true,
            Some(listing) => !self.programs_refuse && self.is_right(&listing),
            None => self.programs_refuse,
        };
        Ok(is_table_right && self.repairs()?.is_empty() && self.foreign_repairs()?.is_empty())
    }

    /// Installs the rules that are missing or changed. Continues after a family or backend that
    /// fails.
    pub fn install(&mut self) -> Result<(), KernelError> {
        match self.install_nft() {
            Ok(()) => {
                if self.location == Location::Iptables {
                    self.move_to(Location::Unknown);
                }
                self.warn_of_dropping_tables();
                self.install_iptables()?;
                self.location = Location::Nftables;
                Ok(())
            }
            Err(error) if self.programs_refuse => Err(error),
            Err(error @ (KernelError::CommandNotFound { .. } | KernelError::CommandFailed { .. })) => {
                self.fall_back(error)
            }
            Err(error) => Err(error),
        }
    }

    fn move_to(&mut self, location: Location) {
        self.location = location;
        // Another part of the rules is in iptables now.
        self.installed.clear();
    }

    fn fall_back(&mut self, nft: KernelError) -> Result<(), KernelError> {
        let nft = Box::new(nft);
        if IpFamily::ALL.iter().all(|family| Iptables::installed(*family, &self.launcher).is_empty()) {
            let iptables = Box::new(KernelError::CommandNotFound("iptables".into()));
            return Err(KernelError::NoNetfilter { nft, iptables });
        }
        if self.location != Location::Iptables {
            tracing::warn!(error = %nft, "cannot write netfilter rules to nftables: shunt writes them to iptables");
            self.move_to(Location::Iptables);
        }
        self.install_iptables().map_err(|error| KernelError::NoNetfilter { nft, iptables: Box::new(error) })
    }

    fn install_iptables(&mut self) -> Result<(), KernelError> {
        let mut first = None;
        for (tables, text) in self.repairs()? {
            if let Err(error) = self.restore(&tables, &text)
                && !self.leaves_out(&tables.iptables)
            {
                first.get_or_insert(error);
            }
        }
        if self.location != Location::Iptables {
            for script in self.foreign_repairs()? {
                self.nft.apply(&script)?;
            }
        }
        first.map_or(Ok(()), Err)
    }

    /// Returns true if the commands are those of IPv6 and the kernel accepts only rules of IPv4.
    /// Their backend is then left out in IPv6.
    fn leaves_out(&mut self, v6: &Iptables) -> bool {
        let mut v4 = Iptables::installed(IpFamily::V4, &self.launcher).into_iter();
        let refusal = v4.find(|v4| v4.backend == v6.backend).and_then(|v4| v6.ipv6_refusal(&v4));
        if let Some(error) = &refusal {
            tracing::warn!(
                %error,
                "iptables has no rules of IPv6 on this kernel: IPv6 packets of Services from outside the node are \
                 neither masqueraded nor refused"
            );
            self.without_ipv6.insert(v6.backend);
        }
        refusal.is_some()
    }

    fn restore(&mut self, tables: &BackendTables, text: &str) -> Result<(), KernelError> {
        match tables.iptables.restore(text) {
            Err(KernelError::CommandFailed { stderr, .. }) if stderr.contains("random-fully") => {
                tracing::info!(
                    "iptables is older than 1.6.2: source ports of masqueraded connections are not chosen at random"
                );
                self.random_fully = false;
                tables.iptables.restore(&text.replace(" --random-fully", ""))?;
            }
            restored => restored?,
        }
        let current = BackendTables::read(tables.iptables.clone(), self.tables())?;
        self.installed.insert(tables.key(), current.own_lines());
        Ok(())
    }

    /// The tables that may hold rules of shunt. With another proxy in iptables, nat is by far the
    /// largest table.
    fn tables(&self) -> &'static [Table] {
        if self.location == Location::Nftables { &TABLES[..1] } else { &TABLES }
    }

    /// Returns the tables of iptables that have to change, and the inputs of iptables-restore for
    /// them.
    fn repairs(&self) -> Result<Vec<(BackendTables, String)>, KernelError> {
        let mut repairs = Vec::new();
        for family in IpFamily::ALL.into_iter().filter(|family| is_available(*family)) {
            let backends = self.read_backends(family)?;
            let chosen = self.choose_backend(&backends);
            for (index, tables) in backends.into_iter().enumerate() {
                let extent = if Some(index) == chosen {
                    Extent::All { masquerade: self.duties.masquerade, random_fully: self.random_fully }
                } else if tables.tables.iter().any(SavedTable::filters_forward) {
                    Extent::Forward
                } else {
                    Extent::Nothing
                };
                let is_unchanged =
                    self.installed.get(&tables.key()).is_some_and(|lines| *lines == tables.own_lines());
                let repair = tables.repair(extent, self.marks);
                if let Some(text) = repair.filter(|_| !is_unchanged || extent == Extent::Nothing) {
                    repairs.push((tables, text));
                }
            }
        }
        Ok(repairs)
    }

    /// Returns the backend that holds all rules; `None` if nftables holds them. It is the backend
    /// with the most rules, as upstream's iptables-wrapper chooses, or the first one.
    fn choose_backend(&self, backends: &[BackendTables]) -> Option<usize> {
        let most = backends.iter().map(BackendTables::foreign_rules).max()?;
        let chosen = backends.iter().position(|tables| tables.foreign_rules() == most);
        chosen.filter(|_| self.location == Location::Iptables)
    }

    /// Reads the backends of a family. Fails only if there are some and none can be read.
    fn read_backends(&self, family: IpFamily) -> Result<Vec<BackendTables>, KernelError> {
        let (mut backends, mut first) = (Vec::new(), None);
        let is_used = |of: &Iptables| of.family == IpFamily::V4 || !self.without_ipv6.contains(&of.backend);
        for iptables in Iptables::installed(family, &self.launcher).into_iter().filter(is_used) {
            match BackendTables::read(iptables, self.tables()) {
                Ok(tables) => backends.push(tables),
                Err(error) => drop(first.get_or_insert(error)),
            }
        }
        first.filter(|_| backends.is_empty()).map_or(Ok(backends), Err)
    }

    /// Returns the nft scripts that repair FORWARD chains of iptables which no iptables command can
    /// change.
    fn foreign_repairs(&self) -> Result<Vec<String>, KernelError> {
        let mut scripts = Vec::new();
        for family in self.foreign_families() {
            if let Some(forward) = self.nft.list_chain(&foreign::forward_chain(family))? {
                let own = self.nft.list_chain(&foreign::own_chain(family))?;
                scripts.extend(foreign::repair(family, &forward, own.as_deref(), self.marks));
            }
        }
        Ok(scripts)
    }

    fn foreign_families(&self) -> impl Iterator<Item = IpFamily> {
        let has_command = |family: &IpFamily| {
            Iptables::installed(*family, &self.launcher)
                .iter()
                .any(|iptables| iptables.backend == Backend::Nft)
        };
        let uses_nft = self.location != Location::Iptables;
        IpFamily::ALL.into_iter().filter(move |family| uses_nft && !has_command(family))
    }

    fn warn_of_dropping_tables(&mut self) {
        if std::mem::replace(&mut self.warned_of_dropping_tables, true) {
            return;
        }
        let chains = self.nft.list_chains().unwrap_or_default();
        for table in nft::dropping_tables(&chains) {
            tracing::warn!(
                table,
                "the policy of this nftables table drops forwarded packets, and shunt cannot change that from another table: \
                 add rules to it that accept traffic of Services"
            );
        }
    }

    /// Removes all rules. Continues after errors and returns them all. A command that is not
    /// installed has left no rules.
    pub fn remove(&mut self) -> Vec<KernelError> {
        let mut removals = vec![self.nft.remove_table(nft::TABLE)];
        for family in IpFamily::ALL.into_iter().filter(|family| is_available(*family)) {
            let installed = Iptables::installed(family, &self.launcher).into_iter();
            removals.extend(installed.map(|iptables| remove_iptables(iptables, self.marks)));
        }
        removals.extend(self.foreign_families().map(|family| self.remove_foreign(family)));
        self.installed.clear();
        self.installed_nft = None;
        let errors = removals.into_iter().filter_map(Result::err);
        errors.filter(|error| !matches!(error, KernelError::CommandNotFound { .. })).collect()
    }

    fn remove_foreign(&self, family: IpFamily) -> Result<(), KernelError> {
        if self.nft.list_chain(&foreign::own_chain(family))?.is_none() {
            return Ok(());
        }
        let forward = self.nft.list_chain(&foreign::forward_chain(family))?.unwrap_or_default();
        self.nft.apply(&foreign::removal(family, &forward))
    }
}

fn remove_iptables(iptables: Iptables, marks: Marks) -> Result<(), KernelError> {
    let tables = BackendTables::read(iptables, &TABLES)?;
    tables.repair(Extent::Nothing, marks).map_or(Ok(()), |text| tables.iptables.restore(&text))
}
