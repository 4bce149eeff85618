//! Creates the dataplane of a mode, and removes what modes left in the kernel.

use std::sync::Arc;

use proxy_userspace::{
    assembly,
    config::Config,
    dataplane::{
        Backstopped, Dataplane, DataplaneRenderer, Mode, RenderError, Renderer,
        ebpf::{Ebpf, TracingPrograms},
        iptables::Iptables,
        ipvs::{self, Ipvs, LinkRemoval},
        nftables::{self, Nftables},
    },
    kernel::{
        self, KernelError,
        bpf::PinDir,
        capabilities,
        command::Launcher,
        ruleset_changes::{TableChangeFlag, TableChanges},
        sysctl,
    },
    net::PortRange,
    probe,
    trace::LoadPrograms,
};
use tokio::sync::Notify;

/// Fails if a capability is missing that every mode needs. Logs what does not work if another is
/// missing.
pub(super) fn check_capabilities(mode: Mode) -> Result<(), KernelError> {
    capabilities::check_net_admin()?;
    let (capability, consequence) = match mode {
        Mode::Ebpf => (
            capabilities::SYS_ADMIN,
            "CAP_SYS_ADMIN is missing: UDP sockets of pods that are connected to a removed endpoint keep sending to it",
        ),
        Mode::Nftables => return Ok(()),
        Mode::Iptables | Mode::Ipvs => (
            capabilities::NET_RAW,
            "CAP_NET_RAW is missing: shunt cannot use iptables-legacy, if this node uses it",
        ),
    };
    if !capabilities::is_held(capability)? {
        tracing::warn!("{consequence}");
    }
    Ok(())
}

/// Creates the dataplane of the configured mode. `drift` is notified if others change its rules.
pub(super) fn renderer(
    config: &Config,
    launcher: &Launcher,
    drift: &Arc<Notify>,
) -> anyhow::Result<Box<dyn Renderer>> {
    let created = match config.mode {
        Mode::Nftables => return nftables(config, launcher, Arc::clone(drift)),
        Mode::Ebpf => ebpf(config, launcher, drift),
        Mode::Iptables => boxed(Iptables::new(assembly::iptables(config, launcher))),
        Mode::Ipvs => boxed(Ipvs::new(assembly::ipvs(config, launcher))),
    };
    // The kernel's own errors rarely name what is missing. The probe does.
    created.map_err(|error| match missing(config, launcher) {
        Some(missing) => error.context(missing),
        None => error,
    })
}

/// Returns what loads programs that trace.
pub(super) fn load_tracing(config: &Config, launcher: &Launcher) -> LoadPrograms {
    let settings = assembly::ebpf(config, launcher);
    Arc::new(move |packets| TracingPrograms::load(&settings, packets))
}

/// Creates the programs. Their backstop is created when something needs it.
fn ebpf(config: &Config, launcher: &Launcher, drift: &Arc<Notify>) -> anyhow::Result<Box<dyn Renderer>> {
    reserve_source_ports(config);
    let mut programs = Ebpf::new(&assembly::ebpf(config, launcher))?;
    programs.load_link_programs()?;
    let notified = Arc::clone(drift);
    programs.check_in_threads(move || notified.notify_one())?;
    let programs = boxed::<Ebpf>(Ok(programs))?;
    let policy = config.ebpf.backstop;
    let (config, launcher, drift) = (config.clone(), launcher.clone(), Arc::clone(drift));
    let create = move || backstop(&config, &launcher, &drift).map_err(Into::into);
    Ok(Box::new(Backstopped::new(programs, policy, Box::new(create))))
}

/// Reserves the source ports of masqueraded flows that the kernel might choose for a socket of the
/// node: a flow with the same port would get the replies to the socket. If these are most of the
/// kernel's ports, the node could run out of ports, so this only warns.
fn reserve_source_ports(config: &Config) {
    let Some(ports) = config.model.masquerade_ports else { return };
    if config.model.masquerades_with_direct_path {
        return;
    }
    match sysctl::local_ports() {
        Ok(local) => {
            if let Some(common) = ports.common(local) {
                reserve_common_ports(common, local);
            }
        }
        Err(error) => {
            tracing::warn!(%error, "cannot compare the source ports of masqueraded flows with those of sockets");
        }
    }
}

