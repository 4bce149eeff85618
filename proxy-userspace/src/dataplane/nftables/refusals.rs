//! Decides when a table is deleted and written again: when the kernel refuses the difference to it
//! time and again.
//!
//! A plan starts from what was listed, which is not all there is: of rules only the chains are
//! known, and of maps of others only the names. What is missing can be in the way, and then every
//! plan fails in the same way. Deleting the table needs no such knowledge: the kernel does not ask
//! which of its objects use each other. This also completes a takeover from kube-proxy on kernels
//! without c1592a89942e, where chains cannot be deleted together with the rules that lead to them
//! by anonymous maps.

use crate::{kernel::KernelError, model::IpFamily};

/// The refused transactions of each family.
#[derive(Debug, Default)]
pub(super) struct Refusals {
    in_a_row: [u32; 2],
    /// The next plan starts from tables that have just been read.
    is_fresh: bool,
}

impl Refusals {
    /// Records that the tables were read.
    pub(super) const fn read(&mut self) {
        self.is_fresh = true;
    }

    /// Records whether the kernel accepted the changes of a family's table. After a refusal only
    /// plans from a fresh reading count: others fail because the mirror is wrong.
    pub(super) fn applied<'a>(
        &mut self,
        families: impl IntoIterator<Item = (IpFamily, Option<&'a KernelError>)>,
    ) {
        let is_fresh = std::mem::take(&mut self.is_fresh);
        for (family, error) in families {
            let count = &mut self.in_a_row[family as usize];
            match error {
                None if is_fresh => *count = 0,
                Some(error) if is_conflict(error) && (is_fresh || *count == 0) => *count += 1,
                _ => {}
            }
        }
    }

    /// Returns true if the table has to be written from nothing. If the kernel refuses that too,
    /// the next attempts are differences again, which cost less and keep the clients of affinity.
    pub(super) const fn needs_rebuild(&self, family: IpFamily) -> bool {
        let count = self.in_a_row[family as usize];
        count > 1 && count.is_power_of_two()
    }
}

/// Returns true for the error of a change that contradicts what the table holds. Against others,
/// such as a lack of memory, a rebuild would not help: it needs more.
fn is_conflict(error: &KernelError) -> bool {
    const CONFLICTS: [i32; 5] = [libc::EBUSY, libc::EEXIST, libc::ENOENT, libc::EINVAL, libc::EOPNOTSUPP];
    let KernelError::Call { source, .. } = error else { return false };
    source.raw_os_error().is_some_and(|number| CONFLICTS.contains(&number))
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    const V4: IpFamily = IpFamily::V4;

    /// Applies a plan, from a fresh reading or not, and returns whether the next one rebuilds.
    fn after(refusals: &mut Refusals, is_fresh: bool, is_accepted: bool) -> bool {
        after_error(refusals, is_fresh, (!is_accepted).then_some(libc::EBUSY))
    }

    fn after_error(refusals: &mut Refusals, is_fresh: bool, error: Option<i32>) -> bool {
        if is_fresh {
            refusals.read();
        }
        let error =
            error.map(|number| KernelError::call("apply", "a change")(io::Error::from_raw_os_error(number)));
        refusals.applied([(V4, error.as_ref())]);
        refusals.needs_rebuild(V4)
    }

    #[test]
    fn table_is_not_rebuilt_for_a_lack_of_memory() {
        let mut refusals = Refusals::default();
        for _ in 0..4 {
            assert!(!after_error(&mut refusals, true, Some(libc::ENOMEM)));
        }
    }

    #[test]
    fn table_is_rebuilt_if_a_plan_from_a_fresh_reading_is_refused_again() {
        let mut refusals = Refusals::default();
        assert!(!after(&mut refusals, true, true), "nothing is refused");
        assert!(!after(&mut refusals, false, false), "the mirror may be wrong");
        assert!(!after(&mut refusals, false, false), "the mirror may still be wrong");
        assert!(after(&mut refusals, true, false));
        assert!(!refusals.needs_rebuild(IpFamily::V6), "the other family is accepted");
        assert!(!after(&mut refusals, true, true), "the rebuild is accepted");
    }

    #[test]
    fn refused_rebuild_is_not_repeated_at_once() {
        let mut refusals = Refusals::default();
        let rebuilds: Vec<bool> = (0..9).map(|_| after(&mut refusals, true, false)).collect();
        assert_eq!(rebuilds, [false, true, false, true, false, false, false, true, false]);
    }

    #[test]
    fn changes_without_a_reading_do_not_end_a_row_of_refusals() {
        let mut refusals = Refusals::default();
        assert!(!after(&mut refusals, true, false));
        assert!(!after(&mut refusals, false, true), "there was nothing to change");
        assert!(after(&mut refusals, true, false));
    }
}
