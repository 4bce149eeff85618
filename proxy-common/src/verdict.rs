//! The verdict on a connection or datagram to a Service, before an endpoint is chosen.

use crate::{
    layout::{Counter, ServiceValue, flags},
    select::Slots,
};

/// The verdict on a connection or datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Translate it to one of these slots.
    Translate(Slots),
    /// Pass it unchanged. Source ranges apply, and only the packets show the source address of the
    /// socket. The link programs decide.
    Pass,
    /// Refuse it.
    Refuse,
    /// Drop it. A system call fails as unreachable.
    Drop(DropReason),
}

/// The reason to drop a connection or datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DropReason {
    /// The source is not in `loadBalancerSourceRanges` of the Service.
    SourceNotAllowed,
    /// The traffic policy is Local, and no endpoint is on this node.
    NoLocalEndpoint,
}

impl DropReason {
    /// Returns the counter, which is also the verdict of the trace event.
    #[inline(always)]
    pub const fn counter(self) -> Counter {
        match self {
            Self::SourceNotAllowed => Counter::SourceNotAllowed,
            Self::NoLocalEndpoint => Counter::NoLocalEndpoint,
        }
    }
}

/// What is known of the source address of a socket when it connects or sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SocketSource {
    /// The socket is bound to an address.
    Bound {
        /// True if the address is in the source ranges of the Service.
        in_ranges: bool,
    },
    /// It is not bound, and in the network namespace of the node.
    Node,
    /// It is not bound, and in another network namespace: that of a pod, or of a container that is
    /// no pod.
    Elsewhere,
}

/// Returns the verdict on a socket that connects or sends to `service`. Calls `source` only if
/// source ranges apply.
#[inline(always)]
pub fn for_socket(service: &ServiceValue, source: impl FnOnce() -> SocketSource) -> Verdict {
    if service.flags & flags::SOURCE_RANGES != 0 {
        match source_allowed(service, source()) {
            Some(true) => {}
            Some(false) => return Verdict::Drop(DropReason::SourceNotAllowed),
            None => return Verdict::Pass,
        }
    }
    to_slots(service, Slots::inside(service))
}

/// Returns the verdict on a packet that comes in for `service`. `is_local` is the result of local
/// detection. Calls `in_ranges` only if source ranges apply.
#[inline(always)]
pub fn for_packet(service: &ServiceValue, is_local: bool, in_ranges: impl FnOnce() -> bool) -> Verdict {
    if service.flags & flags::SOURCE_RANGES != 0 && !in_ranges() {
        return Verdict::Drop(DropReason::SourceNotAllowed);
    }
    to_slots(service, if is_local { Slots::inside(service) } else { Slots::outside(service) })
}

#[inline(always)]
const fn to_slots(service: &ServiceValue, slots: Slots) -> Verdict {
    if slots.count > 0 {
        Verdict::Translate(slots)
    } else if service.flags & flags::DROP_WHEN_EMPTY != 0 {
        Verdict::Drop(DropReason::NoLocalEndpoint)
    } else {
        Verdict::Refuse
    }
}

/// Returns true if source ranges allow the source, or `None` if only the packets show it.
#[inline(always)]
const fn source_allowed(service: &ServiceValue, source: SocketSource) -> Option<bool> {
    match source {
        SocketSource::Bound { in_ranges } => Some(in_ranges),
        SocketSource::Node => Some(service.flags & flags::NODE_IN_RANGES != 0),
        SocketSource::Elsewhere => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service(inside_count: u32, flags: u16) -> ServiceValue {
        ServiceValue {
            service: 1,
            generation: 1,
            inside_count,
            outside_count: 0,
            affinity_seconds: 0,
            inside_list: 0,
            outside_list: 1,
            flags,
        }
    }

    fn unused() -> SocketSource {
        panic!("the source is not read without source ranges")
    }

    #[test]
    fn inside_slots_do_not_depend_on_outside_slots() {
        assert_eq!(
            for_socket(&service(3, 0), unused),
            Verdict::Translate(Slots { list: 0, count: 3, table: 0 })
        );
    }

    #[test]
    fn missing_endpoints_refuse_and_missing_local_endpoints_drop() {
        assert_eq!(for_socket(&service(0, 0), unused), Verdict::Refuse);
        assert_eq!(
            for_socket(&service(0, flags::DROP_WHEN_EMPTY), unused),
            Verdict::Drop(DropReason::NoLocalEndpoint)
        );
    }

    #[test]
    fn source_ranges_apply_to_what_is_known_of_the_source() {
        let allowed = Verdict::Translate(Slots { list: 0, count: 1, table: 0 });
        let denied = Verdict::Drop(DropReason::SourceNotAllowed);
        let ranged = |more| service(1, flags::SOURCE_RANGES | more);
        for (source, more, verdict) in [
            (SocketSource::Bound { in_ranges: true }, 0, allowed),
            (SocketSource::Bound { in_ranges: false }, flags::NODE_IN_RANGES, denied),
            (SocketSource::Node, flags::NODE_IN_RANGES, allowed),
            (SocketSource::Node, 0, denied),
            (SocketSource::Elsewhere, 0, Verdict::Pass),
            (SocketSource::Elsewhere, flags::NODE_IN_RANGES, Verdict::Pass),
        ] {
            assert_eq!(for_socket(&ranged(more), || source), verdict, "{source:?} {more:#x}");
        }
    }
}
