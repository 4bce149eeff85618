//! Turns what netfilter reports about packets into lines of a trace.
//!
//! A packet is seen before translation, and again behind all rules. Its destination says then
//! whether it was translated. If a rule dropped or rejected it in between, the kernel reports the
//! rule. The kernel reports nothing about a packet that legacy iptables drops. shunt concludes that
//! it was dropped, because it does not see the packet again.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    future::ready,
    mem,
    net::SocketAddr,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use jiff::Timestamp;
use tokio::time::{Instant, sleep_until};

use super::{
    destinations,
    filter::TraceFilter,
    names::Names,
    record::{TracedEvent, TracedVerdict},
};
use crate::{
    explain::{Client, Question, Situation, Verdict, explain},
    kernel::{
        KernelError,
        packet_trace::{self, PacketTrace, Sighting, Stage},
    },
    model::Protocol,
    net::{OWN_TABLES, TRACE_TABLES},
    sync::{Inspected, Inspector, NoAnswer},
};

/// How long a packet may take from its first to its last rule.
const PATIENCE: Duration = Duration::from_millis(500);
/// How many packets on their way are remembered.
const MOST_PACKETS: usize = 4096;

/// The names of the tables that are in use. Each command that traces netfilter has one.
static USED_TABLES: Mutex<BTreeSet<&str>> = Mutex::new(BTreeSet::new());

/// The name of a table. It is free again when this is dropped.
#[derive(Debug)]
struct TableLease(&'static str);

impl TableLease {
    fn take() -> Option<Self> {
        let mut used = USED_TABLES.lock().unwrap_or_else(PoisonError::into_inner);
        TRACE_TABLES.into_iter().find(|name| used.insert(name)).map(Self)
    }
}

impl Drop for TableLease {
    fn drop(&mut self) {
        USED_TABLES.lock().unwrap_or_else(PoisonError::into_inner).remove(self.0);
    }
}

/// Removes the tables of traces. No shunt of this network namespace may trace meanwhile: shunt
/// calls it when it starts, because it may have been killed before, when it ends, and in a cleanup.
pub fn remove_tables() {
    // A node without nf_tables has none.
    let _ = packet_trace::remove_tables(|name| TRACE_TABLES.contains(&name));
}

/// Traces what netfilter translates.
pub(super) struct NetfilterTrace {
    // Dropped before its name is free.
    packets: PacketTrace,
    _table: TableLease,
    ways: Ways,
    /// The kernel dropped reports. What it kept is still to be read.
    lost_reports: bool,
    names: Names,
    inspector: Inspector,
}

impl NetfilterTrace {
    /// Begins to trace connections to the Services of a filter.
    pub(super) async fn start(inspector: &Inspector, filter: &TraceFilter) -> Result<Self, StartError> {
        let destinations = destinations::of(inspector, filter).await?;
        let table = TableLease::take().ok_or(StartError::TooMany)?;
        let packets = PacketTrace::start(table.0, destinations)?;
        Ok(Self {
            packets,
            _table: table,
            ways: Ways::default(),
            lost_reports: false,
            names: Names::default(),
            inspector: inspector.clone(),
        })
    }

    /// Waits for the next events. Dropping the future loses none that are complete.
    pub(super) async fn next(&mut self) -> Result<Traced, KernelError> {
        let seen = loop {
            let deadline = self.ways.deadline();
            tokio::select! {
                // What was reported counts, also if it is read late.
                biased;
                sightings = self.packets.next() => match sightings? {
                    Some(sightings) => {
                        let (now, time) = (Instant::now(), Timestamp::now());
                        for sighting in sightings {
                            self.ways.take(sighting, now, time);
                        }
                    }
                    None => self.lost_reports = true,
                },
                // Nothing is left to read.
                () = ready(()), if self.lost_reports => {
                    self.lost_reports = false;
                    return Ok(Traced { events: Vec::new(), lost: self.ways.lose() });
                }
                () = sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => {
                    self.ways.give_up(Instant::now());
                }
            }
            let ended = self.ways.ended();
            if !ended.is_empty() {
                break ended;
            }
        };
        let seen = judge(&self.inspector, seen).await;
        let vips = seen.iter().map(|way| (way.to, way.protocol));
        let ends = seen.iter().flat_map(|way| [way.from.ip(), way.after.map_or(way.from, |to| to).ip()]);
        let (vips, ends): (Vec<_>, Vec<_>) = (vips.collect(), ends.collect());
        self.names.find_places([]).await;
        // Without an answer, the lines have no names.
        let _ = self.names.learn(&self.inspector, vips, ends).await;
        let events = seen.into_iter().map(|way| event(way, &mut self.names)).collect();
        Ok(Traced { events, lost: 0 })
    }
}

/// What was seen.
pub(super) struct Traced {
    /// The packets whose way has ended.
    pub(super) events: Vec<TracedEvent>,
    /// If reports were lost: the least number of packets whose end is not known. Otherwise 0.
    pub(super) lost: u64,
}

/// Finds out which packets were refused.
async fn judge(inspector: &Inspector, ways: Vec<Way>) -> Vec<Way> {
    if ways.iter().all(|way| way.after.is_some()) {
        return ways;
    }
    let unjudged = ways.clone();
    let judge = move |inspected: &Inspected<'_>| -> Vec<Way> {
        let judged = ways.into_iter().map(|way| {
            let is_own = way.after.is_none() && !way.is_ended_by_others();
            let is_refused = is_own && is_refused(inspected, &way) == Some(true);
            Way { is_refused, ..way }
        });
        judged.collect()
    };
    inspector.read(judge).await.unwrap_or(unjudged)
}

