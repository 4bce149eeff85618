//! Reports the facts about this node to the sync loop: links and addresses, and in the ebpf mode
//! which links and sockets the programs serve.

use std::{collections::BTreeSet, future::pending, mem, net::IpAddr, sync::Arc, time::Duration};

use proxy_userspace::{
    assembly,
    causes::with_causes,
    config::Config,
    dataplane::{
        Mode,
        ebpf::{Ebpf, POSSIBLE_PORTS},
        ipvs,
    },
    kernel::{
        self, KernelError,
        command::Launcher,
        redirecting_pods::{self, ExemptNamespaces, RedirectingPods},
        sysctl,
    },
    link_path::{self, DirectPath},
    mode::{BackstopPolicy, LinksDirect, LinksPath, SocketsScope},
    net::{ChosenPath, DirectScope, LinkPath, NodeFacts, PortRange, SocketScope},
    sync::Outputs,
};
use tokio::{
    sync::{Notify, watch},
    task::spawn_blocking,
    time::{MissedTickBehavior, interval, sleep},
};

use super::{Tasks, dataplane};

/// How long after a failure the links and addresses are listed again.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// How often shunt looks whether programs of an earlier process are still attached.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Starts the sources of the facts. The receiver has `None` until all of them are known.
pub(super) fn start(
    config: &Config,
    launcher: &Launcher,
    drift: &Arc<Notify>,
    outputs: &Outputs,
    tasks: &mut Tasks,
) -> watch::Receiver<Option<NodeFacts>> {
    let (to, links) = watch::channel(None);
    let drift = Arc::clone(drift);
    tasks.spawn(async move {
        let mut is_first = true;
        repeat(&to, || {
            // A filter may have been removed while nobody watched. The first sync finds everything.
            if !mem::take(&mut is_first) {
                drift.notify_one();
            }
            kernel::links::report(ipvs::DUMMY_LINK, to.clone(), Arc::clone(&drift))
        })
        .await;
        Ok(())
    });
    let former_ports = former_programs_ports(config);
    if config.mode != Mode::Ebpf {
        let Some(ports) = former_ports else { return links };
        let (to, facts) = watch::channel(None);
        let config = config.clone();
        tasks.spawn(async move {
            until_programs_are_removed(ports, || former_programs_ports(&config), links, to).await;
            Ok(())
        });
        return facts;
    }
    let path = link_path(config, launcher, tasks);
    let sockets = served_sockets(config, outputs, tasks);
    let (to, facts) = watch::channel(None);
    let outputs = outputs.clone();
    tasks.spawn(async move {
        merge(links, path, sockets, former_ports, outputs, to).await;
        Ok(())
    });
    facts
}

/// Returns the source ports with which programs of an earlier process masquerade. If they cannot
/// be read, returns those that programs may use by default.
fn former_programs_ports(config: &Config) -> Option<PortRange> {
    Ebpf::pinned_masquerade_ports(&config.ebpf.pin_dir).unwrap_or_else(|error| {
        let error = with_causes(&error);
        tracing::debug!(error, "cannot read which ports the programs of an earlier process masquerade with");
        Some(POSSIBLE_PORTS)
    })
}

/// Adds the source ports of programs of an earlier process to the facts, until `read` returns
/// `None`. That happens after the takeover has removed the programs.
async fn until_programs_are_removed(
    ports: PortRange,
    read: impl Fn() -> Option<PortRange>,
    mut links: watch::Receiver<Option<NodeFacts>>,
    to: watch::Sender<Option<NodeFacts>>,
) {
    let mut former_programs_ports = Some(ports);
    let mut looks = interval(LOOK_EVERY);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        if let Some(facts) = links.borrow_and_update().clone() {
            let facts = Some(NodeFacts { former_programs_ports, ..facts });
            to.send_if_modified(|sent| {
                let differs = *sent != facts;
                *sent = facts;
                differs
            });
        }
        tokio::select! {
            () = changed(&mut links) => {}
            _ = looks.tick(), if former_programs_ports.is_some() => former_programs_ports = read(),
            () = to.closed() => return,
        }
    }
}

