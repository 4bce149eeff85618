//! The table of nftables: when there is one, what it does, and whether it has a chain of type
//! `nat`.

use proxy_common::layout::Refusing;

use super::{
    Location, RuleDuties, Rules,
    nft::{self, Nat},
};
use crate::kernel::{KernelError, conntrack, ipvs};

impl Rules {
    fn is_whole(&self, listing: &str) -> bool {
        match &self.installed_nft {
            Some(installed) => installed == listing,
            None => nft::is_whole(listing, self.marks, self.duties.masquerade),
        }
    }

    /// Returns what the rules are to do.
    pub const fn duties(&self) -> RuleDuties {
        self.duties
    }

    /// Gives the rules these duties. Then [`Self::install`] installs them.
    pub fn set_duties(&mut self, duties: RuleDuties) -> Result<(), KernelError> {
        let refuse = duties.refuse
            || match self.nft.list_table(nft::TABLE) {
                Ok(listing) => Self::keeps_nat(listing.as_deref()),
                // Rules of iptables refuse.
                Err(KernelError::CommandNotFound(_)) => true,
                Err(error) => return Err(error),
            };
        if self.duties.masquerade != duties.masquerade {
            self.installed.clear();
        }
        if self.duties != duties {
            self.installed_nft = None;
        }
        self.duties = duties;
        self.programs_refuse = !refuse;
        Ok(())
    }

    /// Returns what is to refuse packets. If the link programs do, there is no table.
    pub const fn refusing(&self) -> Refusing {
        if self.programs_refuse { Refusing::Programs } else { Refusing::Netfilter }
    }

    /// Writes the table alone, after a change of what refuses. The rules of iptables do not depend
    /// on that. What others added to them meanwhile stays before shunt's until they are compared.
    pub fn install_table(&mut self) -> Result<(), KernelError> {
        if self.location == Location::Nftables && self.install_nft().is_ok() {
            return Ok(());
        }
        self.install()
    }

    pub(super) fn install_nft(&mut self) -> Result<(), KernelError> {
        let listing = self.nft.list_table(nft::TABLE)?;
        if self.programs_refuse {
            return listing.map_or(Ok(()), |_| self.nft.remove_table(nft::TABLE));
        }
        if !listing.as_deref().is_some_and(|listing| self.is_right(listing)) {
            self.write_nft(self.nat(listing.as_deref()), listing.is_some())?;
        }
        Ok(())
    }

    /// Writes the table. If it `exists`, replaces it.
    fn write_nft(&mut self, nat: Nat, exists: bool) -> Result<(), KernelError> {
        self.nft.apply(&nft::script(self.marks, nat, exists))?;
        self.installed_nft = self.nft.list_table(nft::TABLE)?;
        Ok(())
    }

    fn nat(&self, listing: Option<&str>) -> Nat {
        if self.duties.masquerade {
            Nat::Masquerade
        } else if Self::keeps_nat(listing) {
            Nat::Keep
        } else {
            Nat::Nothing
        }
    }

    /// Returns true if the table needs no change.
    pub(super) fn is_right(&self, listing: &str) -> bool {
        self.is_whole(listing) && !self.has_needless_nat(listing)
    }

    /// Returns true if the table has a chain of type `nat` that nothing needs: conntrack translates
    /// no connection.
    fn has_needless_nat(&self, listing: &str) -> bool {
        !self.duties.masquerade && nft::has_nat_chain(listing) && !Self::keeps_nat(Some(listing))
    }

    /// Returns true if the table is to have a chain of type `nat`, even if it does not masquerade.
    /// Rules that still masquerade may begin to translate a connection at any moment.
    pub(super) fn keeps_nat(listing: Option<&str>) -> bool {
        listing.is_some_and(nft::masquerades) || Self::conntrack_translates()
    }

    /// Returns true if conntrack or IPVS may have connections of Services.
    fn conntrack_translates() -> bool {
        ipvs::is_loaded() || conntrack::translates_connections().unwrap_or(true)
    }

    /// Makes conntrack go on to translate its connections even when all other chains of type `nat`
    /// are removed. Changes nothing if conntrack translates none, unless `others_translate`: rules
    /// of others are still there, and a connection may begin before they are removed.
    pub fn keep_nat(&mut self, others_translate: bool) -> Result<(), KernelError> {
        if self.duties.masquerade || self.location == Location::Iptables {
            return Ok(());
        }
        let listing = self.nft.list_table(nft::TABLE)?;
        let has_chain = listing.as_deref().is_some_and(nft::has_nat_chain);
        if has_chain || !others_translate && !Self::conntrack_translates() {
            return Ok(());
        }
        self.write_nft(Nat::Keep, listing.is_some())?;
        self.programs_refuse = false;
        Ok(())
    }
}
