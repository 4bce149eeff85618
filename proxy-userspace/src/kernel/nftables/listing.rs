//! Lists the chains, sets and elements of a table.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc, time::Duration};

use libc::{
    NF_DROP, NFT_CONTINUE, NFT_GOTO, NFT_JUMP, NFT_MSG_GETCHAIN, NFT_MSG_GETRULE, NFT_MSG_GETSET,
    NFT_MSG_GETSETELEM, NFT_MSG_GETTABLE, NFT_SET_ANONYMOUS, c_int,
};
use netlink_packet_core::NLM_F_DUMP;

use super::{
    IpFamily, NftFamily, Nftables,
    change::{Chain, Hook},
    element::{ElementData, ElementKey, ElementValue},
    set::SetSpec,
    socket::nftables_type,
    statement::{Name, Verdict},
    uapi::*,
};
use crate::kernel::{
    KernelError,
    netlink::{Attributes, MessageBuffer, attributes::string_of, nfgenmsg, uninterrupted},
};

/// A table of one family, without rules and elements.
#[derive(Debug, Default)]
pub struct TableListing {
    /// The table exists.
    pub exists: bool,
    /// Its chains, with the hooks of base chains.
    pub chains: Vec<Chain>,
    /// Its named sets and maps.
    pub sets: BTreeMap<Name, SetSpec>,
}

impl Nftables {
    /// Lists the names of all tables of a family.
    pub fn list_tables(&mut self, family: IpFamily) -> Result<Vec<Name>, KernelError> {
        let name = |table: Attributes<'_>| table.string(NFTA_TABLE_NAME).map(Name::from);
        self.list(NFT_MSG_GETTABLE, family, "tables", |_| {}, name)
    }

    /// Lists the chains and sets of a table.
    pub fn list_table(&mut self, family: IpFamily, table: &str) -> Result<TableListing, KernelError> {
        let object = format!("table {table}");
        let in_table = |found: Attributes<'_>| found.string(NFTA_TABLE_NAME) == Some(table);
        let write_table = |to: &mut MessageBuffer| to.string(NFTA_TABLE_NAME, table);
        if !self.list_tables(family)?.iter().any(|name| **name == *table) {
            return Ok(TableListing::default());
        }
        let chains = self.list(NFT_MSG_GETCHAIN, family, &object, write_table, |found| {
            read_chain(found).filter(|_| in_table(found))
        })?;
        let sets = self.list(NFT_MSG_GETSET, family, &object, write_table, |found| {
            let spec = SetSpec::read(found);
            // An anonymous set belongs to a rule and is deleted with it.
            let is_named = in_table(found) && spec.flags & NFT_SET_ANONYMOUS == 0;
            let name = found.string(NFTA_SET_NAME).filter(|_| is_named)?;
            Some((Name::from(name), spec))
        })?;
        Ok(TableListing { exists: true, chains, sets: sets.into_iter().collect() })
    }

    /// Lists the elements of a set or map.
    pub fn list_elements(
        &mut self,
        family: IpFamily,
        table: &str,
        set: &str,
    ) -> Result<Vec<(ElementKey, ElementValue)>, KernelError> {
        self.list_set(family, table, set, elements_of)
    }

