//! Limits how often a program is put back before that of another owner. Two programs that both
//! require the first position would move each other forever.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use super::LinkHook;
use crate::dataplane::DisplacedLink;

/// A program is put back this many times within [`PERIOD`]. Full syncs find it displaced. So with
/// the default `syncPeriod` of 30 s, the limit is reached within two minutes.
const ATTEMPTS: usize = 3;
const PERIOD: Duration = Duration::from_mins(10);

/// The warning for a program that stays behind another.
const DISPLACED: &str = "cannot keep shunt's program first on this link: another program was put before it again and again. \
                         shunt tries again in 10 minutes at the latest. Until then, it does not translate packets that \
                         the other program keeps to itself. Attach that program behind others, or exclude the link with \
                         --exclude-interfaces";

/// The hooks on which another program was first.
#[derive(Debug, Default)]
pub(super) struct Order {
    hooks: BTreeMap<LinkHook, Contest>,
}

/// What happened on one hook.
#[derive(Debug, Default)]
struct Contest {
    /// The times at which our program was to be put back, in the last [`PERIOD`].
    put_back: VecDeque<Duration>,
    /// The link and the other program, if the limit is reached.
    displaced: Option<DisplacedLink>,
    is_reported: bool,
}

impl Contest {
    /// Forgets what is older than [`PERIOD`].
    fn forget_old(&mut self, now: Duration) {
        while self.put_back.front().is_some_and(|at| now.saturating_sub(*at) >= PERIOD) {
            self.put_back.pop_front();
        }
    }
}

impl Order {
    /// Records that our program is the first of a hook at a monotonic time.
    pub(super) fn is_first(&mut self, at: LinkHook, now: Duration) {
        let Some(contest) = self.hooks.get_mut(&at) else { return };
        contest.displaced = None;
        contest.forget_old(now);
        if contest.put_back.is_empty() {
            self.hooks.remove(&at);
        }
    }

    /// Records that another program is before ours on a hook. Returns true if ours is to be put
    /// back. Otherwise it stays where it is, which is logged once.
    ///
    /// `link` returns the name of the link.
    pub(super) fn is_behind(
        &mut self,
        at: LinkHook,
        now: Duration,
        other: &str,
        link: impl FnOnce() -> Arc<str>,
    ) -> bool {
        let contest = self.hooks.entry(at).or_default();
        contest.forget_old(now);
        if contest.put_back.len() < ATTEMPTS {
            contest.put_back.push_back(now);
            contest.displaced = None;
            return true;
        }
        let displaced = DisplacedLink { link: link(), by: other.into() };
        if !std::mem::replace(&mut contest.is_reported, true) {
            tracing::warn!(link = &*displaced.link, hook = ?at.hook, program = other, "{DISPLACED}");
        }
        contest.displaced = Some(displaced);
        false
    }

    /// Returns true if our program is the first of each hook, and was in the last [`PERIOD`].
    pub(super) fn is_empty(&self) -> bool {
        self.hooks.is_empty()
    }

    /// Forgets the hooks that are not observed any more.
    pub(super) fn retain(&mut self, is_observed: impl Fn(LinkHook) -> bool) {
        self.hooks.retain(|at, _| is_observed(*at));
    }

    /// Returns the links on which our program stays behind another. One value for each link.
    pub(super) fn displaced(&self) -> Vec<DisplacedLink> {
        let mut displaced: Vec<_> =
            self.hooks.values().filter_map(|contest| contest.displaced.clone()).collect();
        displaced.sort_unstable();
        displaced.dedup_by(|a, b| a.link == b.link);
        displaced
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::bpf::tc::Hook;

    const AT: LinkHook = LinkHook { hook: Hook::Ingress, index: 7 };

    fn is_behind(order: &mut Order, seconds: u64) -> bool {
        order.is_behind(AT, Duration::from_secs(seconds), "other", || "eth0".into())
    }

    #[test]
    fn program_is_put_back_three_times_in_ten_minutes() {
        let mut order = Order::default();
        assert_eq!([0, 30, 60, 90, 599, 600, 601].map(|at| is_behind(&mut order, at)), {
            [true, true, true, false, false, true, false]
        });
        assert_eq!(order.displaced(), [DisplacedLink { link: "eth0".into(), by: "other".into() }]);
        order.is_first(AT, Duration::from_secs(640));
        assert_eq!(order.displaced(), []);
    }

    #[test]
    fn a_lasting_contest_is_reported_once_and_forgotten_after_peace() {
        let mut order = Order::default();
        for at in (0..3000).step_by(30) {
            is_behind(&mut order, at);
        }
        assert!(order.hooks[&AT].is_reported);
        order.is_first(AT, Duration::from_mins(50));
        assert!(order.hooks[&AT].is_reported, "the other may come back");
        order.is_first(AT, Duration::from_mins(70));
        assert!(order.hooks.is_empty());
    }

    #[test]
    fn hooks_of_removed_links_are_forgotten() {
        let mut order = Order::default();
        is_behind(&mut order, 0);
        order.retain(|at| at != AT);
        assert!(order.hooks.is_empty());
    }
}
