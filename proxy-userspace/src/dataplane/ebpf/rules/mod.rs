//! The netfilter rules that go with the programs on links: those mark packets, and these masquerade, refuse, or let through
//! what is marked. They are always the same few, whatever the Services.
//!
//! They are in nftables, or in iptables where that cannot be had. In both cases iptables' FORWARD chain, where it rules what is
//! forwarded, gets a rule too: what one table accepts another may still drop.

mod foreign;
mod iptables;
mod nft;

#[cfg(test)]
mod tests;

use std::{collections::BTreeMap, ops::RangeInclusive};

use self::iptables::{Extent, Table};
use crate::kernel::{
    KernelError,
    command::SearchPath,
    iptables::{Backend, Family, Iptables},
    nft::Nft,
};

/// Names that only rules of ours carry; what goes with one of them is put back at once.
pub const NAMES: [&str; 4] = ["shunt", "SHUNT-FORWARD", "SHUNT-REJECT", "SHUNT-POSTROUTING"];

/// Where masqueraded datagrams leave from. An answer to a port that is a node port too is a client's datagram to the program on the socket
/// that sends it, which knows nothing of conntrack: chosen among all ports, one of 64,512 flows would lose its answers for each node port
/// that is served. Node ports end at 32767, unless the API server's `--service-node-port-range` has others. Connections are accepted and not
/// made, and may have any port; and on links the programs note what leaves from such a port.
pub const MASQUERADED_PORTS: RangeInclusive<u16> = 32_768..=u16::MAX;

/// Bits of a packet's mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Marks {
    /// To be masqueraded.
    pub masquerade: u32,
    /// To be refused.
    pub reject: u32,
}

impl Marks {
    /// Bits of which each means what it does in one of the two; none where a bit would mean both.
    fn or(self, other: Self) -> Option<Self> {
        let both =
            Self { masquerade: self.masquerade | other.masquerade, reject: self.reject | other.reject };
        (both.masquerade & both.reject == 0).then_some(both)
    }
}

/// Where masquerading and refusing are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Home {
    /// In nftables, if all goes well; an earlier process may have put them elsewhere.
    Unknown,
    /// In nftables, and nothing of it elsewhere.
    Nftables,
    /// In iptables, since nftables did not take them.
    Iptables,
}

/// The rules of this network namespace.
#[derive(Debug)]
pub struct Rules {
    marks: Marks,
    path: SearchPath,
    nft: Nft,
    home: Home,
    random_fully: bool,
    /// What the commands show of ours after it was put there, since not every version shows the words it was given.
    seen: BTreeMap<(Backend, Family), Vec<String>>,
    seen_nft: Option<String>,
    told_dropping: bool,
}

/// One iptables table and the command for it.
struct Place {
    iptables: Iptables,
    tables: Vec<(&'static str, Table)>,
}

impl Place {
    fn read(iptables: Iptables, tables: &[&'static str]) -> Result<Self, KernelError> {
        let read = |name: &&'static str| Ok((*name, Table::parse(&iptables.save(name)?)));
        let tables = tables.iter().map(read).collect::<Result<_, KernelError>>()?;
        Ok(Self { iptables, tables })
    }

    fn rules_forward(&self) -> bool {
        self.tables.iter().any(|(name, table)| *name == "filter" && table.rules_forward())
    }

    fn ours(&self) -> Vec<String> {
        self.tables.iter().flat_map(|(_, table)| table.ours()).collect()
    }

    fn others(&self) -> usize {
        self.tables.iter().map(|(_, table)| table.others()).sum()
    }

    fn key(&self) -> (Backend, Family) {
        (self.iptables.backend, self.iptables.family)
    }

    fn repair(&self, extent: Extent, marks: Marks) -> Option<String> {
        let parts = self.tables.iter();
        let text: String = parts
            .filter_map(|(name, table)| table.repair(name, self.iptables.family, extent, marks))
            .collect();
        (!text.is_empty()).then_some(text)
    }
}

impl Rules {
    /// Rules for these marks, through commands that are found there. Nothing is changed yet.
    pub fn new(marks: Marks, path: SearchPath) -> Self {
        Self {
            marks,
            nft: Nft::new(path.clone()),
            path,
            home: Home::Unknown,
            random_fully: true,
            seen: BTreeMap::new(),
            seen_nft: None,
            told_dropping: false,
        }
    }

