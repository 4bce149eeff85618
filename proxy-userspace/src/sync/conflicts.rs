//! Tells of addresses that several Services claim, once each.

use std::{collections::BTreeSet, net::SocketAddr};

use crate::model::FrontendConflict;

/// New ones in one sync that are logged each for itself.
const MOST_LOGGED: usize = 10;

/// What was told already.
#[derive(Debug, Default)]
pub(super) struct Conflicts {
    known: BTreeSet<FrontendConflict>,
}

impl Conflicts {
    /// Logs what is new among those there are now, and returns how many that are.
    pub(super) fn update(&mut self, now: impl Iterator<Item = FrontendConflict>) -> usize {
        let now: BTreeSet<FrontendConflict> = now.collect();
        let new: Vec<&FrontendConflict> = now.difference(&self.known).collect();
        for FrontendConflict { address, port, owner, loser } in new.iter().take(MOST_LOGGED) {
            let claimed = match address {
                Some(address) => SocketAddr::new(*address, port.get()).to_string(),
                None => format!("node port {port}"),
            };
            tracing::warn!(claimed, served = %owner, not_served = %loser, "two Services claim the same address; one of them is served there");
        }
        if let Some(more @ 1..) = new.len().checked_sub(MOST_LOGGED) {
            tracing::warn!(more, "further addresses are claimed by two Services");
        }
        let count = new.len();
        self.known = now;
        count
    }
}

#[cfg(test)]
mod tests {
    use std::{net::IpAddr, num::NonZeroU16};

    use super::*;
    use crate::model::{IpFamily, NamespacedName, Protocol, ServicePortKey, ServicePortName};

    fn conflict(loser: &str) -> FrontendConflict {
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
    fn a_conflict_is_told_once_and_again_after_it_had_ended() {
        let mut conflicts = Conflicts::default();
        let told: Vec<usize> = [vec!["b"], vec!["b", "c"], vec!["c"], vec!["b", "c"], vec![]]
            .into_iter()
            .map(|losers| conflicts.update(losers.into_iter().map(conflict)))
            .collect();
        assert_eq!(told, [1, 1, 0, 1, 0]);
    }
}
