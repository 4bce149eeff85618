//! The metrics of upstream's iptables mode: rules by table, failed restores, and packets counted by
//! nfacct objects.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use super::{
    plan::FamilyPlan,
    rules::{INVALID_DROPPED, LOCALHOST_ACCEPTED},
    state::FamilyState,
};
use crate::{
    dataplane::{MetricValue, ModeMetric, ModeMetricsReader, families, iptables_text::Table, lock},
    kernel::nfacct,
    model::IpFamily,
};

/// Counts by family. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct Counters(Arc<Mutex<FamilyCounts>>);

type FamilyCounts = BTreeMap<IpFamily, Counts>;

#[derive(Clone, Debug, Default)]
struct Counts {
    /// The rules that exist, and those that the last sync wrote.
    rules: BTreeMap<Table, (usize, usize)>,
    failures: u64,
    partial_failures: u64,
}

impl Counters {
    /// Adds a family, with all counts at zero.
    pub(super) fn add(&self, family: IpFamily) {
        self.change(family, |_| {});
    }

    fn change(&self, family: IpFamily, change: impl FnOnce(&mut Counts)) {
        change(lock(&self.0).entry(family).or_default());
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
        Box::new(move || metrics(&lock(&this.0)))
    }
}

fn metrics(counts: &FamilyCounts) -> Vec<ModeMetric> {
    let total = ("sync_proxy_rules_iptables_total", "Total number of iptables rules owned by kube-proxy");
    let last =
        ("sync_proxy_rules_iptables_last", "Number of iptables rules written by kube-proxy in last sync");
    let failed = ("sync_proxy_rules_iptables_restore_failures", "Cumulative proxy iptables restore failures");
    let partial = (
        "sync_proxy_rules_iptables_partial_restore_failures",
        "Cumulative proxy iptables partial restore failures",
    );
    let dropped = (
        "iptables_ct_state_invalid_dropped_packets",
        "packets dropped by iptables to work around conntrack problems",
    );
    let accepted = (
        "iptables_localhost_nodeports_accepted_packets",
        "Number of packets accepted on nodeports of loopback interface",
    );
    [
        rules(total, counts, |(all, _)| *all),
        rules(last, counts, |(_, written)| *written),
        failures(failed, counts, |counts| counts.failures),
        failures(partial, counts, |counts| counts.partial_failures),
        packets(dropped, INVALID_DROPPED),
        packets(accepted, LOCALHOST_ACCEPTED),
    ]
    .concat()
}

/// The name and help of a metric.
type Metric = (&'static str, &'static str);

fn rules(
    (name, help): Metric,
    counts: &FamilyCounts,
    count: fn(&(usize, usize)) -> usize,
) -> Vec<ModeMetric> {
    let of_family = |(family, counts): (&IpFamily, &Counts)| {
        let family = families::label(*family);
        let metric = |(table, rules): (&Table, _)| ModeMetric {
            name,
            help,
            labels: vec![("table", table.name()), family],
            value: MetricValue::Gauge(i64::try_from(count(rules)).unwrap_or(i64::MAX)),
        };
        counts.rules.iter().map(metric).collect::<Vec<_>>()
    };
    counts.iter().flat_map(of_family).collect()
}

fn failures((name, help): Metric, counts: &FamilyCounts, count: fn(&Counts) -> u64) -> Vec<ModeMetric> {
    let metric = |(family, counts): (&IpFamily, &Counts)| {
        let value = MetricValue::Counter(count(counts));
        ModeMetric { name, help, labels: vec![families::label(*family)], value }
    };
    counts.iter().map(metric).collect()
}

/// Returns nothing if the kernel does not have the nfacct object.
fn packets((name, help): Metric, object: &str) -> Vec<ModeMetric> {
    let packets = nfacct::packets(object).ok().map(MetricValue::Counter);
    packets.into_iter().map(|value| ModeMetric { name, help, labels: Vec::new(), value }).collect()
}