    /// Counts the rules of each chain of a table. A chain without rules is missing.
    pub fn count_rules(
        &mut self,
        family: IpFamily,
        table: &str,
    ) -> Result<BTreeMap<Name, usize>, KernelError> {
        let write = |to: &mut MessageBuffer| to.string(NFTA_TABLE_NAME, table);
        let chain = |rule: Attributes<'_>| {
            let is_in_table = rule.string(NFTA_TABLE_NAME) == Some(table);
            rule.string(NFTA_RULE_CHAIN).filter(|_| is_in_table).map(Name::from)
        };
        let object = format!("rules of the table {table}");
        let mut counts = BTreeMap::new();
        for chain in self.list(NFT_MSG_GETRULE, family, &object, write, chain)? {
            *counts.entry(chain).or_default() += 1;
        }
        Ok(counts)
    }

    /// Lists the addresses of a set that forgets them, each with the time until then. A set that
    /// does not exist has none.
    pub fn list_addresses(
        &mut self,
        family: IpFamily,
        table: &str,
        set: &str,
    ) -> Result<Vec<(IpAddr, Option<Duration>)>, KernelError> {
        self.list_set(family, table, set, |answer| elements(answer, read_address))
    }

    fn list_set<T>(
        &self,
        family: IpFamily,
        table: &str,
        set: &str,
        read: impl Fn(Attributes<'_>) -> Option<Vec<T>>,
    ) -> Result<Vec<T>, KernelError> {
        let write = |to: &mut MessageBuffer| {
            to.string(NFTA_TABLE_NAME, table);
            to.string(NFTA_SET_ELEM_LIST_SET, set);
        };
        let messages = self.list(NFT_MSG_GETSETELEM, family, &format!("set {set}"), write, read)?;
        Ok(messages.into_iter().flatten().collect())
    }

    /// Sends a dump request and returns what `read` makes of each answer. `object` is for the
    /// error.
    fn list<T>(
        &self,
        message: c_int,
        family: IpFamily,
        object: &str,
        write: impl Fn(&mut MessageBuffer),
        read: impl Fn(Attributes<'_>) -> Option<T>,
    ) -> Result<Vec<T>, KernelError> {
        let header = nfgenmsg(NftFamily::of(family).number, 0);
        let dump = || self.socket.request(nftables_type(message), NLM_F_DUMP, header, &write)?.read(&read);
        match uninterrupted(dump) {
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(Vec::new()),
            list => list.map_err(KernelError::call("list", format!("the nftables {object}"))),
        }
    }
}

fn read_chain(found: Attributes<'_>) -> Option<Chain> {
    let name = found.string(NFTA_CHAIN_NAME)?.into();
    let hook = found.nested(NFTA_CHAIN_HOOK).map(|hook| Hook {
        kind: match found.string(NFTA_CHAIN_TYPE) {
            Some("filter") => "filter",
            Some("nat") => "nat",
            Some("route") => "route",
            _ => "?",
        },
        // A hook without a number or a priority differs from all wanted hooks.
        number: hook.be_int(NFTA_HOOK_HOOKNUM).unwrap_or(c_int::MIN),
        priority: hook.be_int(NFTA_HOOK_PRIORITY).unwrap_or(c_int::MIN),
    });
    Some(Chain { name, hook })
}

/// Reads an answer as a chain, as a set and as a list of elements, for fuzz targets.
#[cfg(feature = "fuzzing")]
pub(in crate::kernel) fn read_any(answer: Attributes<'_>) {
    read_chain(answer);
    SetSpec::read(answer);
    let fields = [super::FieldType::Address, super::FieldType::Port];
    elements(answer, read_address);
    for (key, value) in elements_of(answer).unwrap_or_default() {
        if let ElementValue::Data(data) = value {
            data.to_endpoint();
        }
        for family in IpFamily::ALL {
            super::element::display(key.bytes(), &fields, family);
        }
    }
}

/// Returns the elements in an answer.
fn elements_of(answer: Attributes<'_>) -> Option<Vec<(ElementKey, ElementValue)>> {
    elements(answer, read_element)
}

fn elements<T>(answer: Attributes<'_>, read: fn(Attributes<'_>) -> Option<T>) -> Option<Vec<T>> {
    let list = answer.nested(NFTA_SET_ELEM_LIST_ELEMENTS)?;
    Some(list.iter().filter_map(|(_, element)| read(Attributes(element))).collect())
}

/// Reads an element of a set of addresses, and when the kernel forgets it.
fn read_address(element: Attributes<'_>) -> Option<(IpAddr, Option<Duration>)> {
    let bytes = element.nested(NFTA_SET_ELEM_KEY)?.get(NFTA_DATA_VALUE)?;
    let v4 = <[u8; 4]>::try_from(bytes).map(IpAddr::from);
    let address = v4.or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from)).ok()?;
    Some((address, element.be64(NFTA_SET_ELEM_EXPIRATION).map(Duration::from_millis)))
}

fn read_element(element: Attributes<'_>) -> Option<(ElementKey, ElementValue)> {
    let key = ElementKey::from_bytes(element.nested(NFTA_SET_ELEM_KEY)?.get(NFTA_DATA_VALUE)?)?;
    let comment = element.get(NFTA_SET_ELEM_USERDATA).and_then(read_comment);
    let Some(data) = element.nested(NFTA_SET_ELEM_DATA) else {
        return Some((key, ElementValue::Member(comment)));
    };
    let value = match data.get(NFTA_DATA_VALUE) {
        Some(bytes) => ElementValue::Data(ElementData::from_bytes(bytes)?),
        None => ElementValue::verdict(read_verdict(data.nested(NFTA_DATA_VERDICT)?)?, comment),
    };
    Some((key, value))
}

fn read_verdict(verdict: Attributes<'_>) -> Option<Verdict> {
    let chain = verdict.string(NFTA_VERDICT_CHAIN).map(Name::from);
    Some(match (verdict.be_int(NFTA_VERDICT_CODE)?, chain) {
        (NF_DROP, _) => Verdict::Drop,
        (NFT_CONTINUE, _) => Verdict::Continue,
        (NFT_JUMP, Some(chain)) => Verdict::Jump(chain),
        (NFT_GOTO, Some(chain)) => Verdict::Goto(chain),
        // A verdict that shunt never writes into a map. It differs from all wanted verdicts.
        _ => Verdict::Return,
    })
}

fn read_comment(data: &[u8]) -> Option<Arc<str>> {
    let (head, text) = data.split_first_chunk::<2>()?;
    let text = text.get(..usize::from(head[1])).filter(|_| head[0] == 0)?;
    string_of(text).map(Into::into)
}
