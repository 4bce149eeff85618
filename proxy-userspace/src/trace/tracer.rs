//! Traces while somebody subscribes: exchanges the programs, reads what they write, and gives it to
//! the subscribers.

use std::{future::pending, mem, net::SocketAddr, sync::Arc, time::Duration};

use jiff::Timestamp;
use tokio::{
    sync::{
        Mutex,
        broadcast::{self, error::RecvError},
        mpsc,
    },
    time::{MissedTickBehavior, interval},
};

use super::{
    filter::TraceFilter,
    names::Names,
    netfilter::{self, NetfilterTrace, StartError, Traced},
    packets::Packet,
    programs::{self, ClockOffset},
    record::{TraceRecord, TracedEvent, TracedPacket},
    served::{self, NotServed},
};
use crate::{
    causes::with_causes,
    dataplane::{
        Mode,
        ebpf::{EbpfError, TraceRecords, TracingPrograms},
    },
    kernel::{KernelError, clock},
    sync::{Inspected, Inspector, NoAnswer, TraceEnd},
};

/// The time between two reads of the ring buffers.
const INTERVAL: Duration = Duration::from_millis(50);
/// How many events, and how many packets, one read takes at most.
const MOST_EVENTS: usize = 20_000;
const MOST_PACKETS: usize = 2_000;
/// How many batches a slow subscriber may be behind.
const BATCHES: usize = 64;

/// Loads programs that trace; `true` for those that capture packets. It blocks for tenths of a
/// second.
pub type LoadPrograms = Arc<dyn Fn(bool) -> Result<(TracingPrograms, TraceRecords), EbpfError> + Send + Sync>;

/// Why nothing can be traced.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The sync loop did not answer.
    #[error(transparent)]
    NoAnswer(#[from] NoAnswer),
    /// Nothing would ever be traced.
    #[error(transparent)]
    NotServed(#[from] NotServed),
    /// The rules that trace could not be made.
    #[error("cannot trace netfilter: {}", with_causes(.0))]
    Netfilter(#[from] StartError),
    /// The programs could not be loaded.
    #[error("cannot load programs that trace: {0}")]
    Load(String),
    /// New maps are being built, or the first sync has not succeeded.
    #[error("the programs of this shunt are not attached yet: try again")]
    NotAttached,
    /// IPVS does not report what it does with a packet, and gives it another number.
    #[error(
        "the kernel reports nothing about packets that IPVS translates: shunt get flows lists its connections"
    )]
    Ipvs,
    /// The mode has no programs.
    #[error("mode {0} has no programs: packets are captured only in the ebpf mode")]
    NoPrograms(Mode),
}

/// What happened since the last read.
#[derive(Default)]
struct Batch {
    events: Vec<TracedEvent>,
    /// Packets with the addresses in them.
    packets: Vec<(TracedPacket, Vec<SocketAddr>)>,
    lost: u64,
    /// Nothing is traced any more.
    ended: Option<&'static str>,
}

/// Traces for subscribers. Clones trace for the same ones.
#[derive(Clone)]
pub struct Tracer {
    inspector: Inspector,
    load: LoadPrograms,
    running: Arc<Mutex<Option<Running>>>,
}

/// The task that reads the records.
struct Running {
    batches: broadcast::Sender<Arc<Batch>>,
    /// Programs that replace those that trace.
    exchanged: mpsc::Sender<Exchanged>,
    captures: bool,
}

/// Programs that were attached.
struct Exchanged {
    records: TraceRecords,
    end: TraceEnd,
}

impl Tracer {
    /// Returns a tracer that traces nothing yet. Removes what an earlier process left.
    pub fn new(inspector: Inspector, load: LoadPrograms) -> Self {
        netfilter::remove_tables();
        Self { inspector, load, running: Arc::default() }
    }