/// Repeats `report` after each failure, until all receivers of `to` are gone. Logs a failure once,
/// even if it lasts.
async fn repeat<T, F>(to: &watch::Sender<T>, mut report: impl FnMut() -> F)
where
    F: Future<Output = Result<(), KernelError>>,
{
    let mut logged = None;
    while let Err(error) = report().await {
        let error = with_causes(&error);
        if logged.as_ref() != Some(&error) {
            tracing::warn!(
                error,
                "cannot watch this node's links and addresses: the last known ones stay, and shunt tries again"
            );
            logged = Some(error);
        }
        tokio::select! {
            () = sleep(RETRY_AFTER) => {}
            () = to.closed() => return,
        }
    }
}

/// Sends the facts once all are known, and after each change. Returns when all receivers are gone.
async fn merge(
    mut links: watch::Receiver<Option<NodeFacts>>,
    mut path: watch::Receiver<Option<ChosenPath>>,
    mut sockets: watch::Receiver<Option<ServedSockets>>,
    former_programs_ports: Option<PortRange>,
    outputs: Outputs,
    to: watch::Sender<Option<NodeFacts>>,
) {
    loop {
        let merged = links.borrow_and_update().clone();
        let (link_path, sockets_now) =
            (path.borrow_and_update().clone(), sockets.borrow_and_update().clone());
        if let (Some(facts), Some(link_path), Some(sockets)) = (merged, link_path, sockets_now) {
            let ServedSockets { scope: socket_scope, exempt_addresses } = sockets;
            report_link_path(&link_path, &outputs);
            let local_ports = sysctl::local_ports().ok();
            to.send_replace(Some(NodeFacts {
                local_ports,
                former_programs_ports,
                link_path: link_path.path,
                socket_scope,
                exempt_addresses,
                ..facts
            }));
        }
        tokio::select! {
            () = changed(&mut links) => {}
            () = changed(&mut path) => {}
            () = changed(&mut sockets) => {}
            () = to.closed() => return,
        }
    }
}

/// Reports the link path: as a metric and a log line when the path or the reason changes, and as a
/// Kubernetes Event when the path changes. A reason can change with each pod.
fn report_link_path(chosen: &ChosenPath, outputs: &Outputs) {
    let (path, why) = (chosen.path.name(), &chosen.why);
    let before = outputs.status.set_link_path(chosen.clone());
    let is_same_path = before.as_ref().is_some_and(|before| before.path.name() == path);
    if is_same_path && before.is_some_and(|before| before.why == *why) {
        return;
    }
    outputs.metrics.set_link_path(chosen);
    tracing::info!(path, %why, "the link path of this node");
    if !is_same_path {
        outputs.events.normal("LinkPath", format!("packets that come in on links: {path}, because {why}"));
    }
}

/// Waits for a change. A value without a sender stays.
async fn changed<T>(receiver: &mut watch::Receiver<T>) {
    if receiver.changed().await.is_err() {
        pending::<()>().await;
    }
}

/// Reports what translates packets that come in on links.
fn link_path(config: &Config, launcher: &Launcher, tasks: &mut Tasks) -> watch::Receiver<Option<ChosenPath>> {
    let fixed = match config.ebpf.links_path {
        LinksPath::Auto if config.ebpf.backstop != BackstopPolicy::Never => None,
        LinksPath::Direct => None,
        LinksPath::Auto => Some(ChosenPath::new(LinkPath::Programs, "shunt.backstop is never")),
        LinksPath::Programs => Some(ChosenPath::new(LinkPath::Programs, "shunt.links.path is programs")),
        LinksPath::Netfilter => Some(ChosenPath::netfilter("shunt.links.path is netfilter")),
    };
    let (to, path) = watch::channel(fixed);
    if path.borrow().is_none() {
        tasks.spawn(judge(config.clone(), launcher.clone(), to));
    }
    path
}

/// Sends the path where nothing on the node could notice that programs translate, and changes of
/// it.
async fn judge(
    config: Config,
    launcher: Launcher,
    to: watch::Sender<Option<ChosenPath>>,
) -> anyhow::Result<()> {
    let settings = link_path::Settings {
        own_marks: assembly::own_marks(&config),
        sync_period: config.sync_period,
        direct: match config.ebpf.links_path {
            LinksPath::Direct => DirectPath::Always,
            _ if config.model.masquerade_ports.is_some() => DirectPath::IfNoRules,
            _ => DirectPath::Never,
        },
        scope: match config.ebpf.links_direct {
            LinksDirect::Learned => DirectScope::Learned,
            LinksDirect::Whole => DirectScope::Whole,
        },
    };
    let (report_to, judged) = watch::channel(None);
    let report = link_path::report(launcher.clone(), settings, report_to.clone());
    let report = async {
        if let Err(error) = report.await {
            let error = with_causes(&error);
            tracing::warn!(error, "cannot watch what other programs set up on this node");
            let why = format!("{}: {error}", link_path::CANNOT_READ);
            report_to.send_replace(Some(settings.path_without_evidence(why)));
        }
        pending::<()>().await;
    };
    tokio::join!(report, forward_possible(config, launcher, judged, &to));
    Ok(())
}

