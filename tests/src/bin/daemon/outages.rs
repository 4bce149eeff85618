//! An API server that is away, slow, restored from a backup, lies, or refuses credentials: what is served stays, and all is right
//! afterwards.

use std::{thread, time::Duration};

use anyhow::{Context as _, Result};
use shunt_tests::{
    apiserver::{Interruption, Lie, Misbehaviour},
    world::Host,
};

use super::bed::{Bed, Setting};

/// Time for the longest wait between two tries, which comes after a minute of refusals.
const WITHIN: Duration = Duration::from_secs(70);
const AWAY_FOR: Duration = Duration::from_secs(3);
const REFUSED_FOR: Duration = Duration::from_mins(1);
const ALWAYS: usize = usize::MAX;

pub(crate) fn the_api_server_may_do_anything_while_traffic_goes_on(setting: &Setting) -> Result<()> {
    let mut bed = Bed::started(setting, &setting.mode, "{}")?;
    bed.under_load(|bed| {
        cut(bed).context("cut")?;
        restored_from_a_backup(bed).context("restarted with older data")?;
        slow(bed).context("slow")?;
        lying(bed).context("lying about versions")?;
        refusing(bed).context("refusing credentials")
    })?;
    bed.end()
}

fn cut(bed: &mut Bed) -> Result<()> {
    bed.cluster.down();
    bed.serve(&[Host::A2, Host::A3])?;
    thread::sleep(AWAY_FOR);
    bed.wait_until_served(&[Host::A1, Host::A2], Duration::ZERO).context("while it is away")?;
    bed.cluster.up(&bed.world)?;
    bed.wait_until_served(&[Host::A2, Host::A3], WITHIN)
}

fn restored_from_a_backup(bed: &mut Bed) -> Result<()> {
    let backup = bed.cluster.server().backup();
    bed.serve(&[Host::A1, Host::A3])?;
    bed.wait_until_served(&[Host::A1, Host::A3], WITHIN)?;
    bed.cluster.down();
    bed.cluster.server().go_back_to(backup);
    bed.cluster.up(&bed.world)?;
    // Nothing changes on the server any more: what tells is its bookmark, which comes each minute.
    bed.wait_until_served(&[Host::A2, Host::A3], WITHIN + Duration::from_mins(1))
}

fn slow(bed: &mut Bed) -> Result<()> {
    bed.cluster.server().misbehave(None, None, Misbehaviour::Slow, ALWAYS);
    bed.cluster.server().interrupt(Interruption::End);
    bed.serve(&[Host::A1, Host::A2])?;
    bed.wait_until_served(&[Host::A1, Host::A2], WITHIN)?;
    bed.cluster.server().behave();
    Ok(())
}

fn lying(bed: &mut Bed) -> Result<()> {
    let served = [[Host::A2, Host::A3], [Host::A1, Host::A3], [Host::A1, Host::A2], [Host::A2, Host::A3]];
    for (lie, pods) in [Lie::Low, Lie::High, Lie::Nonsense, Lie::Missing].into_iter().zip(served) {
        bed.cluster.server().misbehave(None, None, Misbehaviour::Lie(lie), ALWAYS);
        bed.cluster.server().interrupt(Interruption::End);
        bed.serve(&pods)?;
        bed.wait_until_served(&pods, WITHIN).with_context(|| format!("{lie:?}"))?;
        bed.cluster.server().behave();
    }
    Ok(())
}

fn refusing(bed: &mut Bed) -> Result<()> {
    bed.cluster.server().misbehave(None, None, Misbehaviour::Unauthorized, ALWAYS);
    bed.cluster.server().interrupt(Interruption::End);
    // Until then the watch from before may bring the change.
    let refused = "Unauthorized; what is known stays, trying again resource=\"endpointslices\"";
    bed.wait_for_log(refused, WITHIN)?;
    bed.serve(&[Host::A1, Host::A3])?;
    thread::sleep(REFUSED_FOR);
    bed.wait_until_served(&[Host::A2, Host::A3], Duration::ZERO).context("while it refuses")?;
    bed.cluster.server().behave();
    bed.wait_until_served(&[Host::A1, Host::A3], WITHIN)
}
