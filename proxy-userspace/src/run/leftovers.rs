//! Removes what kube-proxy's nftables mode leaves when it takes the table `kube-proxy` over from
//! shunt.

use std::{thread, time::Duration};

use proxy_userspace::{
    causes::with_causes,
    dataplane::nftables::{LeftoverRemoval, Nftables, TABLE},
    model::IpFamily,
};

use super::other_proxy::{ATTEMPTS, ATTEMPTS_PER_LOG, PAUSE};

/// Removes the chains, sets and maps that only shunt has. While rules lead to shunt's chains, waits
/// until another proxy has taken the table over: ten minutes at most.
///
/// No lock is held meanwhile: a proxy must be able to start on this node at any time.
pub(super) fn remove() -> anyhow::Result<()> {
    remove_with(Nftables::remove_leftovers, PAUSE)
}

fn remove_with(mut remove: impl FnMut() -> LeftoverRemoval, pause: Duration) -> anyhow::Result<()> {
    for attempt in 0..ATTEMPTS {
        let in_use = still_in_use(remove())?;
        if in_use.is_empty() {
            return Ok(());
        }
        if attempt % ATTEMPTS_PER_LOG == 0 {
            tracing::info!(
                ?in_use,
                "waiting until another proxy takes the table {TABLE} over: its rules lead to shunt's chains"
            );
        }
        thread::sleep(pause);
    }
    anyhow::bail!(
        "the rules of the table {TABLE} still lead to shunt's chains, which stay; stop shunt, start kube-proxy and run \
         this again; if kube-proxy does not use nftables, or no other proxy shall serve this node, delete the table: \
         nft delete table ip {TABLE}; nft delete table ip6 {TABLE}"
    )
}

/// Logs what was removed, and returns the families whose table is in use. Fails if anything could
/// not be removed.
fn still_in_use(removal: LeftoverRemoval) -> anyhow::Result<Vec<IpFamily>> {
    let LeftoverRemoval { removed, in_use, errors } = removal;
    if removed > 0 {
        tracing::info!(removed, "removed nftables chains, sets and maps that kube-proxy does not have");
    }
    for error in &errors {
        tracing::error!(error = with_causes(error), "cannot remove something from the table {TABLE}");
    }
    anyhow::ensure!(errors.is_empty(), "the cleanup is incomplete: {} errors; run it again", errors.len());
    Ok(in_use)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns how often a removal was tried, and whether it succeeded. The table is in use at
    /// first.
    fn tried(busy: u32) -> (u32, bool) {
        let mut count = 0;
        let remove = || {
            count += 1;
            let in_use = if count <= busy { vec![IpFamily::V4] } else { Vec::new() };
            LeftoverRemoval { in_use, ..LeftoverRemoval::default() }
        };
        let result = remove_with(remove, Duration::ZERO);
        (count, result.is_ok())
    }

    #[test]
    fn removal_waits_until_another_proxy_has_taken_the_table_over() {
        assert_eq!(tried(0), (1, true));
        assert_eq!(tried(3), (4, true));
        assert_eq!(tried(u32::MAX), (ATTEMPTS, false));
    }
}
