//! The thread that fills Maglev tables and writes their pages, so that no change of a Service waits
//! for it.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use aya::maps::{HashMap as BpfHashMap, MapData};
use proxy_common::{
    layout::{MaglevKey, MaglevPage},
    maglev::TableSize,
};

use super::{
    super::{maps, plan::digest::Digest},
    table::{Candidate, fill},
};
use crate::kernel::{
    KernelError,
    bpf::{Object, Reader, Writer},
    spawn,
};

const MAP: &str = "maglev";

/// The table of a list as it must be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct WantedTable {
    pub(super) size: TableSize,
    pub(super) candidates: Vec<Candidate>,
}

/// The tables of a service port by the number of the list.
pub(super) type ServiceTables = BTreeMap<u32, WantedTable>;

/// What the thread has to do.
#[derive(Debug, Default)]
struct Work {
    /// Tables of service ports that changed, by identifier. What is newer replaces what waits.
    changed: BTreeMap<u32, ServiceTables>,
    /// Service ports without tables. They come first, because they make room for others.
    removed: BTreeSet<u32>,
    /// The thread is at work.
    is_busy: bool,
    /// Compare all pages with what was written.
    compare: bool,
    /// No more work will come.
    is_over: bool,
}

impl Work {
    fn is_done(&self) -> bool {
        self.changed.is_empty() && self.removed.is_empty() && !self.compare
    }
}

/// Gives work to the thread.
#[derive(Debug, Default)]
struct Mailbox {
    work: Mutex<Work>,
    arrived: Condvar,
    /// The thread has nothing to do.
    done: Condvar,
    pages: AtomicUsize,
}

impl Mailbox {
    fn lock(&self) -> MutexGuard<'_, Work> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, add: impl FnOnce(&mut Work)) {
        add(&mut self.lock());
        self.arrived.notify_one();
    }

    /// Waits for work. Changes come first, one service port at a time.
    fn next(&self) -> Task {
        let mut work = self.lock();
        work.is_busy = false;
        if work.is_done() {
            self.done.notify_all();
        }
        let is_idle = |work: &mut Work| !work.is_over && work.is_done();
        let mut work = self.arrived.wait_while(work, is_idle).unwrap_or_else(PoisonError::into_inner);
        work.is_busy = true;
        if work.is_over {
            return Task::End;
        }
        if let Some(service) = work.removed.pop_first() {
            Task::Build(service, ServiceTables::new())
        } else if let Some((service, tables)) = work.changed.pop_first() {
            Task::Build(service, tables)
        } else {
            work.compare = false;
            Task::Compare
        }
    }
}

enum Task {
    Build(u32, ServiceTables),
    Compare,
    End,
}

/// The thread. It ends when this is dropped.
#[derive(Debug)]
pub(super) struct TableBuilder(Arc<Mailbox>);

impl TableBuilder {
    pub(super) fn start(object: &Object) -> Result<Self, KernelError> {
        let mailbox = Arc::new(Mailbox::default());
        let mut thread = Thread {
            mailbox: Arc::clone(&mailbox),
            pages: Pages {
                reader: object.reader(MAP)?,
                writer: object.writer(MAP)?,
                map: object.open_map(MAP)?,
            },
            tables: BTreeMap::new(),
        };
        spawn(MAP, move || thread.run())?;
        Ok(Self(mailbox))
    }

    /// Replaces the tables of a service port. None removes them.
    pub(super) fn set(&self, service: u32, tables: ServiceTables) {
        self.0.add(|work| {
            if tables.is_empty() {
                work.changed.remove(&service);
                work.removed.insert(service);
            } else {
                work.removed.remove(&service);
                work.changed.insert(service, tables);
            }
        });
    }

    /// Makes the thread read all pages. It writes those that differ, and removes those of no table.
    pub(super) fn compare(&self) {
        self.0.add(|work| work.compare = true);
    }

    /// Waits until the thread has done all work, but not longer than this.
    pub(super) fn wait(&self, limit: Duration) {
        let is_busy = |work: &mut Work| work.is_busy || !work.is_done();
        drop(self.0.done.wait_timeout_while(self.0.lock(), limit, is_busy));
    }

    /// Returns the number of pages that the thread has written.
    pub(super) fn pages(&self) -> usize {
        self.0.pages.load(Ordering::Relaxed)
    }
}

impl Drop for TableBuilder {
    fn drop(&mut self) {
        self.0.add(|work| work.is_over = true);
    }
}

/// Identifies a table: the service port and the list.
type TableId = (u32, u32);

/// A table that the thread has.
struct Table {
    wanted: WantedTable,
    /// The digest of its pages. `None` if they could not be written.
    digest: Option<Digest>,
}

impl Table {
    const fn written_pages(&self) -> usize {
        if self.digest.is_some() { self.wanted.size.pages() as usize } else { 0 }
    }
}

struct Thread {
    mailbox: Arc<Mailbox>,
    pages: Pages,
    tables: BTreeMap<TableId, Table>,
}

