//! Lets others read the state of the loop: what `shunt get` and `shunt explain` show.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::{
    sync::{mpsc, oneshot},
    time::timeout,
};

use super::{left_out_ports::LeftOutPorts, report::now};
use crate::{
    dataplane::{
        BackstopStatus, Held, HeldReader, LeftOutReason, MapFill, Mode, Renderer, ebpf::TracingPrograms,
    },
    metrics::SyncExtent,
    model::{Dirty, IpFamily, Model, ServicePortKey, UnixNanos},
};

/// How many readers may wait. Each runs between two syncs.
const MAX_WAITING: usize = 16;
/// How long a reader waits. A full sync of a netfilter mode takes seconds.
const PATIENCE: Duration = Duration::from_secs(20);

/// What a reader sees. Nothing changes while it reads, and no sync runs, so it must be quick.
pub struct Inspected<'a> {
    /// The objects, and what was resolved from them.
    pub model: &'a Model,
    /// The mode that runs. `None` only in tests that set none.
    pub mode: Option<Mode>,
    /// The backstop of the ebpf mode.
    pub backstop: Option<BackstopStatus>,
    pub(super) left_out: &'a LeftOutPorts,
    pub(super) programmed: &'a ProgrammedTimes,
    pub(super) renderer: &'a dyn Renderer,
}

impl Inspected<'_> {
    /// Returns the service ports that are left out, each with reason and error.
    pub fn left_out(&self) -> &BTreeMap<ServicePortKey, (LeftOutReason, String)> {
        self.left_out.ports()
    }

    /// Returns when a service port was last programmed. `None` if it waits for that.
    pub fn programmed(&self, key: &ServicePortKey) -> Option<UnixNanos> {
        self.programmed.of(key)
    }

    /// Returns true if the last attempts to program this family failed. What the kernel has of it
    /// is not known.
    pub fn is_failing(&self, family: IpFamily) -> bool {
        self.programmed.failing[family as usize]
    }

    /// Returns how full maps are. The entries of maps that programs write were counted some time
    /// ago.
    pub fn map_fill(&self) -> Vec<MapFill> {
        self.renderer.map_fill()
    }

    /// Returns the time, on the clock of [`Self::programmed`].
    pub fn now(&self) -> UnixNanos {
        now()
    }

    /// Returns what reads the kernel to compare it. `None` if it is not known what the kernel
    /// should hold, as before the first sync.
    pub fn held_reader(&self) -> Option<HeldReader> {
        self.programmed.first?;
        self.renderer.held_reader()
    }

    /// Returns how the kernel differs from what was written for a service port; with `None`, for
    /// all. `None` if that is not known.
    pub fn differences(&self, held: &Held, of: Option<&ServicePortKey>) -> Option<Vec<String>> {
        self.renderer.differences(held, self.model.snapshot(), of)
    }
}

/// Reads the state of the loop.
type Inspection = Box<dyn FnOnce(&Inspected<'_>) + Send>;

/// What others ask of the loop.
pub enum Request {
    /// Reads its state.
    Read(Inspection),
    /// Exchanges programs ([`Renderer::trace`](crate::dataplane::Renderer::trace)), and answers
    /// whether the exchange was made.
    Trace(Option<TracingPrograms>, oneshot::Sender<bool>),
}

/// The loop did not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoAnswer {
    /// The loop is not there: shunt starts, or changes its mode.
    #[error("shunt starts, or changes its mode: try again")]
    NotRunning,
    /// The loop does not know the Services: it has not read all objects since its start. The kernel
    /// may still serve them, by what an earlier shunt left.
    #[error("not known: shunt starts, and has not read all Services yet: try again")]
    NotSynced,
    /// The loop is busy.
    #[error("shunt programs the kernel for longer than {} s: try again", PATIENCE.as_secs())]
    Busy,
}

/// Asks the loop that runs. Clones ask the same one.
#[derive(Clone, Debug, Default)]
pub struct Inspector {
    running: Arc<Mutex<Option<mpsc::Sender<Request>>>>,
}

impl Inspector {
    /// Returns what the next loop receives. Readers of the loop before get no answer.
    pub fn open(&self) -> mpsc::Receiver<Request> {
        let (to_loop, requests) = mpsc::channel(MAX_WAITING);
        *self.running.lock().unwrap_or_else(PoisonError::into_inner) = Some(to_loop);
        requests
    }

