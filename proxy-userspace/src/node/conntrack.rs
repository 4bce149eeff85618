//! Limits and timeouts of conntrack: upstream's `pkg/proxy/conntrack/sysctls.go`.

use std::time::Duration;

use crate::kernel::{
    KernelError, conntrack,
    sysctl::{self, Sysctl},
};

/// The largest limit from the number of CPUs. A larger table takes too much memory on machines with
/// many CPUs.
const MAX_BY_CPUS: u32 = 1 << 20;
/// Entries for each bucket of the kernel's hash table.
const ENTRIES_PER_BUCKET: u32 = 4;

const TCP_ESTABLISHED: Sysctl = Sysctl("netfilter/nf_conntrack_tcp_timeout_established");
const TCP_CLOSE_WAIT: Sysctl = Sysctl("netfilter/nf_conntrack_tcp_timeout_close_wait");
const TCP_BE_LIBERAL: Sysctl = Sysctl("netfilter/nf_conntrack_tcp_be_liberal");
const UDP: Sysctl = Sysctl("netfilter/nf_conntrack_udp_timeout");
const UDP_STREAM: Sysctl = Sysctl("netfilter/nf_conntrack_udp_timeout_stream");

/// The section `conntrack`. Zero keeps the kernel's value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConntrackSettings {
    /// The maximum number of entries for each CPU.
    pub max_per_core: u32,
    /// The least value of the maximum; ignored if `max_per_core` is zero.
    pub min: u32,
    /// The timeout of an idle established TCP connection.
    pub tcp_established_timeout: Duration,
    /// The timeout of a TCP connection that one side has closed.
    pub tcp_close_wait_timeout: Duration,
    /// Packets outside the TCP window are valid.
    pub tcp_be_liberal: bool,
    /// The timeout of a UDP flow without replies.
    pub udp_timeout: Duration,
    /// The timeout of a UDP flow with replies.
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
    /// Makes all settings. Continues after errors and returns them.
    pub(super) fn set(&self, cpus: u32) -> Vec<KernelError> {
        let mut errors = Vec::new();
        // On a node that has just started, the module may not be loaded.
        if matches!(conntrack::LIMIT.read(), Ok(None)) {
            errors.extend(conntrack::load_module().err());
        }
        for (setting, value) in self.values(cpus) {
            match setting.ensure(value) {
                Ok(changed) if changed => {
                    tracing::info!(setting = setting.0, value, "changed a kernel setting");
                }
                Ok(_) => {}
                Err(error) => errors.push(error),
            }
        }
        if let Some(max) = self.max(cpus) {
            errors.extend(sysctl::ensure_conntrack_buckets(max / ENTRIES_PER_BUCKET).err());
        }
        errors
    }

    fn values(&self, cpus: u32) -> impl Iterator<Item = (Sysctl, i64)> {
        let seconds =
            |time: Duration| Some(i64::try_from(time.as_secs()).unwrap_or(i64::MAX)).filter(|s| *s > 0);
        let values = [
            (conntrack::LIMIT, self.max(cpus).map(i64::from)),
            (TCP_ESTABLISHED, seconds(self.tcp_established_timeout)),
            (TCP_CLOSE_WAIT, seconds(self.tcp_close_wait_timeout)),
            (TCP_BE_LIBERAL, self.tcp_be_liberal.then_some(1)),
            (UDP, seconds(self.udp_timeout)),
            (UDP_STREAM, seconds(self.udp_stream_timeout)),
        ];
        values.into_iter().filter_map(|(setting, value)| Some((setting, value?)))
    }

    fn max(&self, cpus: u32) -> Option<u32> {
        let scaled = self.max_per_core.saturating_mul(cpus);
        match scaled {
            0 => None,
            scaled if scaled > MAX_BY_CPUS => Some(MAX_BY_CPUS),
            scaled => Some(scaled.max(self.min)).filter(|max| *max > 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_grows_with_the_cpus_between_its_bounds() {
        let max = |max_per_core, min, cpus| {
            ConntrackSettings { max_per_core, min, ..ConntrackSettings::default() }.max(cpus)
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