impl Thread {
    fn run(&mut self) {
        loop {
            let done = match self.mailbox.next() {
                Task::Build(service, tables) => self.build(service, tables),
                Task::Compare => self.compare(),
                Task::End => return,
            };
            if let Err(error) = done {
                tracing::warn!(%error, "cannot write a Maglev table; it is tried again later");
            }
        }
    }

    /// Writes the tables of a service port that changed, after it has removed those that have
    /// another size or are not wanted any more. If one fails, the others are written all the same.
    fn build(&mut self, service: u32, wanted: ServiceTables) -> Result<(), KernelError> {
        let held: Vec<TableId> =
            self.tables.range((service, 0)..=(service, u32::MAX)).map(|(id, _)| *id).collect();
        let mut result = Ok(());
        for id in held {
            let is_kept = |table: &Table| wanted.get(&id.1).is_some_and(|new| new.size == table.wanted.size);
            if !self.tables.get(&id).is_some_and(is_kept) {
                result = result.and(self.remove(id));
            }
        }
        for (list, wanted) in wanted {
            let id = (service, list);
            let is_right = |table: &Table| table.wanted == wanted && table.digest.is_some();
            if !self.tables.get(&id).is_some_and(is_right) {
                result = result.and(self.write(id, wanted));
            }
        }
        result
    }

    fn write(&mut self, id: TableId, wanted: WantedTable) -> Result<(), KernelError> {
        let pages = pages(id, &wanted);
        let result = self.pages.put(&pages);
        let mut digest = Digest::default();
        for page in &pages {
            digest.add(page);
        }
        self.record(id, Some(Table { wanted, digest: result.is_ok().then_some(digest) }));
        result
    }

    fn remove(&mut self, id: TableId) -> Result<(), KernelError> {
        let Some(table) = self.record(id, None) else { return Ok(()) };
        (0..table.wanted.size.pages())
            .try_for_each(|page| self.pages.remove(&key(id, table.wanted.size, page)))
    }

    /// Records a table, or that there is none any more, and the number of written pages. Returns
    /// the table that was there.
    fn record(&mut self, id: TableId, table: Option<Table>) -> Option<Table> {
        let added = table.as_ref().map_or(0, Table::written_pages);
        let before = match table {
            Some(table) => self.tables.insert(id, table),
            None => self.tables.remove(&id),
        };
        let removed = before.as_ref().map_or(0, Table::written_pages);
        self.mailbox.pages.fetch_add(added, Ordering::Relaxed);
        self.mailbox.pages.fetch_sub(removed, Ordering::Relaxed);
        before
    }

    fn compare(&mut self) -> Result<(), KernelError> {
        let mut held: HashMap<(TableId, u32), Digest> = HashMap::new();
        let mut unknown = Vec::new();
        let tables = &self.tables;
        self.pages.read(|key, page| {
            let id = (key.service, key.list);
            if tables.get(&id).is_some_and(|table| table.wanted.size.entries() == key.size) {
                held.entry((id, key.size)).or_default().add(&(key, page));
            } else {
                unknown.push(key);
            }
        })?;
        unknown.iter().try_for_each(|key| self.pages.remove(key))?;
        let differs = |(id, table): &(&TableId, &Table)| {
            table.digest.is_none() || held.get(&(**id, table.wanted.size.entries())) != table.digest.as_ref()
        };
        let differing: Vec<(TableId, WantedTable)> =
            self.tables.iter().filter(differs).map(|(id, table)| (*id, table.wanted.clone())).collect();
        differing.into_iter().try_for_each(|(id, wanted)| self.write(id, wanted))
    }
}

fn key((service, list): TableId, size: TableSize, page: u32) -> MaglevKey {
    MaglevKey { service, list, size: size.entries(), page }
}

/// Returns the pages of a table.
fn pages(id: TableId, wanted: &WantedTable) -> Vec<(MaglevKey, MaglevPage)> {
    let table = fill(&wanted.candidates, wanted.size);
    let page = |(number, slots): (u32, &[u16])| {
        let mut page = MaglevPage::EMPTY;
        page.slots.iter_mut().zip(slots).for_each(|(to, from)| *to = *from);
        (key(id, wanted.size, number), page)
    };
    (0..).zip(table.chunks(MaglevPage::SLOTS as usize)).map(page).collect()
}

/// The map.
struct Pages {
    reader: Reader<MaglevKey, MaglevPage>,
    writer: Writer<MaglevKey, MaglevPage>,
    map: BpfHashMap<MapData, MaglevKey, MaglevPage>,
}

impl Pages {
    fn read(&mut self, visit: impl FnMut(MaglevKey, MaglevPage)) -> Result<(), KernelError> {
        self.reader.read_all(visit).map_err(KernelError::call("read map", MAP))
    }

    fn put(&mut self, pages: &[(MaglevKey, MaglevPage)]) -> Result<(), KernelError> {
        let written = self.writer.put(pages.iter().copied());
        let rest = pages.get(written..).unwrap_or_default();
        rest.iter()
            .try_for_each(|(key, page)| self.map.insert(key, page, 0).map_err(maps::failed("write", MAP)))
    }

    fn remove(&mut self, key: &MaglevKey) -> Result<(), KernelError> {
        maps::removed(MAP, self.map.remove(key))
    }
}
