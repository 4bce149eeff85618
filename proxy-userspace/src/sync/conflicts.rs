//! Logs each address that several Services claim, once.

use std::{collections::BTreeSet, net::SocketAddr};

use crate::model::FrontendConflict;

/// How many new conflicts of one sync are logged one by one.
const MAX_LOGGED: usize = 10;

/// The conflicts that are logged.
#[derive(Debug, Default)]
pub(super) struct Conflicts {
    logged: BTreeSet<FrontendConflict>,
}

impl Conflicts {
    /// Logs the conflicts that are new, and returns their number.
    pub(super) fn update(&mut self, now: impl Iterator<Item = FrontendConflict>) -> usize {
        let now: BTreeSet<FrontendConflict> = now.collect();
        let new: Vec<&FrontendConflict> = now.difference(&self.logged).collect();
        for FrontendConflict { address, port, owner, loser } in new.iter().take(MAX_LOGGED) {
            let claimed = match address {
                Some(address) => SocketAddr::new(*address, port.get()).to_string(),
                None => format!("node port {port}"),
            };
            tracing::warn!(claimed, served = %owner, not_served = %loser, "two Services claim the same address; shunt serves one of them there; change the other");
        }
        if let Some(more @ 1..) = new.len().checked_sub(MAX_LOGGED) {
            tracing::warn!(more, "two Services claim the same address: more conflicts than are logged");
        }
        let count = new.len();
        self.logged = now;
        count
    }
}

#[cfg(test)]
mod tests {
    use std::{net::IpAddr, num::NonZeroU16};

    use super::*;
    use crate::model::{IpFamily, NamespacedName, Protocol, ServicePortKey, ServicePortName};

    fn conflict(loser: &'static str) -> FrontendConflict {
        let key = |name| ServicePortKey {
            name: ServicePortName {
                service: NamespacedName::new("default", name),
                port: "".into(),
                protocol: Protocol::Tcp,
            },
            family: IpFamily::V4,
        };
        FrontendConflict {
            address: Some(IpAddr::from([10, 96, 0, 1])),
            port: NonZeroU16::MIN,
            owner: key("a"),
            loser: key(loser),
        }
    }

    #[test]
    fn a_conflict_is_logged_once_and_again_when_it_returns() {
        let mut conflicts = Conflicts::default();
        let logged: Vec<usize> = [vec!["b"], vec!["b", "c"], vec!["c"], vec!["b", "c"], vec![]]
            .into_iter()
            .map(|losers| conflicts.update(losers.into_iter().map(conflict)))
            .collect();
        assert_eq!(logged, [1, 1, 0, 1, 0]);
    }
}