/// Why netfilter cannot be traced.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The sync loop did not answer.
    #[error(transparent)]
    NoAnswer(#[from] NoAnswer),
    /// As many commands as may trace do so.
    #[error("{} commands trace already: end one of them", TRACE_TABLES.len())]
    TooMany,
    /// The kernel refused.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

/// A packet on its way.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Way {
    time: Timestamp,
    protocol: Protocol,
    from: SocketAddr,
    to: SocketAddr,
    /// The interface index, or 0 for a packet of the node.
    link: u32,
    /// The destination behind all rules. `None` while it is unknown, and if the packet got no
    /// further.
    after: Option<SocketAddr>,
    /// The chain that ended its way.
    dropped_by: Option<String>,
    /// It was refused, and not dropped.
    is_refused: bool,
}

impl Way {
    /// Returns true if a rule of somebody else ended its way. The kernel reports the same for a
    /// rule that drops and for one that rejects.
    fn is_ended_by_others(&self) -> bool {
        let is_own = |at: &String| {
            let (table, chain) = at.split_once(' ').unwrap_or((at, ""));
            OWN_TABLES.iter().any(|(_, own)| *own == table) || chain.starts_with(OWN_CHAINS)
        };
        self.dropped_by.as_ref().is_some_and(|at| !is_own(at))
    }
}

/// How the names of chains begin that shunt writes with iptables.
const OWN_CHAINS: &str = "KUBE-";

/// The packets on their way, and those whose way has ended.
#[derive(Debug, Default)]
struct Ways {
    open: BTreeMap<u32, Way>,
    /// The packets in the order in which they are given up.
    deadlines: VecDeque<(Instant, u32)>,
    ended: Vec<Way>,
}

impl Ways {
    fn take(&mut self, sighting: Sighting, now: Instant, time: Timestamp) {
        let Sighting { packet, stage, addresses, protocol, link, at } = sighting;
        match stage {
            Stage::Before => {
                let (Some([from, to]), Some(protocol)) = (addresses, protocol) else { return };
                let way =
                    Way { time, protocol, from, to, link, after: None, dropped_by: None, is_refused: false };
                if self.open.len() < MOST_PACKETS {
                    // The kernel has used the number for another packet before, which was dropped.
                    self.end(packet, |way| way);
                    self.open.insert(packet, way);
                    self.deadlines.push_back((now + PATIENCE, packet));
                }
            }
            Stage::After => {
                let after = addresses.map(|[_, to]| to);
                self.end(packet, |way| Way { after, ..way });
            }
            Stage::Dropped => self.end(packet, |way| Way { dropped_by: Some(at), ..way }),
        }
    }

    fn end(&mut self, packet: u32, change: impl FnOnce(Way) -> Way) {
        if let Some(way) = self.open.remove(&packet) {
            self.deadlines.retain(|(_, waiting)| *waiting != packet);
            self.ended.push(change(way));
        }
    }

    /// Forgets the packets on their way, because the kernel dropped reports: what happened to them
    /// is not known. Returns how many are missing at least.
    fn lose(&mut self) -> u64 {
        let open = mem::take(&mut self.open).len().max(1);
        self.deadlines.clear();
        u64::try_from(open).unwrap_or(u64::MAX)
    }

    fn deadline(&self) -> Option<Instant> {
        self.deadlines.front().map(|(deadline, _)| *deadline)
    }

    /// Ends the ways of packets that were not seen again in time.
    fn give_up(&mut self, now: Instant) {
        while let Some((_, packet)) = self.deadlines.pop_front_if(|(deadline, _)| *deadline <= now) {
            self.ended.extend(self.open.remove(&packet));
        }
    }

    fn ended(&mut self) -> Vec<Way> {
        mem::take(&mut self.ended)
    }
}

fn event(way: Way, names: &mut Names) -> TracedEvent {
    let is_ended_by_others = way.is_ended_by_others();
    let Way { time, protocol, from, to, link, after, dropped_by, is_refused } = way;
    let mut why = dropped_by.unwrap_or_else(|| NOT_SEEN_AGAIN.to_owned());
    if is_ended_by_others {
        why.push_str(DROPPED_OR_REJECTED);
    }
    let (verdict, reason) = match after {
        Some(after) if after == to => (TracedVerdict::Passed, None),
        Some(_) => (TracedVerdict::Translated, None),
        None if is_refused => (TracedVerdict::Refused, Some(why)),
        None => (TracedVerdict::Dropped, Some(why)),
    };
    let endpoint = after.filter(|_| verdict == TracedVerdict::Translated);
    let from_name = if link == 0 { Some("node".to_owned()) } else { names.pod(from.ip()) };
    TracedEvent {
        time: format!("{time:.6}"),
        verdict,
        reason,
        protocol: protocol.name().to_owned(),
        client: Some(from),
        from: from_name,
        vip: to,
        service: names.service((to, protocol)),
        endpoint,
        pod: endpoint.and_then(|endpoint| names.pod(endpoint.ip())),
        by: "netfilter".to_owned(),
        link: (link != 0).then(|| names.link(link)),
    }
}

