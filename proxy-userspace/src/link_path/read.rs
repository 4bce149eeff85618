//! Reads what others have set up on the node.

use std::collections::BTreeSet;

use super::{
    Evidence, nft_json,
    ruleset::{Family, Source, Table},
    save,
    shapes::IPTABLES,
};
use crate::{
    kernel::{
        KernelError,
        command::Launcher,
        foreign_filters::{self, LinkFilter},
        iptables::{Backend, Iptables, is_available},
        nft::Nft,
        routing_rules, xfrm,
    },
    net::{IpFamily, OWN_PROGRAMS, OWN_TABLES},
};

/// Reads the evidence in the network namespace of the caller. `own_marks` are the mark bits that
/// shunt uses. Each table is read once. Blocks while commands run.
pub fn read(launcher: &Launcher, own_marks: u32) -> Result<Evidence, KernelError> {
    Ok(Evidence {
        tables: read_tables(launcher, &IPTABLES)?,
        filters: read_filters()?,
        policies: xfrm::policies()?,
        routes_by_source: routing_rules::select_by_source()?,
        own_marks,
    })
}

/// Reads the netfilter rules, without shunt's tables. Of iptables' tables, reads those with these
/// names. Blocks while commands run, each for ten seconds at most.
pub fn read_tables(launcher: &Launcher, of_iptables: &[&str]) -> Result<Vec<Table>, KernelError> {
    let mut tables = nftables(launcher, of_iptables)?;
    for family in families() {
        tables.extend(iptables(family, Backend::Legacy, of_iptables, launcher)?.into_iter().flatten());
    }
    Ok(tables)
}

/// Reads the filters and programs of traffic control that others attached to links, in the network
/// namespace of the caller.
pub(super) fn read_filters() -> Result<Vec<LinkFilter>, KernelError> {
    foreign_filters::list(OWN_PROGRAMS)
}

fn families() -> impl Iterator<Item = IpFamily> {
    IpFamily::ALL.into_iter().filter(|family| is_available(*family))
}

fn is_own_table(family: &str, name: &str) -> bool {
    Family::parse(family).is_some_and(|family| OWN_TABLES.contains(&(family.number(), name)))
}

/// Reads the tables in nftables, without shunt's. Tables of iptables are read by iptables, because
/// nft does not show its extensions.
fn nftables(launcher: &Launcher, of_iptables: &[&str]) -> Result<Vec<Table>, KernelError> {
    let nft = Nft::new(launcher.clone());
    let names = parsed("list of tables", nft_json::parse_names(&nft.list_tables_json()?))?;
    let foreign: BTreeSet<(String, String)> =
        names.into_iter().filter(|(family, name)| !is_own_table(family, name)).collect();
    let mut tables = Vec::new();
    let mut read = BTreeSet::new();
    for family in families() {
        let nft_family = table_family(family);
        let is_present = |name: &&str| foreign.contains(&(nft_family.name().into(), (*name).into()));
        let names: Vec<&str> = of_iptables.iter().copied().filter(is_present).collect();
        let left_out = IPTABLES.into_iter().filter(|name| !of_iptables.contains(name));
        read.extend(left_out.map(|name| (nft_family.name().to_owned(), name.to_owned())));
        for (name, saved) in names.iter().zip(iptables(family, Backend::Nft, &names, launcher)?) {
            // A table with rules of nft cannot be read in whole.
            if let Some(table) = saved {
                tables.push(table);
                read.insert((nft_family.name().to_owned(), (*name).to_owned()));
            }
        }
    }
    for (family, name) in foreign.difference(&read) {
        // A table that is gone has just been removed.
        if let Some(json) = nft.list_table_json(&format!("{family} {name}"))? {
            tables.extend(parsed(name, nft_json::parse(&json))?);
        }
    }
    Ok(tables)
}

const fn table_family(family: IpFamily) -> Family {
    match family {
        IpFamily::V4 => Family::Ip,
        IpFamily::V6 => Family::Ip6,
    }
}

/// Reads tables with iptables. The result is `None` for a table that cannot be read in whole, for
/// one that does not exist, and if no command of the backend is installed.
fn iptables(
    family: IpFamily,
    backend: Backend,
    names: &[&str],
    launcher: &Launcher,
) -> Result<Vec<Option<Table>>, KernelError> {
    let source = match backend {
        Backend::Nft => Source::IptablesNft,
        Backend::Legacy => Source::IptablesLegacy,
    };
    let mut commands = None;
    let mut tables = Vec::new();
    for name in names {
        // The rules of legacy iptables matter without a command, too.
        if backend == Backend::Legacy && !Iptables::has_legacy_table(family, name) {
            continue;
        }
        let commands = commands.get_or_insert_with(|| {
            Iptables::installed(family, launcher).into_iter().find(|found| found.backend == backend)
        });
        let saved = match commands {
            Some(commands) => Some(commands.save(name)?),
            None if backend == Backend::Legacy => {
                return Err(KernelError::CommandNotFound("iptables-legacy-save".into()));
            }
            None => None,
        };
        let whole = saved.filter(|saved| Iptables::is_complete(saved));
        tables.push(whole.and_then(|saved| save::parse(&saved, source, table_family(family)).pop()));
    }
    Ok(tables)
}

fn parsed<T>(object: &str, result: Result<T, serde_json::Error>) -> Result<T, KernelError> {
    result.map_err(|error| KernelError::call("parse nft's", object)(error.into()))
}
