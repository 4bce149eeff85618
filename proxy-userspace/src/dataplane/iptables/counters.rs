//! The metrics of upstream's iptables mode: rules by table, failed restores, and packets counted by nfacct objects.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

use super::{
    plan::FamilyPlan,
    rules::{INVALID_DROPPED, LOCALHOST_ACCEPTED},
    state::FamilyState,
};
use crate::{
    dataplane::{MetricValue, ModeMetric, ModeMetricsReader, families, iptables_text::Table},
    kernel::nfacct,
    model::IpFamily,
};

/// Counts by family. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct Counters(Arc<Mutex<BTreeMap<IpFamily, Counts>>>);

#[derive(Clone, Debug, Default)]
struct Counts {
    /// The rules that exist, and those that the last sync wrote.
    rules: BTreeMap<Table, (usize, usize)>,
    failures: u64,
    partial_failures: u64,
}

/// A value with its labels besides the family.
type Labelled = (Vec<(&'static str, &'static str)>, MetricValue);

impl Counts {
    fn rules(&self, count: impl Fn(&(usize, usize)) -> usize) -> Vec<Labelled> {
        let gauge = |(table, rules): (&Table, _)| {
            let value = i64::try_from(count(rules)).unwrap_or(i64::MAX);
            (vec![("table", table.name())], MetricValue::Gauge(value))
        };
        self.rules.iter().map(gauge).collect()
    }
}

impl Counters {
    /// Adds a family, with all counts at zero.
    pub(super) fn add(&self, family: IpFamily) {
        self.change(family, |_| {});
    }

    fn change(&self, family: IpFamily, change: impl FnOnce(&mut Counts)) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        change(all.entry(family).or_default());
    }

    /// Counts a failed restore.
    pub(super) fn record_failure(&self, plan: &FamilyPlan) {
        self.change(plan.family, |counts| {
            counts.failures += 1;
            counts.partial_failures += u64::from(!plan.is_full);
        });
    }

    /// Records the number of rules that a sync wrote, by table.
    pub(super) fn record_sync(
        &self,
        family: IpFamily,
        written: &BTreeMap<Table, usize>,
        state: &FamilyState,
    ) {
        let count = |table: Table| {
            let all = state.tables.get(&table).map_or(0, |state| state.rules);
            (table, (all, written.get(&table).copied().unwrap_or(0)))
        };
        self.change(family, |counts| counts.rules = [Table::Filter, Table::Nat].map(count).into());
    }

    /// Returns a function that reads all metrics.
    pub(super) fn metrics(&self) -> ModeMetricsReader {
        let this = self.clone();
        Box::new(move || {
            let counts = this.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
            [rules(&counts), failures(&counts), packets()].concat()
        })
    }
}

fn by_family(
    counts: &BTreeMap<IpFamily, Counts>,
    name: &'static str,
    help: &'static str,
    values: impl Fn(&Counts) -> Vec<Labelled>,
) -> Vec<ModeMetric> {
    let of_family = |(family, counts): (&IpFamily, &Counts)| {
        let label = families::label(*family);
        values(counts).into_iter().map(move |(mut labels, value)| {
            labels.push(label);
            ModeMetric { name, help, labels, value }
        })
    };
    counts.iter().flat_map(of_family).collect()
}

fn rules(counts: &BTreeMap<IpFamily, Counts>) -> Vec<ModeMetric> {
    let total = ("sync_proxy_rules_iptables_total", "Total number of iptables rules owned by kube-proxy");
    let last =
        ("sync_proxy_rules_iptables_last", "Number of iptables rules written by kube-proxy in last sync");
    let mut metrics = by_family(counts, total.0, total.1, |counts| counts.rules(|rules| rules.0));
    metrics.extend(by_family(counts, last.0, last.1, |counts| counts.rules(|rules| rules.1)));
    metrics
}

fn failures(counts: &BTreeMap<IpFamily, Counts>) -> Vec<ModeMetric> {
    let all = ("sync_proxy_rules_iptables_restore_failures", "Cumulative proxy iptables restore failures");
    let partial = (
        "sync_proxy_rules_iptables_partial_restore_failures",
        "Cumulative proxy iptables partial restore failures",
    );
    let counter = |value| vec![(Vec::new(), MetricValue::Counter(value))];
    let mut metrics = by_family(counts, all.0, all.1, |counts| counter(counts.failures));
    metrics.extend(by_family(counts, partial.0, partial.1, |counts| counter(counts.partial_failures)));
    metrics
}

/// Returns nothing if the kernel has no nfacct objects.
fn packets() -> Vec<ModeMetric> {
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
        let value = MetricValue::Counter(nfacct::packets(counter).ok()?);
        Some(ModeMetric { name, help, labels: Vec::new(), value })
    };
    counters.into_iter().filter_map(read).collect()
}