/// The reason for a packet that no rule of nf_tables dropped, and that does not get through.
const NOT_SEEN_AGAIN: &str = "not_seen_again";

/// What is added to the table and chain of others.
const DROPPED_OR_REJECTED: &str = ", which drops or rejects it";

/// Returns true if shunt refuses this connection. The kernel reports only that a rule ended the way
/// of the packet, and some rules drop for one destination and reject for another.
fn is_refused(inspected: &Inspected<'_>, way: &Way) -> Option<bool> {
    let backstop = inspected.backstop.as_ref().map(|backstop| backstop.mode);
    let situation = Situation { model: inspected.model, mode: inspected.mode?, backstop };
    let client = if way.link == 0 { Client::Node } else { Client::Address(way.from.ip()) };
    let question = Question { client, destination: way.to, protocol: way.protocol, outside_cgroup: false };
    Some(explain(situation, &question).verdict == Verdict::Refuse)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PACKET: u32 = 7;

    fn address(text: &str) -> SocketAddr {
        text.parse().expect("an address")
    }

    fn sighting(stage: Stage, to: &str) -> Sighting {
        let addresses = (!to.is_empty()).then(|| [address("192.0.2.1:4000"), address(to)]);
        let protocol = Some(Protocol::Tcp);
        Sighting {
            packet: PACKET,
            stage,
            addresses,
            protocol,
            link: 2,
            at: "kube-proxy firewall-x".to_owned(),
        }
    }

    fn ways(sightings: &[Sighting], waits: bool) -> Vec<TracedEvent> {
        let (mut ways, now) = (Ways::default(), Instant::now());
        for sighting in sightings {
            ways.take(sighting.clone(), now, Timestamp::UNIX_EPOCH);
        }
        if waits {
            ways.give_up(now + PATIENCE);
        }
        assert!(ways.open.is_empty() && ways.deadlines.is_empty());
        ways.ended().into_iter().map(|way| event(way, &mut Names::default())).collect()
    }

    #[test]
    fn what_is_seen_of_a_packet_says_what_happened_to_it() {
        use Stage::{After, Before, Dropped};
        let before = sighting(Before, "10.96.0.80:80");
        for (then, waits, verdict, endpoint, reason) in [
            (
                Some(sighting(After, "10.244.1.5:8080")),
                false,
                TracedVerdict::Translated,
                Some("10.244.1.5:8080"),
                None,
            ),
            (Some(sighting(After, "10.96.0.80:80")), false, TracedVerdict::Passed, None, None),
            (Some(sighting(Dropped, "")), false, TracedVerdict::Dropped, None, Some("kube-proxy firewall-x")),
            (None, true, TracedVerdict::Dropped, None, Some(NOT_SEEN_AGAIN)),
        ] {
            let sightings: Vec<_> = [before.clone()].into_iter().chain(then).collect();
            let [event] = &ways(&sightings, waits)[..] else { panic!("one packet") };
            assert_eq!((event.verdict, event.reason.as_deref()), (verdict, reason));
            assert_eq!(event.endpoint, endpoint.map(address));
        }
    }

    #[test]
    fn rule_of_others_may_drop_or_reject() {
        let before = sighting(Stage::Before, "10.96.0.80:80");
        for (at, is_of_others) in [
            ("filter input", true),
            ("filter INPUT", true),
            ("filter KUBE-EXTERNAL-SERVICES", false),
            ("kube-proxy firewall-x", false),
        ] {
            let ended = Sighting { at: at.to_owned(), ..sighting(Stage::Dropped, "") };
            let [event] = &ways(&[before.clone(), ended], false)[..] else { panic!("one packet") };
            let reason =
                if is_of_others { format!("{at}, which drops or rejects it") } else { at.to_owned() };
            assert_eq!((event.verdict, &event.reason), (TracedVerdict::Dropped, &Some(reason)));
        }
    }

    #[test]
    fn packets_on_their_way_are_lost_and_not_dropped_if_reports_are_missing() {
        let (mut ways, now) = (Ways::default(), Instant::now());
        assert_eq!(ways.lose(), 1, "a packet whose beginning is missing");
        let before = sighting(Stage::Before, "10.96.0.80:80");
        for packet in [1, 2] {
            ways.take(Sighting { packet, ..before.clone() }, now, Timestamp::UNIX_EPOCH);
        }
        assert_eq!(ways.lose(), 2);
        ways.give_up(now + PATIENCE);
        assert_eq!(ways.ended(), []);
    }

    #[test]
    fn packets_whose_beginning_was_not_seen_are_not_reported() {
        assert_eq!(ways(&[sighting(Stage::After, "10.244.1.5:8080")], true), []);
    }
}
