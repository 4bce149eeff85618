//! Judges again whenever something changed, and reports the path.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::watch,
    task::spawn_blocking,
    time::{Instant, sleep, sleep_until},
};

use super::{judge, read};
use crate::{
    kernel::{
        KernelError,
        command::Launcher,
        foreign_changes::{ForeignChanges, TableName},
    },
    net::LinkPath,
};

/// The shortest time from one judgement to the next.
const INTERVAL: Duration = Duration::from_secs(1);
/// How long changes that come together are waited for.
const BURST: Duration = Duration::from_millis(200);
/// The tables in [`super::shapes::OWN_TABLES`], by the kernel's numbers of their families.
const OWN_TABLES: &[TableName] =
    &[(libc::NFPROTO_INET, "shunt"), (libc::NFPROTO_IPV4, "kube-proxy"), (libc::NFPROTO_IPV6, "kube-proxy")];

/// The settings of the judgement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The mark bits that shunt's link programs set.
    pub own_marks: u32,
    /// How often to judge without a notification of the kernel.
    pub sync_period: Duration,
}

/// Judges in the network namespace of the caller, and sends the path to `to` when it changes.
///
/// Judges at once. Then again when the kernel reports a change of others, at most a second later
/// and at most once a second, and every sync period. If something cannot be read, netfilter is the
/// path. Returns when all receivers are gone, when the process shuts down, or when the kernel's
/// notifications fail.
pub async fn report(
    launcher: Launcher,
    settings: Settings,
    to: watch::Sender<Option<LinkPath>>,
) -> Result<(), KernelError> {
    // Before the first reading, so that no change is missed.
    let mut changes = ForeignChanges::open(OWN_TABLES)?;
    let mut is_failing = false;
    while !launcher.is_shutting_down() {
        let path = match read_and_judge(launcher.clone(), settings.own_marks).await {
            Ok(path) => {
                is_failing = false;
                path
            }
            Err(_) if launcher.is_shutting_down() => break,
            Err(error) => {
                if !std::mem::replace(&mut is_failing, true) {
                    tracing::warn!(
                        %error,
                        "cannot read what other programs set up on this node: netfilter translates packets that \
                         come in on links"
                    );
                }
                let why: Arc<str> = format!("shunt cannot read what other programs set up: {error}").into();
                LinkPath::Netfilter { why }
            }
        };
        to.send_if_modified(|current| {
            let differs = current.as_ref() != Some(&path);
            *current = Some(path);
            differs
        });
        let next = Instant::now() + INTERVAL;
        tokio::select! {
            result = changes.next() => result?,
            () = sleep(settings.sync_period.max(INTERVAL)) => continue,
            () = to.closed() => return Ok(()),
        }
        let due = next.max(Instant::now() + BURST);
        loop {
            tokio::select! {
                result = changes.next() => result?,
                () = sleep_until(due) => break,
                () = to.closed() => return Ok(()),
            }
        }
    }
    Ok(())
}

async fn read_and_judge(launcher: Launcher, own_marks: u32) -> Result<LinkPath, KernelError> {
    let judged = spawn_blocking(move || Ok(judge(&read(&launcher, own_marks)?)));
    judged.await.unwrap_or_else(|error| {
        Err(KernelError::call("judge", "what other programs set up")(std::io::Error::other(error)))
    })
}