    /// The same, and until [`Self::settle`] also for how packets were marked before; only for that where a bit would mean both, since
    /// until then no packet is marked otherwise.
    pub(super) fn following(self, before: Marks) -> Self {
        Self { marks: self.marks.or(before).unwrap_or(before), ..self }
    }

    /// Nothing marks packets in any other way any more. The rules are to be put anew.
    pub(super) fn settle(&mut self, marks: Marks) {
        self.marks = marks;
        self.seen.clear();
        self.seen_nft = None;
    }

    /// Whether all of them are as they should be. What cannot be read counts as not so: putting them there tells why.
    pub fn are_put(&mut self) -> bool {
        let put = self.is_nft_put().and_then(|put| {
            Ok((put || self.home == Home::Iptables)
                && self.repairs()?.is_empty()
                && self.foreign_repairs()?.is_empty())
        });
        put.unwrap_or_else(|error| {
            tracing::debug!(%error, "cannot read the netfilter rules");
            false
        })
    }

    fn is_nft_put(&self) -> Result<bool, KernelError> {
        if self.home == Home::Iptables {
            return Ok(false);
        }
        Ok(self.nft.list_table(nft::TABLE)?.is_some_and(|listing| self.is_whole(&listing)))
    }

    fn is_whole(&self, listing: &str) -> bool {
        match &self.seen_nft {
            Some(seen) => seen == listing,
            None => nft::is_whole(listing, self.marks),
        }
    }

    /// Puts all of them where they belong, and nothing else out of its place. Goes on past a family or backend that fails.
    pub fn put(&mut self) -> Result<(), KernelError> {
        match self.put_nft() {
            Ok(()) => {
                if self.home == Home::Iptables {
                    self.move_to(Home::Unknown);
                }
                self.tell_dropping_tables();
                self.put_iptables()?;
                self.home = Home::Nftables;
                Ok(())
            }
            Err(error @ (KernelError::CommandNotFound { .. } | KernelError::CommandFailed { .. })) => {
                self.fall_back(error)
            }
            Err(error) => Err(error),
        }
    }

    fn put_nft(&mut self) -> Result<(), KernelError> {
        let listing = self.nft.list_table(nft::TABLE)?;
        if !listing.as_ref().is_some_and(|listing| self.is_whole(listing)) {
            self.nft.apply(&nft::script(self.marks, listing.is_some()))?;
            self.seen_nft = self.nft.list_table(nft::TABLE)?;
        }
        Ok(())
    }

    fn move_to(&mut self, home: Home) {
        self.home = home;
        // What was seen where another part was put says nothing about this one.
        self.seen.clear();
    }

    fn fall_back(&mut self, nft: KernelError) -> Result<(), KernelError> {
        let (nft, iptables) = (Box::new(nft), "iptables");
        if Family::ALL.iter().all(|family| Iptables::installed(*family, &self.path).is_empty()) {
            let iptables = Box::new(KernelError::CommandNotFound { program: iptables.into() });
            return Err(KernelError::NoNetfilter { nft, iptables });
        }
        if self.home != Home::Iptables {
            tracing::warn!(error = %nft, "cannot put netfilter rules into nftables; using iptables");
            self.move_to(Home::Iptables);
        }
        self.put_iptables().map_err(|error| KernelError::NoNetfilter { nft, iptables: Box::new(error) })
    }

    fn put_iptables(&mut self) -> Result<(), KernelError> {
        let mut first = None;
        for (place, text) in self.repairs()? {
            if let Err(error) = self.restore(&place, &text) {
                first.get_or_insert(error);
            }
        }
        if self.home != Home::Iptables {
            for script in self.foreign_repairs()? {
                self.nft.apply(&script)?;
            }
        }
        first.map_or(Ok(()), Err)
    }

    fn restore(&mut self, place: &Place, text: &str) -> Result<(), KernelError> {
        match place.iptables.restore(text) {
            Err(KernelError::CommandFailed { stderr, .. }) if stderr.contains("random-fully") => {
                tracing::info!(
                    "iptables is older than 1.6.2: ports of masqueraded connections are not chosen at random"
                );
                self.random_fully = false;
                place.iptables.restore(&text.replace(" --random-fully", ""))?;
            }
            restored => restored?,
        }
        self.seen.insert(place.key(), Place::read(place.iptables.clone(), self.tables())?.ours());
        Ok(())
    }

