//! Chains that many Services share: one for each number of endpoints and kind of traffic.
//!
//! The kernel draws a number below the number of endpoints, which has to stand in the rule; which endpoint that is, one map
//! of all Services says.

use std::fmt;

use super::table::{Base, Basis, DIALLED, DIALLED_PORT};
use crate::kernel::nftables::{Family, Name, Rule, Selector, Statement, Verdict};

/// What the destination is known by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum By {
    /// Its address and port.
    Address,
    /// A port of this node.
    NodePort,
}

/// A chain that is shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Shared {
    /// One of so many endpoints.
    Endpoints(By, u32),
    /// The same for traffic from outside the cluster, which is masqueraded.
    External(By, u32),
    /// externalTrafficPolicy Local: this node's own traffic and that of its pods goes to one of `cluster` endpoints, all other
    /// to one of the `local` ones.
    Local {
        /// What the destination is known by.
        by: By,
        /// How many endpoints there are on this node.
        local: u32,
        /// How many there are.
        cluster: u32,
    },
}

impl fmt::Display for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let prefix = |by: &By| if *by == By::NodePort { "nodeport-" } else { "" };
        match self {
            Self::Endpoints(by, count) => write!(f, "{}endpoints-{count}", prefix(by)),
            Self::External(by, count) => write!(f, "{}external-endpoints-{count}", prefix(by)),
            Self::Local { by, local, cluster } => {
                write!(f, "{}local-endpoints-{local}-of-{cluster}", prefix(by))
            }
        }
    }
}

impl Shared {
    /// The chain's name.
    pub(super) fn name(self) -> Name {
        self.to_string().into()
    }

    /// The chain that this one leads to.
    pub(super) fn leads_to(self) -> Option<Self> {
        match self {
            Self::Endpoints(..) => None,
            Self::External(by, count) => Some(Self::Endpoints(by, count)),
            Self::Local { by, cluster, .. } => (cluster > 0).then_some(Self::Endpoints(by, cluster)),
        }
    }

    /// The chain's rules.
    pub(super) fn rules(self, basis: &Basis, family: Family) -> Vec<Rule> {
        match self {
            Self::Endpoints(by, count) => by.choose(count, by.endpoints()),
            Self::External(by, count) => external(basis, Self::Endpoints(by, count).name()),
            Self::Local { by, local, .. } => {
                let all = self.leads_to().map(Self::name);
                let mut rules = all.map_or_else(Vec::new, |all| short_circuit(basis, family, &all));
                rules.extend(by.choose(local, by.local_endpoints()));
                rules
            }
        }
    }
}

/// Traffic from outside the cluster: its answers have to come back through this node.
pub(super) fn external(basis: &Basis, to: Name) -> Vec<Rule> {
    let goto = Statement::Verdict(Verdict::Goto(to));
    vec![Rule::new([Statement::SetMark(basis.masquerade)]).comment("masquerade"), Rule::new([goto])]
}

/// What does not come from outside goes past externalTrafficPolicy Local.
pub(super) fn short_circuit(basis: &Basis, family: Family, all: &Name) -> Vec<Rule> {
    let goto = || Statement::Verdict(Verdict::Goto(all.clone()));
    let pod = basis.is_from_pod(family, true);
    let pod = pod.map(|pod| Rule::new([pod, goto()]).comment("short-circuit pod traffic"));
    let marked = Rule::new([Statement::SourceIsLocal, Statement::SetMark(basis.masquerade)]);
    let local = Rule::new([Statement::SourceIsLocal, goto()]);
    pod.into_iter()
        .chain([marked.comment("masquerade local traffic"), local.comment("short-circuit local traffic")])
        .collect()
}

impl By {
    pub(super) const fn endpoints(self) -> Base {
        match self {
            Self::Address => Base::ServiceEndpoints,
            Self::NodePort => Base::NodePortEndpoints,
        }
    }

    pub(super) const fn local_endpoints(self) -> Base {
        match self {
            Self::Address => Base::ServiceLocalEndpoints,
            Self::NodePort => Base::NodePortLocalEndpoints,
        }
    }

    /// One of so many. A packet that came here just before the list got shorter may have drawn a number that is gone: the
    /// first endpoint is there as long as there is any.
    fn choose(self, count: u32, endpoints: Base) -> Vec<Rule> {
        let choice = |below: u32| {
            let key: Vec<Selector> = match self {
                Self::Address => DIALLED.into(),
                Self::NodePort => DIALLED_PORT.into(),
            };
            let key = key.into_iter().chain([Selector::Random(below)]).collect();
            Rule::new([Statement::DnatByMap(key, endpoints.name())])
        };
        match count {
            0 => Vec::new(),
            1 => vec![choice(1)],
            _ => vec![choice(count), choice(1).comment("the list has just become shorter")],
        }
    }
}
