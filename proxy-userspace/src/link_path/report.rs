//! Judges again whenever something changed, and reports the path.

use std::time::Duration;

use tokio::{
    sync::watch,
    task::spawn_blocking,
    time::{Instant, sleep, sleep_until},
};

use super::{
    Evidence,
    judge::{forwarding_rule, judge, links_with_filters},
    lease::lease,
    read::{read, read_filters},
};
use crate::{
    kernel::{
        KernelError, bpf::tc::Hook, command::Launcher, foreign_changes::ForeignChanges,
        foreign_filters::LinkFilter,
    },
    net::{ChosenPath, DirectScope, LinkPath, OWN_PROGRAMS, OWN_TABLES},
};

/// The shortest time from one judgement to the next.
const INTERVAL: Duration = Duration::from_secs(1);
/// How long changes that come together are waited for.
const BURST: Duration = Duration::from_millis(200);

/// Which nodes have the direct path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DirectPath {
    /// None.
    Never,
    /// Those that the programs serve and where no rule of others looks at packets.
    IfNoRules,
    /// All. Rules of others only shorten the lease.
    Always,
}

/// The settings of the judgement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The mark bits that shunt's link programs set.
    pub own_marks: u32,
    /// How often to judge without a notification of the kernel.
    pub sync_period: Duration,
    /// Which nodes have the direct path.
    pub direct: DirectPath,
    /// Which packets take it.
    pub scope: DirectScope,
}

/// How the reason of a path begins that was chosen because something could not be read.
pub const CANNOT_READ: &str = "shunt cannot read what other programs set up";

impl Settings {
    /// Returns the path while it is not known what others set up, for this reason.
    pub fn path_without_evidence(&self, why: String) -> ChosenPath {
        if self.direct == DirectPath::Always {
            ChosenPath::new(LinkPath::Programs, why)
        } else {
            ChosenPath::netfilter(why)
        }
    }
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
    to: watch::Sender<Option<ChosenPath>>,
) -> Result<(), KernelError> {
    // Before the first reading, so that no change is missed.
    let mut changes = ForeignChanges::open(OWN_TABLES, OWN_PROGRAMS)?;
    let mut is_failing = false;
    while !launcher.is_shutting_down() {
        let path = match read_and_judge(launcher.clone(), settings).await {
            Ok(path) => {
                is_failing = false;
                path
            }
            Err(_) if launcher.is_shutting_down() => break,
            Err(error) => {
                if !std::mem::replace(&mut is_failing, true) {
                    tracing::warn!(
                        %error,
                        "cannot read what other programs set up on this node: {}",
                        if settings.direct == DirectPath::Always {
                            "packets that come in on links go through the stack"
                        } else {
                            "netfilter translates packets that come in on links"
                        }
                    );
                }
                settings.path_without_evidence(format!("{CANNOT_READ}: {error}"))
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

fn direct(scope: DirectScope, lease: Duration, filters: &[LinkFilter]) -> LinkPath {
    let [without, filtered] = [Hook::Ingress, Hook::Egress].map(|hook| links_with_filters(filters, hook));
    LinkPath::Direct { scope, lease, without, filtered }
}

/// The reason of the direct path that a setting asks for.
const DIRECT_BY_SETTING: &str = "shunt.links.path is direct";

/// Chooses the path by what others have set up.
pub(super) fn choose(evidence: &Evidence, settings: Settings) -> ChosenPath {
    let Settings { scope, .. } = settings;
    let rule = || forwarding_rule(evidence, scope);
    if settings.direct == DirectPath::Always {
        let policy =
            || evidence.policies.first().map(|policy| format!("an IPsec policy of others: {policy}"));
        let (lease, why) = match rule().or_else(policy) {
            Some(seen) => (Duration::ZERO, format!("{DIRECT_BY_SETTING}; {seen}")),
            None => (lease(), DIRECT_BY_SETTING.to_owned()),
        };
        return ChosenPath::new(direct(scope, lease, &evidence.filters), why);
    }
    match judge(evidence) {
        LinkPath::Netfilter { why } => ChosenPath::netfilter(why),
        _ if settings.direct == DirectPath::Never => ChosenPath::new(
            LinkPath::Programs,
            "netfilter masquerades (shunt.links.masquerade), so there is no direct path",
        ),
        path => match rule() {
            Some(why) => ChosenPath::new(path, why),
            None => ChosenPath::new(
                direct(scope, lease(), &evidence.filters),
                "no rule of others looks at forwarded packets",
            ),
        },
    }
}

async fn read_and_judge(launcher: Launcher, settings: Settings) -> Result<ChosenPath, KernelError> {
    let judged = spawn_blocking(move || match read(&launcher, settings.own_marks) {
        Err(error) if settings.direct == DirectPath::Always => {
            tracing::debug!(
                %error,
                "cannot read the rules of others: each flow on the direct path sends a packet through the stack twice a second"
            );
            let path = direct(settings.scope, Duration::ZERO, &read_filters()?);
            Ok(ChosenPath::new(path, format!("{DIRECT_BY_SETTING}; {CANNOT_READ}: {error}")))
        }
        evidence => Ok(choose(&evidence?, settings)),
    });
    judged.await.unwrap_or_else(|error| {
        Err(KernelError::call("judge", "what other programs set up")(std::io::Error::other(error)))
    })
}