    /// Begins to trace. It returns once everything is traced.
    pub async fn subscribe(&self, filter: TraceFilter) -> Result<Subscription, TraceError> {
        let read = |inspected: &Inspected<'_>| Some((inspected.mode?, inspected.backstop.is_some()));
        let (mode, has_backstop) = self.inspector.read(read).await?.ok_or(NoAnswer::NotRunning)?;
        if mode == Mode::Ipvs {
            return Err(TraceError::Ipvs);
        }
        let has_programs = mode == Mode::Ebpf;
        if filter.packets && !has_programs {
            return Err(TraceError::NoPrograms(mode));
        }
        let find = move |inspected: &Inspected<'_>| served::find(inspected.model.snapshot(), &filter);
        let filter = self.inspector.read(find).await??;
        let programs = if has_programs { Some(self.follow(filter.packets).await?) } else { None };
        let netfilter = if has_programs && !has_backstop {
            None
        } else {
            Some(NetfilterTrace::start(&self.inspector, &filter).await?)
        };
        Ok(Subscription { programs, netfilter, filter })
    }

    /// Returns what the programs write. The first one exchanges the programs, and so does the first
    /// one that wants packets.
    async fn follow(&self, captures: bool) -> Result<broadcast::Receiver<Arc<Batch>>, TraceError> {
        let mut running = self.running.lock().await;
        if let Some(task) = running.as_ref().filter(|task| task.captures || !captures) {
            return Ok(task.batches.subscribe());
        }
        let exchanged = self.exchange(captures).await?;
        if let Some(task) = running.as_mut() {
            let batches = task.batches.subscribe();
            if let Err(returned) = task.exchanged.send(exchanged).await {
                // The task ended with its sync loop. The next one begins.
                return Ok(self.start(&mut running, returned.0, captures));
            }
            task.captures = captures;
            return Ok(batches);
        }
        Ok(self.start(&mut running, exchanged, captures))
    }

    async fn exchange(&self, captures: bool) -> Result<Exchanged, TraceError> {
        let load = Arc::clone(&self.load);
        let loaded = tokio::task::spawn_blocking(move || load(captures)).await;
        let loaded = loaded.map_err(|panic| TraceError::Load(panic.to_string()))?;
        let (programs, records) = loaded.map_err(|error| TraceError::Load(with_causes(&error)))?;
        let end = self.inspector.trace(programs).await?.ok_or(TraceError::NotAttached)?;
        Ok(Exchanged { records, end })
    }

    fn start(
        &self,
        running: &mut Option<Running>,
        exchanged: Exchanged,
        captures: bool,
    ) -> broadcast::Receiver<Arc<Batch>> {
        let (batches, first) = broadcast::channel(BATCHES);
        let (to_task, later) = mpsc::channel(1);
        tokio::spawn(self.clone().run(batches.clone(), exchanged, later));
        *running = Some(Running { batches, exchanged: to_task, captures });
        first
    }

    /// Reads until nobody subscribes, or the sync loop is gone. Then its own programs are attached
    /// again.
    async fn run(
        self,
        batches: broadcast::Sender<Arc<Batch>>,
        mut exchanged: Exchanged,
        mut later: mpsc::Receiver<Exchanged>,
    ) {
        let mut reader = Reader::default();
        let mut ticks = interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let ended = loop {
            tokio::select! {
                _ = ticks.tick() => {}
                Some(next) = later.recv() => {
                    reader = Reader::default();
                    exchanged = next;
                }
                () = exchanged.end.is_over() => break "shunt ends, or changes its mode",
            }
            match reader.read(&self.inspector, &mut exchanged.records).await {
                Ok(Some(batch)) => drop(batches.send(Arc::new(batch))),
                Ok(None) => {}
                Err(_) => break "shunt does not answer",
            }
            if batches.receiver_count() == 0 && self.stop(&batches, &exchanged).await {
                return;
            }
        };
        let mut running = self.running.lock().await;
        // If the loop is gone, so are its programs.
        let _ = exchanged.end.end().await;
        *running = None;
        drop(batches.send(Arc::new(Batch { ended: Some(ended), ..Batch::default() })));
    }

    /// Ends the trace, unless somebody has subscribed meanwhile.
    async fn stop(&self, batches: &broadcast::Sender<Arc<Batch>>, exchanged: &Exchanged) -> bool {
        // Whoever subscribes now waits, and begins anew.
        let mut running = self.running.lock().await;
        if batches.receiver_count() > 0 {
            return false;
        }
        if let Err(error) = exchanged.end.end().await {
            tracing::warn!(%error, "the programs that trace stay attached until the next sync or start");
        }
        *running = None;
        true
    }
}

/// Reads the records, and names what is in them.
#[derive(Default)]
struct Reader {
    names: Names,
    lost: u64,
}

