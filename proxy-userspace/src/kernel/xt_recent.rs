//! Reads the lists of addresses of the iptables match `recent`. The formats are those of
//! `recent_seq_show` in `net/netfilter/xt_recent.c`, and of `kernel/time/timer_list.c`.

use std::{fs, io, net::IpAddr, path::Path, time::Duration};

use super::KernelError;

/// The lists of the calling thread's network namespace.
const LISTS: [&str; 2] = ["/proc/thread-self/net/xt_recent", "/proc/thread-self/net/ipt_recent"];
const TIMERS: &str = "/proc/timer_list";

/// An address of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecentAddress {
    /// The address.
    pub address: IpAddr,
    /// When a rule saw it last, in ticks of the kernel's timer since its start.
    pub last_seen: u64,
}

/// Returns the addresses of a list. A list without a rule that uses it does not exist, and has
/// none.
pub fn list(name: &str) -> Result<Vec<RecentAddress>, KernelError> {
    let Some(directory) = LISTS.into_iter().find(|path| Path::new(path).is_dir()) else {
        let missing = io::Error::new(io::ErrorKind::NotFound, "this kernel shows no lists of xt_recent");
        return Err(KernelError::path("read", LISTS[0])(missing));
    };
    let path = Path::new(directory).join(name);
    match fs::read_to_string(&path) {
        Ok(text) => Ok(text.lines().filter_map(read_line).collect()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(KernelError::path("read", path)(error)),
    }
}

/// Reads `src=10.0.0.1 ttl: 64 last_seen: 4301951184 oldest_pkt: 1 4301951184`.
pub(super) fn read_line(line: &str) -> Option<RecentAddress> {
    let address = line.strip_prefix("src=")?.split(' ').next()?.parse().ok()?;
    let last_seen = line.split_once("last_seen: ")?.1.split(' ').next()?.parse().ok()?;
    Some(RecentAddress { address, last_seen })
}

/// The time of the kernel's timer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimerTicks {
    /// The ticks since the start.
    now: u64,
    /// The ticks of a second (`CONFIG_HZ`).
    per_second: u64,
}

impl TimerTicks {
    /// Reads the time now. Needs root. Returns `None` if the kernel does not tell it.
    pub fn now() -> Option<Self> {
        Self::read(&fs::read_to_string(TIMERS).ok()?)
    }

    /// The kernel does not tell the number of ticks of a second. But it starts to count five
    /// minutes before 2^32 (`INITIAL_JIFFIES`), and tells the time since then.
    pub(super) fn read(text: &str) -> Option<Self> {
        const AT_OVERFLOW: u64 = 1 << 32;
        const MAX_ERROR_SECONDS: u64 = 60;
        let number = |prefix: &str| -> Option<u64> {
            let line = text.lines().find_map(|line| line.strip_prefix(prefix))?;
            line.split_ascii_whitespace().next()?.parse().ok()
        };
        let (now, nanos) = (number("jiffies: ")?, number("now at ")?);
        let error_of = |per_second: u64| {
            let start = AT_OVERFLOW - 300 * per_second;
            let seconds = now.checked_sub(start).map_or(u64::MAX, |ticks| ticks / per_second);
            seconds.abs_diff(nanos / 1_000_000_000)
        };
        let per_second = [100, 250, 300, 1000].into_iter().min_by_key(|rate| error_of(*rate))?;
        (error_of(per_second) <= MAX_ERROR_SECONDS).then_some(Self { now, per_second })
    }

    /// Returns how long ago a time was.
    pub fn since(self, ticks: u64) -> Duration {
        Duration::from_millis(self.now.saturating_sub(ticks).saturating_mul(1000) / self.per_second)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_the_time_of_its_last_packet() {
        for (line, expected) in [
            (
                "src=10.0.0.1 ttl: 64 last_seen: 4301951184 oldest_pkt: 2 4301951000, 4301951184",
                Some(("10.0.0.1", 4_301_951_184)),
            ),
            (
                "src=fd44:0001:0000:0000:0000:0000:0000:0011 ttl: 64 last_seen: 7 oldest_pkt: 1 7",
                Some(("fd44:1::11", 7)),
            ),
            ("src=", None),
            ("", None),
        ] {
            let expected = expected.map(|(address, last_seen)| RecentAddress {
                address: address.parse().expect("an address"),
                last_seen,
            });
            assert_eq!(read_line(line), expected, "{line}");
        }
    }

    #[test]
    fn the_ticks_of_a_second_follow_from_the_time_since_the_start() {
        for per_second in [100, 250, 300, 1000] {
            let now = (1 << 32) - 300 * per_second + 28_235 * per_second;
            let text = format!("Timer List Version: v0.10\nnow at 28235800000000 nsecs\n\njiffies: {now}\n");
            let ticks = TimerTicks::read(&text).expect("both times");
            assert_eq!(ticks, TimerTicks { now, per_second });
            assert_eq!(ticks.since(now - 3 * per_second), Duration::from_secs(3));
        }
        assert_eq!(TimerTicks::read("now at 1 nsecs\njiffies: 5\n"), None);
    }

    /// As root, like every test that reads such files.
    #[test]
    fn this_kernel_tells_its_ticks() {
        let ticks = TimerTicks::now().expect("/proc/timer_list");
        assert!(ticks.since(ticks.now - ticks.per_second) == Duration::from_secs(1));
    }
}