    /// Tables that may hold something of ours. nat is the largest by far where another proxy works with iptables.
    fn tables(&self) -> &'static [&'static str] {
        if self.home == Home::Nftables { &iptables::TABLES[..1] } else { &iptables::TABLES }
    }

    /// What iptables' tables lack or have too much, and the text that puts it right.
    fn repairs(&self) -> Result<Vec<(Place, String)>, KernelError> {
        let mut repairs = Vec::new();
        for family in Family::ALL.into_iter().filter(|family| family.is_available()) {
            let places = self.places(family)?;
            let chosen = self.chosen(&places);
            for (index, place) in places.into_iter().enumerate() {
                let extent = match (Some(index) == chosen, place.rules_forward()) {
                    (true, _) => Extent::All { random_fully: self.random_fully },
                    (false, true) => Extent::Forward,
                    (false, false) => Extent::Nothing,
                };
                let is_as_seen = self.seen.get(&place.key()).is_some_and(|seen| *seen == place.ours());
                let repair = place.repair(extent, self.marks);
                if let Some(text) = repair.filter(|_| !is_as_seen || extent == Extent::Nothing) {
                    repairs.push((place, text));
                }
            }
        }
        Ok(repairs)
    }

    /// Which backend holds all of them where nftables does not: the one that more rules are in, as upstream's iptables-wrapper
    /// chooses; the first where there are none.
    fn chosen(&self, places: &[Place]) -> Option<usize> {
        let most = places.iter().map(Place::others).max()?;
        places.iter().position(|place| place.others() == most).filter(|_| self.home == Home::Iptables)
    }

    /// Every backend of a family that can be read; an error only where there are some and none can.
    fn places(&self, family: Family) -> Result<Vec<Place>, KernelError> {
        let (mut places, mut first) = (Vec::new(), None);
        for iptables in Iptables::installed(family, &self.path) {
            match Place::read(iptables, self.tables()) {
                Ok(place) => places.push(place),
                Err(error) => drop(first.get_or_insert(error)),
            }
        }
        first.filter(|_| places.is_empty()).map_or(Ok(places), Err)
    }

    /// The same for FORWARD chains of iptables that only nft can reach.
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

    fn foreign_families(&self) -> impl Iterator<Item = Family> {
        let is_reached = |family: &Family| {
            Iptables::installed(*family, &self.path).iter().any(|iptables| iptables.backend == Backend::Nft)
        };
        let is_nft_there = self.home != Home::Iptables;
        Family::ALL.into_iter().filter(move |family| is_nft_there && !is_reached(family))
    }

    fn tell_dropping_tables(&mut self) {
        if std::mem::replace(&mut self.told_dropping, true) {
            return;
        }
        let chains = self.nft.list_chains().unwrap_or_default();
        for table in nft::dropping_tables(&chains) {
            tracing::warn!(
                table,
                "this nftables table drops forwarded packets by policy, and no rule of another table can change that: it has to accept traffic of Services itself"
            );
        }
    }

    /// Removes all of them, goes on past errors and returns them all. What is not installed has put nothing anywhere.
    pub fn remove(&mut self) -> Vec<KernelError> {
        let mut errors = Vec::new();
        let mut note = |result: Result<(), KernelError>| match result {
            Ok(()) | Err(KernelError::CommandNotFound { .. }) => {}
            Err(error) => errors.push(error),
        };
        note(self.nft.remove_table(nft::TABLE));
        for family in Family::ALL.into_iter().filter(|family| family.is_available()) {
            for iptables in Iptables::installed(family, &self.path) {
                note(remove_iptables(iptables, self.marks));
            }
        }
        for family in self.foreign_families().collect::<Vec<_>>() {
            note(self.remove_foreign(family));
        }
        self.seen.clear();
        self.seen_nft = None;
        errors
    }

    fn remove_foreign(&self, family: Family) -> Result<(), KernelError> {
        match self.nft.list_chain(&foreign::own_chain(family))? {
            Some(_) => {
                let forward = self.nft.list_chain(&foreign::forward_chain(family))?.unwrap_or_default();
                self.nft.apply(&foreign::removal(family, &forward))
            }
            None => Ok(()),
        }
    }
}

fn remove_iptables(iptables: Iptables, marks: Marks) -> Result<(), KernelError> {
    let place = Place::read(iptables, &iptables::TABLES)?;
    place.repair(Extent::Nothing, marks).map_or(Ok(()), |text| place.iptables.restore(&text))
}
