//! For how long a flow may take the direct path without a packet through the stack, where no rules
//! of others look at packets.

use std::time::Duration;

use crate::kernel::sysctl::Sysctl;

/// The longest time. A flow with four packets a second then sends one of 32 through the stack.
const LONGEST: Duration = Duration::from_secs(8);
/// Conntrack forgets a connection if it sees no packet of it for one of these times. No other
/// timeout concerns connections on the direct path.
const TIMEOUTS: [Sysctl; 5] = [
    Sysctl("netfilter/nf_conntrack_udp_timeout"),
    Sysctl("netfilter/nf_conntrack_udp_timeout_stream"),
    Sysctl("netfilter/nf_conntrack_tcp_timeout_established"),
    // Conntrack does not see all acknowledgements.
    Sysctl("netfilter/nf_conntrack_tcp_timeout_unacknowledged"),
    Sysctl("netfilter/nf_conntrack_tcp_timeout_max_retrans"),
];
/// A flow can send so many packets through the stack before a timeout is over.
const PACKETS: u32 = 3;

/// Returns the time, or zero if a timeout cannot be read. In that time, conntrack forgets no
/// connection.
pub(super) fn lease() -> Duration {
    let timeouts = TIMEOUTS.iter().filter_map(|timeout| timeout.read().unwrap_or(Some(0)));
    lease_with(timeouts.map(|seconds| Duration::from_secs(u64::try_from(seconds).unwrap_or(0))))
}

fn lease_with(timeouts: impl Iterator<Item = Duration>) -> Duration {
    timeouts.min().map_or(LONGEST, |shortest| LONGEST.min(shortest / PACKETS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lease_is_a_third_of_the_shortest_timeout_of_conntrack_but_at_most_eight_seconds() {
        let lease = |seconds: &[u64]| lease_with(seconds.iter().copied().map(Duration::from_secs)).as_secs();
        assert_eq!(lease(&[30, 120, 432_000]), 8);
        assert_eq!(lease(&[30, 12, 432_000]), 4);
        assert_eq!(lease(&[0, 120]), 0);
        assert_eq!(lease(&[]), 8, "without conntrack");
    }
}
