//! Divides work on many objects among two threads.

use std::{panic, thread};

/// With fewer objects, the start of a thread takes longer than the work.
const MANY: usize = 1_000;

/// Applies a function to a slice or to its two halves, and returns the results in their order. One
/// half is the work of another thread. More threads would wait for each other when they allocate
/// memory: the allocator has few arenas (`kernel/process_memory.rs`).
pub(crate) fn in_parts<T: Sync, R: Send>(items: &[T], work: impl Fn(&[T]) -> R + Sync) -> Vec<R> {
    if items.len() < MANY {
        return vec![work(items)];
    }
    let (first, second) = items.split_at(items.len() / 2);
    thread::scope(|scope| {
        let other = thread::Builder::new().name("shunt-half".into()).spawn_scoped(scope, || work(second));
        let first = work(first);
        let second = match other {
            Ok(other) => other.join().unwrap_or_else(|panic| panic::resume_unwind(panic)),
            // The process may start no more threads.
            Err(_) => work(second),
        };
        vec![first, second]
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_both_halves_are_in_order() {
        for count in [0, 1, MANY - 1, MANY, 2 * MANY + 1] {
            let items: Vec<usize> = (0..count).collect();
            let parts = in_parts(&items, <[usize]>::to_vec);
            assert_eq!(parts.concat(), items);
            assert_eq!(parts.len(), if count < MANY { 1 } else { 2 });
        }
    }
}