    fn running(&self) -> Result<mpsc::Sender<Request>, NoAnswer> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner).clone().ok_or(NoAnswer::NotRunning)
    }

    /// Runs a reader between two syncs, and returns what it returns. Before the first sync no
    /// reader runs, because everything that it could say of Services would be wrong.
    pub async fn read<T: Send + 'static>(
        &self,
        reader: impl FnOnce(&Inspected<'_>) -> T + Send + 'static,
    ) -> Result<T, NoAnswer> {
        let (reply, answer) = oneshot::channel();
        let read = move |inspected: &Inspected<'_>| inspected.model.is_resolved().then(|| reader(inspected));
        let inspection: Inspection = Box::new(move |inspected| drop(reply.send(read(inspected))));
        ask(&self.running()?, Request::Read(inspection), answer).await?.ok_or(NoAnswer::NotSynced)
    }

    /// Attaches programs that trace. Returns what ends that, or `None` if the mode or its state
    /// does not allow it.
    pub async fn trace(&self, programs: TracingPrograms) -> Result<Option<TraceEnd>, NoAnswer> {
        let to_loop = self.running()?;
        let (reply, answer) = oneshot::channel();
        let is_done = ask(&to_loop, Request::Trace(Some(programs), reply), answer).await?;
        Ok(is_done.then_some(TraceEnd(to_loop)))
    }
}

#[cfg(test)]
impl Inspector {
    /// Returns what ends a trace, without one.
    pub(super) fn trace_end(&self) -> Result<TraceEnd, NoAnswer> {
        self.running().map(TraceEnd)
    }
}

async fn ask<T>(
    to_loop: &mpsc::Sender<Request>,
    request: Request,
    answer: oneshot::Receiver<T>,
) -> Result<T, NoAnswer> {
    let asked = async {
        to_loop.send(request).await.map_err(|_| NoAnswer::NotRunning)?;
        answer.await.map_err(|_| NoAnswer::NotRunning)
    };
    timeout(PATIENCE, asked).await.unwrap_or(Err(NoAnswer::Busy))
}

/// Ends a trace.
#[derive(Debug)]
pub struct TraceEnd(mpsc::Sender<Request>);

impl TraceEnd {
    /// Waits until the loop that traces is gone, with its programs: shunt ends, or changes its
    /// mode.
    pub async fn is_over(&self) {
        self.0.closed().await;
    }

    /// Attaches the programs that do not trace.
    pub async fn end(&self) -> Result<(), NoAnswer> {
        let (reply, answer) = oneshot::channel();
        ask(&self.0, Request::Trace(None, reply), answer).await.map(drop)
    }
}

/// When service ports were last programmed, and which ones wait for that.
#[derive(Debug, Default)]
pub(super) struct ProgrammedTimes {
    /// The first full sync, which programmed everything but what waits.
    first: Option<UnixNanos>,
    /// Changes since.
    changed: BTreeMap<ServicePortKey, UnixNanos>,
    /// Service ports whose last change is not in the kernel.
    waiting: BTreeSet<ServicePortKey>,
    /// Families that failed since the last full sync, by [`IpFamily::ALL`].
    failing: [bool; 2],
}

/// A sync that ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct EndedSync<'a> {
    pub(super) extent: SyncExtent,
    pub(super) dirty: &'a Dirty,
    /// The families that failed. Nothing is certain of them.
    pub(super) failed: &'a [IpFamily],
}

impl ProgrammedTimes {
    /// Takes in a sync that ended now. `ports` are the service ports that should be in the kernel.
    pub(super) fn update<P>(
        &mut self,
        now: UnixNanos,
        ended: EndedSync<'_>,
        ports: &BTreeMap<ServicePortKey, P>,
    ) {
        if ended.extent == SyncExtent::Full {
            self.failing = [false; 2];
        }
        for family in ended.failed {
            self.failing[*family as usize] = true;
        }
        if self.failing == [true; 2] && self.first.is_none() {
            return;
        }
        let is_first = self.first.is_none();
        self.first.get_or_insert(now);
        // A partial sync does not write what an earlier one could not write.
        if ended.extent == SyncExtent::Full {
            for key in std::mem::take(&mut self.waiting) {
                self.note(now, &key, ports.contains_key(&key), is_first);
            }
        }
        for key in &ended.dirty.ports {
            self.note(now, key, ports.contains_key(key), is_first);
        }
        if ended.dirty.all || is_first {
            let failing = self.failing;
            self.waiting.extend(ports.keys().filter(|key| failing[key.family as usize]).cloned());
        }
    }