impl Reader {
    /// Returns what was written since the last read, if there is anything.
    async fn read(
        &mut self,
        inspector: &Inspector,
        records: &mut TraceRecords,
    ) -> Result<Option<Batch>, NoAnswer> {
        let events = records.events(MOST_EVENTS);
        let packets: Vec<Packet> = records.packets(MOST_PACKETS).iter().filter_map(Packet::new).collect();
        let lost = records.lost().unwrap_or(self.lost);
        let newly_lost = lost.saturating_sub(mem::replace(&mut self.lost, lost));
        if events.is_empty() && packets.is_empty() && newly_lost == 0 {
            return Ok(None);
        }
        let Ok(monotonic) = clock::monotonic() else { return Ok(None) };
        let offset = ClockOffset::new(Timestamp::now(), clock::nanos(monotonic));
        self.names.find_places(events.iter().filter_map(programs::netns)).await;
        let places = events.iter().filter_map(programs::netns).filter_map(|it| self.names.address_of(it));
        let ends = events.iter().flat_map(programs::ends).map(|end| end.ip());
        let addresses: Vec<_> = places.chain(ends).collect();
        let vips = events.iter().filter_map(programs::vip).chain(packets.iter().flat_map(Packet::vips));
        self.names.learn(inspector, vips.collect::<Vec<_>>(), addresses).await?;
        let names = &mut self.names;
        let events = events.iter().filter_map(|event| programs::event(event, names, offset)).collect();
        let packets = packets.iter().map(|packet| packet.line(names, offset)).collect();
        Ok(Some(Batch { events, packets, lost: newly_lost, ended: None }))
    }
}

/// What one subscriber sees.
pub struct Subscription {
    /// `None` in modes without programs.
    programs: Option<broadcast::Receiver<Arc<Batch>>>,
    /// `None` if netfilter translates nothing.
    netfilter: Option<NetfilterTrace>,
    filter: TraceFilter,
}

impl Subscription {
    /// Waits for the next lines that the filter lets through.
    pub(super) async fn next(&mut self) -> Vec<TraceRecord> {
        loop {
            let records = tokio::select! {
                batch = from_programs(&mut self.programs) => match batch {
                    Ok(batch) => self.records(&batch),
                    // A subscriber that reads too slowly loses whole batches.
                    Err(RecvError::Lagged(batches)) => vec![TraceRecord::TraceLost { records: batches }],
                    Err(RecvError::Closed) => ended("shunt ended the trace"),
                },
                traced = from_netfilter(&mut self.netfilter) => match traced {
                    Ok(Traced { events, lost }) => {
                        let lost = (lost > 0).then_some(TraceRecord::TraceLost { records: lost });
                        self.events(&events).into_iter().chain(lost).collect()
                    }
                    Err(error) => ended(&with_causes(&error)),
                },
            };
            if !records.is_empty() {
                return records;
            }
        }
    }

    fn records(&self, batch: &Batch) -> Vec<TraceRecord> {
        let packets = batch.packets.iter().filter(|(packet, ends)| self.filter.matches_packet(packet, ends));
        let mut records = self.events(&batch.events);
        records.extend(packets.map(|(packet, _)| TraceRecord::TracePacket(packet.clone())));
        if batch.lost > 0 {
            records.push(TraceRecord::TraceLost { records: batch.lost });
        }
        records.extend(batch.ended.into_iter().flat_map(ended));
        records
    }

    fn events(&self, events: &[TracedEvent]) -> Vec<TraceRecord> {
        let wanted = events.iter().filter(|event| self.filter.matches(event));
        wanted.cloned().map(TraceRecord::TraceEvent).collect()
    }
}

fn ended(reason: &str) -> Vec<TraceRecord> {
    vec![TraceRecord::TraceEnded { reason: reason.to_owned() }]
}

/// Never returns without programs.
async fn from_programs(
    programs: &mut Option<broadcast::Receiver<Arc<Batch>>>,
) -> Result<Arc<Batch>, RecvError> {
    match programs {
        Some(programs) => programs.recv().await,
        None => pending().await,
    }
}

/// Never returns if netfilter is not traced.
async fn from_netfilter(netfilter: &mut Option<NetfilterTrace>) -> Result<Traced, KernelError> {
    match netfilter {
        Some(netfilter) => netfilter.next().await,
        None => pending().await,
    }
}
