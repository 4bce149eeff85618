//! Reads counters of one network namespace.

use std::fs;

use anyhow::{Context as _, Result};

const PATH: &str = "/proc/thread-self/net/snmp";

/// Returns the TCP segments of both families that were retransmitted in the calling thread's
/// namespace.
pub(super) fn retransmits() -> Result<u64> {
    let text = fs::read_to_string(PATH).with_context(|| format!("read {PATH}"))?;
    tcp_counter(&text, "RetransSegs").with_context(|| format!("{PATH} has no RetransSegs of Tcp"))
}

/// Finds a counter. A line of names is followed by a line of values.
fn tcp_counter(text: &str, name: &str) -> Option<u64> {
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("Tcp: "));
    let position = lines.next()?.split(' ').position(|field| field == name)?;
    lines.next()?.split(' ').nth(position)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counter_is_found_by_its_name() {
        let text = "Ip: Forwarding\nIp: 1\nTcp: InSegs RetransSegs InErrs\nTcp: 700 3 0\n";
        assert_eq!(tcp_counter(text, "RetransSegs"), Some(3));
        assert_eq!(tcp_counter(text, "Resets"), None);
    }
}