    fn note(&mut self, now: UnixNanos, key: &ServicePortKey, is_served: bool, is_first: bool) {
        self.waiting.remove(key);
        if !is_served {
            self.changed.remove(key);
        } else if self.failing[key.family as usize] {
            self.waiting.insert(key.clone());
        } else if !is_first {
            self.changed.insert(key.clone(), now);
        }
    }

    fn of(&self, key: &ServicePortKey) -> Option<UnixNanos> {
        if self.waiting.contains(key) {
            return None;
        }
        self.changed.get(key).copied().or(self.first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::testing::key;

    #[tokio::test]
    async fn nobody_answers_while_no_loop_runs() {
        let inspector = Inspector::default();
        assert_eq!(inspector.read(|_| ()).await, Err(NoAnswer::NotRunning));
        drop(inspector.open());
        assert_eq!(inspector.read(|_| ()).await, Err(NoAnswer::NotRunning));
    }

    #[tokio::test(start_paused = true)]
    async fn a_busy_loop_is_not_waited_for_without_end() {
        let inspector = Inspector::default();
        let _never_read = inspector.open();
        assert_eq!(inspector.read(|_| ()).await, Err(NoAnswer::Busy));
    }

    /// Takes in a sync of these service ports, which all are served.
    fn sync(
        times: &mut ProgrammedTimes,
        at: u64,
        extent: SyncExtent,
        dirty: &[&ServicePortKey],
        failed: &[IpFamily],
    ) {
        let dirty = Dirty { ports: dirty.iter().map(|key| (*key).clone()).collect(), ..Dirty::default() };
        let ports = dirty.ports.iter().chain(&times.waiting).map(|key| (key.clone(), true)).collect();
        times.update(UnixNanos(at), EndedSync { extent, dirty: &dirty, failed }, &ports);
    }

    #[test]
    fn the_time_of_a_service_port_is_that_of_its_last_change() {
        let (mut times, [a, b]) = (ProgrammedTimes::default(), ["ns/a", "ns/b"].map(|name| key(name, "")));
        sync(&mut times, 1, SyncExtent::Full, &[&a, &b], &[]);
        sync(&mut times, 2, SyncExtent::Partial, &[&b], &[]);
        assert_eq!([times.of(&a), times.of(&b)], [Some(UnixNanos(1)), Some(UnixNanos(2))]);
        let dirty = Dirty { ports: [b].into(), ..Dirty::default() };
        let ended = EndedSync { extent: SyncExtent::Partial, dirty: &dirty, failed: &[] };
        times.update(UnixNanos(3), ended, &BTreeMap::<_, bool>::new());
        assert!(times.changed.is_empty(), "a service port that is gone takes no memory");
    }

    #[test]
    fn a_change_that_failed_is_programmed_when_a_full_sync_succeeds() {
        let (mut times, [a, b]) = (ProgrammedTimes::default(), ["ns/a", "ns/b"].map(|name| key(name, "")));
        sync(&mut times, 1, SyncExtent::Full, &[&a], &[]);
        sync(&mut times, 2, SyncExtent::Partial, &[&b], &IpFamily::ALL);
        assert_eq!([times.of(&a), times.of(&b)], [Some(UnixNanos(1)), None]);
        sync(&mut times, 3, SyncExtent::Full, &[], &[]);
        assert_eq!([times.of(&a), times.of(&b)], [Some(UnixNanos(1)), Some(UnixNanos(3))]);
    }

    #[test]
    fn changes_of_a_failing_family_wait_while_the_other_is_programmed() {
        let (mut times, [four, six]) =
            (ProgrammedTimes::default(), ["ns/four", "ns/six"].map(|name| key(name, "")));
        let six = ServicePortKey { family: IpFamily::V6, ..six };
        sync(&mut times, 1, SyncExtent::Full, &[], &[IpFamily::V6]);
        sync(&mut times, 2, SyncExtent::Partial, &[&four, &six], &[]);
        assert_eq!([times.of(&four), times.of(&six)], [Some(UnixNanos(2)), None]);
        sync(&mut times, 3, SyncExtent::Full, &[], &[IpFamily::V6]);
        assert_eq!(times.of(&six), None, "the retry failed");
        sync(&mut times, 4, SyncExtent::Full, &[], &[]);
        assert_eq!([times.of(&four), times.of(&six)], [Some(UnixNanos(2)), Some(UnixNanos(4))]);
    }
}