/// Reserves the source ports that are also ports of the kernel (`local`).
fn reserve_common_ports(ports: PortRange, local: PortRange) {
    if ports.count() > local.count() / 2 {
        tracing::warn!(
            %ports,
            %local,
            "sockets of the node may get these source ports of masqueraded flows: most of \
             net.ipv4.ip_local_port_range is in shunt.links.masqueradePorts, which should not overlap it"
        );
        return;
    }
    match sysctl::reserve_local_ports(ports) {
        Ok(true) => tracing::info!(
            %ports,
            "reserved source ports of masqueraded flows: sockets of the node get others (net.ipv4.ip_local_reserved_ports)"
        ),
        Ok(false) => {}
        Err(error) => tracing::warn!(
            %error,
            %ports,
            "sockets of the node may get these source ports of masqueraded flows, because they cannot be reserved"
        ),
    }
}

/// Creates the nftables mode, or the iptables mode where that does not work.
fn backstop(
    config: &Config,
    launcher: &Launcher,
    drift: &Arc<Notify>,
) -> anyhow::Result<(Mode, Box<dyn Renderer>)> {
    let masquerade_mark = config.ebpf.masquerade_mark;
    // The programs serve node ports on loopback addresses; the rules would need route_localnet.
    let of_mode = |mode| Config { mode, masquerade_mark, localhost_node_ports: false, ..config.clone() };
    match renderer(&of_mode(Mode::Nftables), launcher, drift) {
        Ok(renderer) => Ok((Mode::Nftables, renderer)),
        Err(error) => {
            tracing::info!(%error, "the backstop uses iptables");
            Ok((Mode::Iptables, renderer(&of_mode(Mode::Iptables), launcher, drift)?))
        }
    }
}

fn boxed<D>(dataplane: Result<D, D::Error>) -> anyhow::Result<Box<dyn Renderer>>
where
    D: Dataplane<State: Send> + Send + 'static,
{
    Ok(Box::new(DataplaneRenderer::new(dataplane?)))
}

fn nftables(config: &Config, launcher: &Launcher, drift: Arc<Notify>) -> anyhow::Result<Box<dyn Renderer>> {
    // A kernel that lacks a feature rejects only the rule that needs it, once there is one.
    if let Some(missing) = missing(config, launcher) {
        anyhow::bail!(missing);
    }
    let flag = Arc::new(TableChangeFlag::default());
    let dataplane = Nftables::new(&assembly::nftables(config), Arc::clone(&flag))?;
    let changes = TableChanges::open(nftables::TABLE, dataplane.port(), flag)?;
    tokio::spawn(async move {
        if let Err(error) = changes.report(drift).await {
            tracing::warn!(%error, "cannot watch the nftables tables for changes: shunt reads them every syncPeriod");
        }
    });
    Ok(Box::new(DataplaneRenderer::new(dataplane)))
}

/// Probes the kernel. Returns true if a mode works that can be the backstop.
pub(super) fn backstop_works(config: &Config, launcher: &Launcher) -> bool {
    let of_mode = |mode| Config { mode, ..config.clone() };
    [Mode::Nftables, Mode::Iptables].into_iter().any(|mode| missing(&of_mode(mode), launcher).is_none())
}

/// Probes the kernel. Returns a sentence on what the mode lacks, or `None` if it lacks nothing.
pub(super) fn missing(config: &Config, launcher: &Launcher) -> Option<String> {
    let mode = config.mode;
    let evaluation = probe::evaluate(&kernel::probe::facts(launcher, &config.ebpf.pin_dir));
    let support = evaluation.modes.into_iter().find(|support| support.mode == mode)?;
    let missing: Vec<_> = support.missing.iter().map(ToString::to_string).collect();
    (!missing.is_empty()).then(|| format!("the mode {mode} does not work here: {}", missing.join("; ")))
}

/// Removes everything that any mode, or kube-proxy, wrote into the kernel. Continues after errors.
pub(super) fn cleanup(config: &Config, launcher: &Launcher) -> Vec<RenderError> {
    let mut errors = cleanup_ebpf(config, launcher);
    errors.extend(wrap(Nftables::cleanup_tables()));
    errors.extend(wrap(Iptables::remove(&assembly::iptables(config, launcher))));
    // After the chains that use its sets.
    errors.extend(wrap(ipvs::remove(&assembly::ipvs(config, launcher), LinkRemoval::Now)));
    errors
}

