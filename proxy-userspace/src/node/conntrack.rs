//! conntrack's limits and timeouts: upstream's `pkg/proxy/conntrack/sysctls.go`.

use std::time::Duration;

use crate::kernel::{
    KernelError, conntrack,
    sysctl::{self, Sysctl},
};

/// Above it the table takes too much memory on machines with many processors.
const MOST_BY_PROCESSORS: u32 = 1 << 20;
/// Entries to a bucket of the kernel's hash table.
const ENTRIES_PER_BUCKET: u32 = 4;

const MAX: Sysctl = Sysctl("netfilter/nf_conntrack_max");
const TCP_ESTABLISHED: Sysctl = Sysctl("netfilter/nf_conntrack_tcp_timeout_established");
const TCP_CLOSE_WAIT: Sysctl = Sysctl("netfilter/nf_conntrack_tcp_timeout_close_wait");
const TCP_BE_LIBERAL: Sysctl = Sysctl("netfilter/nf_conntrack_tcp_be_liberal");
const UDP: Sysctl = Sysctl("netfilter/nf_conntrack_udp_timeout");
const UDP_STREAM: Sysctl = Sysctl("netfilter/nf_conntrack_udp_timeout_stream");

/// The section `conntrack`. Zero leaves the kernel's value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConntrackSettings {
    /// Entries the table may hold for each processor.
    pub max_per_core: u32,
    /// Entries it may hold at least; without effect where `max_per_core` is zero.
    pub min: u32,
    /// How long a silent TCP connection is remembered.
    pub tcp_established_timeout: Duration,
    /// The same of a connection that one side has closed.
    pub tcp_close_wait_timeout: Duration,
    /// Packets outside of the TCP window are not invalid.
    pub tcp_be_liberal: bool,
    /// How long an unanswered UDP packet is remembered.
    pub udp_timeout: Duration,
    /// How long an answered one is.
    pub udp_stream_timeout: Duration,
}

/// Upstream's defaults (`pkg/proxy/apis/config/v1alpha1/defaults.go`).
impl Default for ConntrackSettings {
    fn default() -> Self {
        Self {
            max_per_core: 32 << 10,
            min: 128 << 10,
            tcp_established_timeout: Duration::from_hours(24),
            tcp_close_wait_timeout: Duration::from_hours(1),
            tcp_be_liberal: false,
            udp_timeout: Duration::ZERO,
            udp_stream_timeout: Duration::ZERO,
        }
    }
}

impl ConntrackSettings {
    pub(super) fn set(&self, processors: u32) -> Vec<KernelError> {
        let mut errors = Vec::new();
        // On a node that just came up.
        if matches!(MAX.read(), Ok(None)) {
            errors.extend(conntrack::load_module().err());
        }
        for (setting, value) in self.values(processors) {
            match setting.ensure(value) {
                Ok(changed) if changed => tracing::info!(setting = setting.0, value, "set"),
                Ok(_) => {}
                Err(error) => errors.push(error),
            }
        }
        if let Some(max) = self.max(processors) {
            errors.extend(sysctl::ensure_conntrack_buckets(max / ENTRIES_PER_BUCKET).err());
        }
        errors
    }

    fn values(&self, processors: u32) -> impl Iterator<Item = (Sysctl, i64)> {
        let seconds =
            |time: Duration| Some(i64::try_from(time.as_secs()).unwrap_or(i64::MAX)).filter(|s| *s > 0);
        let wanted = [
            (MAX, self.max(processors).map(i64::from)),
            (TCP_ESTABLISHED, seconds(self.tcp_established_timeout)),
            (TCP_CLOSE_WAIT, seconds(self.tcp_close_wait_timeout)),
            (TCP_BE_LIBERAL, self.tcp_be_liberal.then_some(1)),
            (UDP, seconds(self.udp_timeout)),
            (UDP_STREAM, seconds(self.udp_stream_timeout)),
        ];
        wanted.into_iter().filter_map(|(setting, value)| Some((setting, value?)))
    }

    fn max(&self, processors: u32) -> Option<u32> {
        let scaled = self.max_per_core.saturating_mul(processors);
        match scaled {
            0 => None,
            scaled if scaled > MOST_BY_PROCESSORS => Some(MOST_BY_PROCESSORS),
            scaled => Some(scaled.max(self.min)).filter(|max| *max > 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_grows_with_the_processors_between_its_bounds() {
        let max = |max_per_core, min, processors| {
            ConntrackSettings { max_per_core, min, ..ConntrackSettings::default() }.max(processors)
        };
        assert_eq!(max(32 << 10, 128 << 10, 2), Some(128 << 10));
        assert_eq!(max(32 << 10, 128 << 10, 8), Some(256 << 10));
        assert_eq!(max(32 << 10, 128 << 10, 128), Some(1 << 20));
        assert_eq!(max(0, 128 << 10, 8), None, "zero leaves the kernel's");
        assert_eq!(max(1000, 0, 3), Some(3000));
    }

    #[test]
    fn zero_and_unset_leave_the_kernels_values() {
        let settings = ConntrackSettings {
            max_per_core: 0,
            tcp_close_wait_timeout: Duration::ZERO,
            udp_timeout: Duration::from_secs(40),
            ..ConntrackSettings::default()
        };
        let values: Vec<_> = settings.values(4).collect();
        assert_eq!(values, [(TCP_ESTABLISHED, 86_400), (UDP, 40)]);
    }
}
