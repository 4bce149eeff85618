//! Tests that the thread does not delay the caller and misses no change.

use std::{
    sync::{
        Arc, Mutex,
        mpsc::{Receiver, Sender, channel},
    },
    thread,
    time::Duration,
};

use super::*;
use crate::dataplane::conntrack::thread::CleanerThread;

/// A table in which every walk waits for permission to continue.
#[derive(Debug)]
struct Slow {
    table: Table,
    started: Sender<()>,
    permission: Mutex<Receiver<()>>,
}

impl UdpTable for Slow {
    fn delete(
        &mut self,
        filter: UdpFilter,
        is_stale: &mut dyn FnMut(&UdpFlow) -> bool,
    ) -> Result<DeletionCounts, KernelError> {
        let _sent = self.started.send(());
        let _received = self.permission.lock().unwrap().recv();
        self.table.delete(filter, is_stale)
    }

    fn delete_tcp_attempts(
        &mut self,
        family: IpFamily,
        is_stale: &mut dyn FnMut(SocketAddr) -> bool,
    ) -> Result<DeletionCounts, KernelError> {
        self.table.delete_tcp_attempts(family, is_stale)
    }
}

fn slow() -> (Table, Receiver<()>, Sender<()>, CleanerThread) {
    let table = Table::default();
    let (started, starts) = channel();
    let (permit, permission) = channel();
    let slow = Slow { table: table.clone(), started, permission: Mutex::new(permission) };
    let cleaner = Cleaner::new(slow, &[]);
    (table, starts, permit, CleanerThread::new(cleaner))
}

/// Waits for the next result.
fn next_result(thread: &mut CleanerThread) -> Result<Vec<StaleUdpDeletion>, KernelError> {
    for _ in 0..2000 {
        let result = thread.delete_stale(&Snapshot::default(), &Dirty::default());
        if !matches!(&result, Ok(none) if none.is_empty()) {
            return result;
        }
        thread::sleep(Duration::from_millis(5));
    }
    panic!("no walk ends");
}

#[test]
fn changes_during_a_walk_are_checked_afterwards() {
    let (table, starts, permit, mut thread) = slow();
    let mut snapshot = Snapshot::default();
    snapshot.ports.insert(udp("dns"), Arc::new(service(&[OLD])));
    assert_eq!(thread.delete_stale(&snapshot, &Dirty::everything()).unwrap(), []);
    starts.recv().unwrap();
    snapshot.ports.insert(udp("dns"), Arc::new(service(&[NEW])));
    assert_eq!(thread.delete_stale(&snapshot, &dirty("dns")).unwrap(), []);
    snapshot.ports.remove(&udp("dns"));
    assert_eq!(thread.delete_stale(&snapshot, &dirty("dns")).unwrap(), []);
    table.0.lock().unwrap().flows = vec![to_vip(OLD)];
    permit.send(()).unwrap();
    assert_eq!(next_result(&mut thread).unwrap().len(), 1);
    assert_eq!(table.0.lock().unwrap().flows, [to_vip(OLD)], "the first walk sees the old endpoint");
    permit.send(()).unwrap();
    assert_eq!(next_result(&mut thread).unwrap()[0].flows.deleted, 1);
    assert_eq!(table.0.lock().unwrap().flows, []);
}

#[test]
fn thread_checks_attempts_after_rules_were_missing() {
    let (table, _starts, permit, mut thread) = slow();
    let mut snapshot = Snapshot::default();
    snapshot.ports.insert(key("default/web", ""), Arc::new(service(&[OLD])));
    snapshot.ports.insert(udp("dns"), Arc::new(service(&[OLD])));
    table.0.lock().unwrap().attempts = vec![VIP.parse().unwrap()];
    permit.send(()).unwrap();
    thread.recheck = Some(ServedTcp::new(&snapshot));
    thread.delete_stale(&snapshot, &Dirty::everything()).unwrap();
    for _ in 0..2000 {
        if table.0.lock().unwrap().attempts.is_empty() {
            return;
        }
        thread::sleep(Duration::from_millis(5));
    }
    panic!("the attempt stays");
}

#[test]
fn failed_walk_is_reported_and_repeated_with_the_next_change() {
    let (table, _starts, permit, mut thread) = slow();
    let mut snapshot = Snapshot::default();
    snapshot.ports.insert(udp("dns"), Arc::new(service(&[NEW])));
    *table.0.lock().unwrap() = Contents { flows: vec![to_vip(OLD)], is_broken: true, ..Contents::default() };
    thread.delete_stale(&snapshot, &Dirty::everything()).unwrap();
    permit.send(()).unwrap();
    assert!(next_result(&mut thread).is_err());
    table.0.lock().unwrap().is_broken = false;
    thread.delete_stale(&snapshot, &dirty("dns")).unwrap();
    permit.send(()).unwrap();
    assert_eq!(next_result(&mut thread).unwrap()[0].flows.deleted, 1);
}