/// Removes everything that other modes, or kube-proxy, wrote into the kernel, except the rules of
/// the mode `backstop`. Continues after errors. Connections that netfilter translates stay with
/// conntrack.
pub(super) fn remove_other_modes(
    config: &Config,
    backstop: Option<Mode>,
    launcher: &Launcher,
) -> Vec<RenderError> {
    let is_kept = |mode| config.mode == mode || backstop == Some(mode);
    let mut errors = if is_kept(Mode::Ebpf) { Vec::new() } else { cleanup_unused_ebpf(config, launcher) };
    if !is_kept(Mode::Nftables) {
        errors.extend(wrap(Nftables::cleanup_tables()));
    }
    let iptables = assembly::iptables(config, launcher);
    errors.extend(wrap(if is_kept(Mode::Iptables) {
        Iptables::remove_others(&iptables)
    } else if is_kept(Mode::Ipvs) {
        Iptables::remove_all_but_ipvs(&iptables)
    } else {
        Iptables::remove(&iptables)
    }));
    if !is_kept(Mode::Ipvs) {
        errors.extend(wrap(ipvs::remove(&assembly::ipvs(config, launcher), LinkRemoval::IfUnused)));
    }
    errors
}

/// Locks the pin directory, so that no other shunt starts meanwhile. Fails if another process uses
/// it, a shunt on this node or on a node that shares the bpf filesystem, and if that is unknown.
/// Returns `None` if the directory has no pins: it does not exist, or is not on a bpf filesystem.
pub(super) fn lock_pins(config: &Config) -> Result<Option<PinDir>, KernelError> {
    match PinDir::lock_existing(&config.ebpf.pin_dir) {
        Err(KernelError::NoBpffs(_)) => Ok(None),
        locked => locked,
    }
}

/// Does what [`cleanup_ebpf`] does, unless another process uses the pin directory. If it cannot be
/// opened, removes only the rules.
fn cleanup_unused_ebpf(config: &Config, launcher: &Launcher) -> Vec<RenderError> {
    match lock_pins(config) {
        Ok(_locked) => cleanup_ebpf(config, launcher),
        Err(in_use @ KernelError::PinsInUse { .. }) => wrap(vec![in_use]),
        Err(error) => {
            let mut errors = wrap(vec![error]);
            errors.extend(wrap(Ebpf::remove_rules(&assembly::ebpf(config, launcher))));
            errors
        }
    }
}

/// Removes programs, maps, and the rules that work with them.
pub(super) fn cleanup_ebpf(config: &Config, launcher: &Launcher) -> Vec<RenderError> {
    let settings = assembly::ebpf(config, launcher);
    let mut errors = Ebpf::cleanup_at(&settings.pin_dir);
    errors.extend(Ebpf::remove_rules(&settings));
    wrap(errors)
}

fn wrap<E: std::error::Error + Send + Sync + 'static>(errors: Vec<E>) -> Vec<RenderError> {
    errors.into_iter().map(|error| RenderError::Cleanup(error.into())).collect()
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, Permissions},
        os::unix::fs::PermissionsExt as _,
        path::Path,
        process,
    };

    use proxy_userspace::config::{Environment, Flags};

    use super::*;

    /// Needs root, as every test of the kernel.
    #[test]
    fn a_pin_directory_that_cannot_be_opened_is_not_taken_as_unused() {
        let lock = |path: &str| {
            let flags = Flags::parse(["shunt", "--bpf-pin-dir", path]).expect("valid flags");
            lock_pins(&Config::load(&flags, &Environment::of_this_process()).expect("valid"))
        };
        assert!(lock("/sys/fs/bpf/shunt-test-none").expect("it does not exist").is_none());
        assert!(lock("/tmp").expect("it cannot have pins").is_none());
        let path = format!("/sys/fs/bpf/shunt-test-lock-{}", process::id());
        // This mounts a bpf filesystem if there is none.
        drop(PinDir::create(Path::new(&path)).expect("created"));
        fs::set_permissions(&path, Permissions::from_mode(0o777)).expect("permitted");
        let locked = lock(&path).map(|pins| pins.is_some());
        fs::remove_dir_all(&path).expect("removed");
        assert!(matches!(locked, Err(KernelError::PinsNotPrivate { .. })), "{locked:?}");
    }
}
