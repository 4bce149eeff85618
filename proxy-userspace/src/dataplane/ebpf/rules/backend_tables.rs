//! What the tables of one iptables backend and family hold.

use super::{
    Marks,
    iptables::{Extent, SavedTable},
};
use crate::{
    dataplane::iptables_text::{Table, save},
    kernel::{
        KernelError,
        iptables::{Backend, Iptables},
    },
    model::IpFamily,
};

/// The tables of one backend and family, with the commands for them.
pub(super) struct BackendTables {
    pub(super) iptables: Iptables,
    pub(super) tables: Vec<SavedTable>,
}

impl BackendTables {
    pub(super) fn read(iptables: Iptables, tables: &[Table]) -> Result<Self, KernelError> {
        let saved = save(&iptables, tables).into_iter();
        let tables = saved.map(|(table, saved)| Ok(SavedTable { table, saved: saved? }));
        let tables = tables.collect::<Result<_, KernelError>>()?;
        Ok(Self { iptables, tables })
    }

    pub(super) fn own_lines(&self) -> Vec<String> {
        self.tables.iter().flat_map(SavedTable::own_lines).collect()
    }

    pub(super) fn foreign_rules(&self) -> usize {
        self.tables.iter().map(SavedTable::foreign_rules).sum()
    }

    pub(super) fn key(&self) -> (Backend, IpFamily) {
        (self.iptables.backend, self.iptables.family)
    }

    pub(super) fn repair(&self, extent: Extent, marks: Marks) -> Option<String> {
        let repair = |table: &SavedTable| table.repair(self.iptables.family, extent, marks);
        let text: String = self.tables.iter().filter_map(repair).collect();
        (!text.is_empty()).then_some(text)
    }
}