/// Forwards the paths. On a node without netfilter only programs can translate.
async fn forward_possible(
    config: Config,
    launcher: Launcher,
    mut judged: watch::Receiver<Option<ChosenPath>>,
    to: &watch::Sender<Option<ChosenPath>>,
) {
    let (config, launcher) = (Arc::new(config), Arc::new(launcher));
    let mut backstop_works = None;
    while judged.changed().await.is_ok() {
        let Some(mut chosen) = judged.borrow_and_update().clone() else { continue };
        if let ChosenPath { path: LinkPath::Netfilter { .. }, why } = &chosen {
            let (config, launcher) = (Arc::clone(&config), Arc::clone(&launcher));
            let probe = || spawn_blocking(move || dataplane::backstop_works(&config, &launcher));
            let works = match backstop_works {
                Some(works) => works,
                None => *backstop_works.insert(probe().await.unwrap_or(true)),
            };
            if !works {
                tracing::warn!(%why, "netfilter should translate packets that come in on links, but neither nftables nor iptables works here");
                let why = format!("neither nftables nor iptables works here. Otherwise netfilter: {why}");
                chosen = ChosenPath::new(LinkPath::Programs, why);
            }
        }
        to.send_replace(Some(chosen));
    }
}

/// Which sockets are served, and the addresses of pods whose sockets are not or were not.
#[derive(Clone)]
struct ServedSockets {
    scope: SocketScope,
    exempt_addresses: BTreeSet<IpAddr>,
}

/// Reports which sockets are served.
fn served_sockets(
    config: &Config,
    outputs: &Outputs,
    tasks: &mut Tasks,
) -> watch::Receiver<Option<ServedSockets>> {
    let (to, receiver) = watch::channel(None);
    let scope = ReportedScope { to, outputs: outputs.clone() };
    match (config.ebpf.sockets_scope, config.model.masquerade_all) {
        (SocketsScope::All, masquerade_all) => {
            if masquerade_all {
                tracing::warn!(
                    "masqueradeAll does not apply to connections that are translated at the sockets of pods, \
                     because a socket has no source to masquerade: set shunt.sockets.scope to auto"
                );
            }
            scope.set(SocketScope::All, None, BTreeSet::new());
        }
        (SocketsScope::Node, _) => scope.set_node("shunt.sockets.scope is node"),
        (SocketsScope::Auto, true) => {
            tracing::info!(
                "masqueradeAll is set, and a socket has no source to masquerade: the sockets of pods are left \
                 alone, and their connections are translated and masqueraded on links"
            );
            scope.set_node("masqueradeAll is set, and a socket has no source to masquerade");
        }
        (SocketsScope::Auto, false) => follow_redirecting_pods(scope, tasks),
    }
    receiver
}

/// Where the sockets that are served are reported to.
struct ReportedScope {
    to: watch::Sender<Option<ServedSockets>>,
    outputs: Outputs,
}

impl ReportedScope {
    /// Leaves the sockets of all pods alone.
    fn set_node(&self, why: &str) {
        self.set(SocketScope::Node, Some(why.into()), BTreeSet::new());
    }

    /// Sets the scope, and the reason if that does not follow from the scope.
    fn set(&self, scope: SocketScope, why: Option<Arc<str>>, exempt_addresses: BTreeSet<IpAddr>) {
        self.outputs.status.set_socket_scope(scope.clone(), why);
        self.to.send_replace(Some(ServedSockets { scope, exempt_addresses }));
    }
}

