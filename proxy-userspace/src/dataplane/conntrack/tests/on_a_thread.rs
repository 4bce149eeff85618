//! Looks that are made beside the work: they hold up nothing, and miss nothing.

use std::{
    sync::{
        Arc, Mutex,
        mpsc::{Receiver, Sender, channel},
    },
    thread,
    time::Duration,
};

use super::*;
use crate::dataplane::conntrack::thread::LookThread;

/// A table in which every look waits until it is let go on.
#[derive(Debug)]
struct Slow {
    table: Table,
    begun: Sender<()>,
    go_on: Mutex<Receiver<()>>,
}

impl UdpTable for Slow {
    fn delete(
        &mut self,
        filter: UdpFilter,
        is_stale: &mut dyn FnMut(&UdpFlow) -> bool,
    ) -> Result<DeletionCounts, KernelError> {
        let _begun = self.begun.send(());
        let _ended = self.go_on.lock().unwrap().recv();
        self.table.delete(filter, is_stale)
    }
}

fn slow() -> (Table, Receiver<()>, Sender<()>, LookThread) {
    let table = Table::default();
    let (begun, begins) = channel();
    let (go, go_on) = channel();
    let looks = Looks::new(Slow { table: table.clone(), begun, go_on: Mutex::new(go_on) }, &[]);
    (table, begins, go, LookThread::new(looks))
}

/// What has come of looks, waited for with patience.
fn ended(thread: &mut LookThread) -> Result<Vec<StaleUdpDeletion>, KernelError> {
    for _ in 0..2000 {
        let ended = thread.delete_stale(&Snapshot::default(), &Dirty::default());
        if !matches!(&ended, Ok(none) if none.is_empty()) {
            return ended;
        }
        thread::sleep(Duration::from_millis(5));
    }
    panic!("no look ends");
}

#[test]
fn changes_during_a_look_wait_for_nothing_and_are_looked_for_after_it() {
    let (table, begins, go, mut thread) = slow();
    let mut snapshot = Snapshot::default();
    snapshot.ports.insert(udp("dns"), Arc::new(service(&[OLD])));
    assert_eq!(thread.delete_stale(&snapshot, &Dirty::everything()).unwrap(), []);
    begins.recv().unwrap();
    snapshot.ports.insert(udp("dns"), Arc::new(service(&[NEW])));
    assert_eq!(thread.delete_stale(&snapshot, &dirty("dns")).unwrap(), []);
    snapshot.ports.remove(&udp("dns"));
    assert_eq!(thread.delete_stale(&snapshot, &dirty("dns")).unwrap(), []);
    table.0.lock().unwrap().flows = vec![to_vip(OLD)];
    go.send(()).unwrap();
    assert_eq!(ended(&mut thread).unwrap().len(), 1);
    assert_eq!(table.0.lock().unwrap().flows, [to_vip(OLD)], "it served then");
    go.send(()).unwrap();
    assert_eq!(ended(&mut thread).unwrap()[0].flows.deleted, 1);
    assert_eq!(table.0.lock().unwrap().flows, []);
}

#[test]
fn a_look_that_failed_is_told_and_made_good_with_the_next_change() {
    let (table, _begins, go, mut thread) = slow();
    let mut snapshot = Snapshot::default();
    snapshot.ports.insert(udp("dns"), Arc::new(service(&[NEW])));
    *table.0.lock().unwrap() = Contents { flows: vec![to_vip(OLD)], is_broken: true, ..Contents::default() };
    thread.delete_stale(&snapshot, &Dirty::everything()).unwrap();
    go.send(()).unwrap();
    assert!(ended(&mut thread).is_err());
    table.0.lock().unwrap().is_broken = false;
    thread.delete_stale(&snapshot, &dirty("dns")).unwrap();
    go.send(()).unwrap();
    assert_eq!(ended(&mut thread).unwrap()[0].flows.deleted, 1);
}
