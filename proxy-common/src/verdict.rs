//! What becomes of a connection or datagram to a Service, before an endpoint is chosen.

use crate::{
    layout::{Counter, ServiceValue, flags},
    select::Slots,
};

/// What is to be done with a destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Send it to one of these slots.
    Translate(Slots),
    /// Leave it as it is.
    Pass(PassReason),
    /// Connection refused.
    Refuse,
    /// Unreachable.
    Drop(DropReason),
}

/// Why a destination that is a Service's is left alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PassReason {
    /// Source ranges apply, and which address the socket will have is only known from its packets: tc decides.
    SourceUnknown,
}

/// Why a connection is not let through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DropReason {
    /// The source is in none of the Service's `loadBalancerSourceRanges`.
    SourceNotAllowed,
    /// There are endpoints, but none on this node, and the policy is Local.
    NoLocalEndpoint,
}

impl DropReason {
    /// As what it is counted, and told.
    #[inline(always)]
    pub const fn counter(self) -> Counter {
        match self {
            Self::SourceNotAllowed => Counter::SourceNotAllowed,
            Self::NoLocalEndpoint => Counter::NoLocalEndpoint,
        }
    }
}

/// What a socket's source address is known to be, when it dials.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SocketSource {
    /// Bound to an address: whether that is in the Service's source ranges.
    Bound {
        /// A longest-prefix match was found.
        in_ranges: bool,
    },
    /// Not bound, in the node's network namespace.
    Node,
    /// Not bound, in another network namespace: a pod.
    Pod,
}

/// The verdict on a socket of this node that dials `service`. `source` is asked only where source ranges apply.
#[inline(always)]
pub fn for_socket(service: &ServiceValue, source: impl FnOnce() -> SocketSource) -> Verdict {
    if service.flags & flags::SOURCE_RANGES != 0 {
        match source_allowed(service, source()) {
            Some(true) => {}
            Some(false) => return Verdict::Drop(DropReason::SourceNotAllowed),
            None => return Verdict::Pass(PassReason::SourceUnknown),
        }
    }
    to_slots(service, Slots::inside(service))
}

/// The verdict on a packet that comes in on a link for `service`. `is_local`: local detection counts the caller among the
/// cluster's own. `in_ranges` is asked only where source ranges apply.
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

/// Whether the source may pass; none when its packets must tell.
#[inline(always)]
const fn source_allowed(service: &ServiceValue, source: SocketSource) -> Option<bool> {
    match source {
        SocketSource::Bound { in_ranges } => Some(in_ranges),
        SocketSource::Node => Some(service.flags & flags::NODE_IN_RANGES != 0),
        SocketSource::Pod if service.flags & flags::PODS_IN_RANGES != 0 => Some(true),
        SocketSource::Pod if service.flags & flags::PODS_OUT_OF_RANGES != 0 => Some(false),
        SocketSource::Pod => None,
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

    fn unasked() -> SocketSource {
        panic!("the source does not matter without source ranges")
    }

    #[test]
    fn a_service_with_endpoints_is_translated_whatever_outside_callers_have() {
        assert_eq!(for_socket(&service(3, 0), unasked), Verdict::Translate(Slots { list: 0, count: 3 }));
    }

    #[test]
    fn no_endpoints_at_all_refuse_and_no_local_ones_drop() {
        assert_eq!(for_socket(&service(0, 0), unasked), Verdict::Refuse);
        assert_eq!(
            for_socket(&service(0, flags::DROP_WHEN_EMPTY), unasked),
            Verdict::Drop(DropReason::NoLocalEndpoint)
        );
    }

    #[test]
    fn source_ranges_decide_by_what_is_known_of_the_source() {
        let allowed = Verdict::Translate(Slots { list: 0, count: 1 });
        let denied = Verdict::Drop(DropReason::SourceNotAllowed);
        let ranged = |more| service(1, flags::SOURCE_RANGES | more);
        for (source, more, verdict) in [
            (SocketSource::Bound { in_ranges: true }, 0, allowed),
            (SocketSource::Bound { in_ranges: false }, flags::NODE_IN_RANGES, denied),
            (SocketSource::Node, flags::NODE_IN_RANGES, allowed),
            (SocketSource::Node, flags::PODS_IN_RANGES, denied),
            (SocketSource::Pod, flags::PODS_IN_RANGES, allowed),
            (SocketSource::Pod, flags::PODS_OUT_OF_RANGES, denied),
            (SocketSource::Pod, flags::NODE_IN_RANGES, Verdict::Pass(PassReason::SourceUnknown)),
        ] {
            assert_eq!(for_socket(&ranged(more), || source), verdict, "{source:?} {more:#x}");
        }
    }
}
