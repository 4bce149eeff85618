//! What upstream's iptables mode counts, for metrics: rules by table, failed restores, and packets by nfacct objects.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

use super::{
    names::Table,
    plan::FamilyPlan,
    rules::{INVALID_DROPPED, LOCALHOST_ACCEPTED},
    state::FamilyState,
};
use crate::{
    dataplane::{Reading, ReadingValue, Readings, families},
    kernel::nfacct,
    model::IpFamily,
};

/// Counts, shared with whoever reads them.
#[derive(Clone, Debug, Default)]
pub(super) struct Counters(Arc<Mutex<BTreeMap<IpFamily, Counts>>>);

/// Counts of a family.
#[derive(Clone, Debug, Default)]
struct Counts {
    /// Rules there are, and that the last sync wrote.
    rules: BTreeMap<Table, (usize, usize)>,
    failures: u64,
    partial_failures: u64,
}

impl Counters {
    /// A family to be told about, from the start.
    pub(super) fn add(&self, family: IpFamily) {
        self.with(family, |_| {});
    }

    fn with(&self, family: IpFamily, change: impl FnOnce(&mut Counts)) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        change(all.entry(family).or_default());
    }

    /// A restore failed.
    pub(super) fn failed(&self, plan: &FamilyPlan) {
        self.with(plan.family, |counts| {
            counts.failures += 1;
            counts.partial_failures += u64::from(!plan.is_full);
        });
    }

    /// A sync wrote so many rules, by table.
    pub(super) fn wrote(&self, family: IpFamily, written: &BTreeMap<Table, usize>, held: &FamilyState) {
        let count = |table: Table| {
            let all = held.table(table).map_or(0, |held| held.rules);
            (table, (all, written.get(&table).copied().unwrap_or(0)))
        };
        self.with(family, |counts| counts.rules = [Table::Filter, Table::Nat].map(count).into());
    }

    /// Reads all of them.
    pub(super) fn readings(&self) -> Readings {
        let this = self.clone();
        Box::new(move || {
            let counts = this.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let mut readings = rules(&counts);
            readings.extend(failures(&counts));
            readings.extend(packets());
            readings
        })
    }
}

fn rules(counts: &BTreeMap<IpFamily, Counts>) -> Vec<Reading> {
    type Choice = fn(&(usize, usize)) -> usize;
    let metrics: [(&str, &str, Choice); 2] = [
        ("sync_proxy_rules_iptables_total", "Total number of iptables rules owned by kube-proxy", |rules| {
            rules.0
        }),
        (
            "sync_proxy_rules_iptables_last",
            "Number of iptables rules written by kube-proxy in last sync",
            |rules| rules.1,
        ),
    ];
    let of = |(metric, help, choose): (&'static str, &'static str, Choice)| {
        counts.iter().flat_map(move |(family, counts)| {
            counts.rules.iter().map(move |(table, rules)| Reading {
                name: metric,
                help,
                labels: vec![("table", table.name()), families::label(*family)],
                value: ReadingValue::Gauge(i64::try_from(choose(rules)).unwrap_or(i64::MAX)),
            })
        })
    };
    metrics.into_iter().flat_map(of).collect()
}

fn failures(counts: &BTreeMap<IpFamily, Counts>) -> Vec<Reading> {
    type Choice = fn(&Counts) -> u64;
    let metrics: [(&str, &str, Choice); 2] = [
        (
            "sync_proxy_rules_iptables_restore_failures",
            "Cumulative proxy iptables restore failures",
            |counts| counts.failures,
        ),
        (
            "sync_proxy_rules_iptables_partial_restore_failures",
            "Cumulative proxy iptables partial restore failures",
            |counts| counts.partial_failures,
        ),
    ];
    let of = |(metric, help, choose): (&'static str, &'static str, Choice)| {
        counts.iter().map(move |(family, counts)| Reading {
            name: metric,
            help,
            labels: vec![families::label(*family)],
            value: ReadingValue::Counter(choose(counts)),
        })
    };
    metrics.into_iter().flat_map(of).collect()
}

/// None where the kernel does not have them.
fn packets() -> Vec<Reading> {
    let counters = [
        (
            INVALID_DROPPED,
            "iptables_ct_state_invalid_dropped_packets",
            "packets dropped by iptables to work around conntrack problems",
        ),
        (
            LOCALHOST_ACCEPTED,
            "iptables_localhost_nodeports_accepted_packets",
            "Number of packets accepted on nodeports of loopback interface",
        ),
    ];
    let read = |(counter, name, help)| {
        let value = ReadingValue::Counter(nfacct::packets(counter).ok()?);
        Some(Reading { name, help, labels: Vec::new(), value })
    };
    counters.into_iter().filter_map(read).collect()
}
