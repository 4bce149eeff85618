//! Keeps the SCTP ports of Services, for modes that may not be able to serve them.

use std::collections::BTreeSet;

use super::{LeftOutPort, LeftOutReason};
use crate::{
    kernel::{conntrack, sysctl::Sysctl},
    model::{Dirty, Protocol, ServicePortKey, Snapshot},
};

/// It is there if conntrack knows SCTP (`CONFIG_NF_CT_PROTO_SCTP`).
const SCTP: Sysctl = Sysctl("netfilter/nf_conntrack_sctp_timeout_established");

/// Returns a message if conntrack knows no ports of SCTP. Rules are written then, but netfilter
/// translates addresses without ports.
pub(super) fn lacked_by_conntrack() -> Option<&'static str> {
    let exists = |sysctl: Sysctl| sysctl.read().map(|value| value.is_some());
    let lacks = matches!((exists(conntrack::LIMIT), exists(SCTP)), (Ok(true), Ok(false)));
    lacks.then_some(
        "conntrack of this kernel has no SCTP (CONFIG_NF_CT_PROTO_SCTP), so ports are not translated",
    )
}

/// The service ports with the protocol SCTP.
#[derive(Debug, Default)]
pub(super) struct SctpPorts(BTreeSet<ServicePortKey>);

impl SctpPorts {
    /// Checks the dirty service ports again. Costs as much as the change.
    pub(super) fn update(&mut self, snapshot: &Snapshot, dirty: &Dirty) {
        let Self(ports) = self;
        let is_sctp = |key: &&ServicePortKey| key.name.protocol == Protocol::Sctp;
        if dirty.all {
            *ports = snapshot.ports.keys().filter(is_sctp).cloned().collect();
            return;
        }
        for key in dirty.ports.iter().filter(is_sctp) {
            if snapshot.ports.contains_key(key) {
                ports.insert(key.clone());
            } else {
                ports.remove(key);
            }
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns all of them as left out, because of this.
    pub(super) fn left_out<'a>(&'a self, why: &'a str) -> impl Iterator<Item = LeftOutPort> + 'a {
        let reason = LeftOutReason::Protocol;
        self.0.iter().map(move |port| LeftOutPort { port: port.clone(), reason, message: why.into() })
    }
}