/// Serves all sockets but those of pods that redirect their own packets.
fn follow_redirecting_pods(scope: ReportedScope, tasks: &mut Tasks) {
    let (report_to, namespaces) = watch::channel(None);
    let report = redirecting_pods::report(report_to);
    tasks.spawn(async move {
        tokio::select! {
            error = report => if let Err(error) = error {
                let error = with_causes(&error);
                tracing::warn!(
                    error,
                    "cannot find the pods that redirect their own packets: the sockets of all pods are left \
                     alone, and served on their links"
                );
                scope.outputs.status.set_exempt_namespaces(ExemptNamespaces::new());
                scope.set_node(&error);
            },
            () = exempt(namespaces, &scope) => {}
        }
        pending().await
    });
}

/// Leaves the sockets of namespaces that redirect alone, and reports their number and names.
async fn exempt(mut redirecting: watch::Receiver<Option<RedirectingPods>>, scope: &ReportedScope) {
    let Outputs { metrics, status, .. } = &scope.outputs;
    while redirecting.changed().await.is_ok() {
        let Some(pods) = redirecting.borrow_and_update().clone() else { continue };
        let RedirectingPods { namespaces: now, addresses } = pods;
        let known = status.set_exempt_namespaces(now.clone());
        for namespace in now.iter().filter(|(inode, _)| !known.contains_key(inode)).map(|(_, new)| new) {
            tracing::info!(%namespace, "this pod redirects its own packets: socket programs skip its sockets, and its packets are translated on its link");
        }
        for namespace in known.iter().filter(|(inode, _)| !now.contains_key(inode)).map(|(_, old)| old) {
            tracing::info!(%namespace, "this pod does not redirect its own packets any more: its sockets are served");
        }
        metrics.set_exempt_namespaces(now.len());
        let (served, why) = scope_without(&now);
        scope.set(served, why.map(Into::into), addresses);
    }
}

/// Returns the scope without these namespaces. On kernels before 5.14 their cookies are not known:
/// then the sockets of all pods are left alone while there are any. The text is the reason for
/// that.
fn scope_without(exempt: &ExemptNamespaces) -> (SocketScope, Option<&'static str>) {
    let cookies: Option<BTreeSet<_>> = exempt.values().map(|namespace| namespace.cookie).collect();
    match cookies {
        Some(none) if none.is_empty() => (SocketScope::All, None),
        Some(cookies) => (SocketScope::AllBut(cookies), None),
        None => (SocketScope::Node, Some("pods redirect, and kernels before 5.14 cannot exempt single pods")),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io,
        sync::atomic::{AtomicUsize, Ordering},
    };

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn ports_of_former_programs_are_facts_until_the_programs_are_removed() {
        let (links, of_links) = watch::channel(Some(NodeFacts::default()));
        let (to, mut facts) = watch::channel(None::<NodeFacts>);
        let ports = PortRange { first: 1_024, last: 29_999 };
        let looks = AtomicUsize::new(0);
        let read = || (looks.fetch_add(1, Ordering::Relaxed) < 3).then_some(ports);
        let reported = async {
            let mut reported = Vec::new();
            while reported.last() != Some(&None) {
                facts.changed().await.expect("facts");
                reported.push(facts.borrow_and_update().as_ref().expect("facts").former_programs_ports);
                // Frequent changes of links keep nobody from looking.
                links.send_modify(|links| links.as_mut().expect("facts").local_routes.clear());
            }
            drop(facts);
            reported
        };
        let adding = until_programs_are_removed(ports, read, of_links, to);
        let ((), reported) = tokio::join!(adding, reported);
        assert_eq!(reported, [Some(ports), None], "what is the same is not sent again");
        assert_eq!(looks.into_inner(), 4, "nobody looks afterwards");
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_report_is_repeated_until_nobody_listens() {
        let (to, receiver) = watch::channel(0);
        let mut attempts = 0;
        let mut receiver = Some(receiver);
        repeat(&to, || {
            attempts += 1;
            if attempts == 3 {
                receiver = None;
            }
            let (operation, object) = ("list links and addresses over", "rtnetlink".into());
            let source = io::ErrorKind::Interrupted.into();
            async { Err(KernelError::Call { operation, object, source }) }
        })
        .await;
        assert_eq!(attempts, 3);
    }

    #[tokio::test(start_paused = true)]
    async fn a_report_that_ends_is_not_repeated() {
        let (to, _receiver) = watch::channel(0);
        let mut attempts = 0;
        repeat(&to, || {
            attempts += 1;
            async { Ok(()) }
        })
        .await;
        assert_eq!(attempts, 1);
    }
}
