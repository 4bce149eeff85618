//! Removes what kube-proxy's nftables mode leaves when it takes the table `kube-proxy` over from
//! shunt.

use std::{thread, time::Duration};

use proxy_userspace::{
    causes::with_causes,
    dataplane::nftables::{LeftoverRemoval, Nftables, TABLE},
    model::IpFamily,
};

use super::other_proxy::{ATTEMPTS, ATTEMPTS_PER_LOG, PAUSE};

/// What to do while rules lead to shunt's chains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WhileInUse {
    /// Wait until another proxy has taken the table over.
    Wait,
    /// Leave the table to the proxy that serves the node, which uses it.
    Leave,
}

/// Removes the chains, sets and maps that only shunt has. Waits ten minutes at most.
pub(super) fn remove(while_in_use: WhileInUse) -> anyhow::Result<()> {
    remove_with(Nftables::remove_leftovers, while_in_use, PAUSE)
}

fn remove_with(
    mut remove: impl FnMut() -> LeftoverRemoval,
    while_in_use: WhileInUse,
    pause: Duration,
) -> anyhow::Result<()> {
    for attempt in 0..ATTEMPTS {
        let in_use = still_in_use(remove())?;
        if in_use.is_empty() {
            return Ok(());
        }
        if while_in_use == WhileInUse::Leave {
            tracing::info!(?in_use, "the table {TABLE} stays as it is: its rules lead to shunt's chains");
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
         this again, or remove the table with shunt --cleanup if no other proxy shall serve this node"
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
    fn tried(busy: u32, while_in_use: WhileInUse) -> (u32, bool) {
        let mut count = 0;
        let remove = || {
            count += 1;
            let in_use = if count <= busy { vec![IpFamily::V4] } else { Vec::new() };
            LeftoverRemoval { in_use, ..LeftoverRemoval::default() }
        };
        let result = remove_with(remove, while_in_use, Duration::ZERO);
        (count, result.is_ok())
    }

    #[test]
    fn removal_waits_until_another_proxy_has_taken_the_table_over() {
        assert_eq!(tried(0, WhileInUse::Wait), (1, true));
        assert_eq!(tried(3, WhileInUse::Wait), (4, true));
        assert_eq!(tried(u32::MAX, WhileInUse::Wait), (ATTEMPTS, false));
        assert_eq!(tried(u32::MAX, WhileInUse::Leave), (1, true), "the proxy that serves needs it");
    }
}
