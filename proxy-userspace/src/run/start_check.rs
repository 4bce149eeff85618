//! Checks in the running process what a start with a changed configuration would refuse: a restart
//! would end this process.

use std::net::SocketAddr;

use proxy_userspace::{
    assembly,
    config::{Config, ObjectSource},
    dataplane::{Mode, ipvs},
    health::{self, BindError},
    kernel::{KernelError, bpf::PinDir, cgroup::Cgroup},
    net::ProxyVariables,
    watch::{self, ManifestSource, WatchError, ignore_api_requests},
};
use tokio::{net::TcpListener, task};

use super::{ModeChoice, dataplane};

/// Fails if a start with the configuration `new` would fail. `choose` chooses its mode, as a start
/// does.
pub(super) async fn check(
    running: &Config,
    new: &Config,
    proxies: &ProxyVariables,
    choose: impl FnOnce() -> anyhow::Result<ModeChoice> + Send + 'static,
) -> anyhow::Result<()> {
    check_source(&new.source, proxies).await?;
    check_addresses(running, new)?;
    let running = running.clone();
    // Probes of the kernel run commands and take a while.
    task::spawn_blocking(move || check_mode(&running, &choose()?)).await?
}

/// Fails if the directory of manifests or the kubeconfig is not there. This costs nothing, so that
/// a start can check it before it changes the node.
pub(super) async fn check_path(source: &ObjectSource, proxies: &ProxyVariables) -> Result<(), WatchError> {
    let path = match source {
        ObjectSource::Manifests(directory) => Some(directory),
        ObjectSource::Api { kubeconfig, .. } => kubeconfig.as_ref(),
    };
    match path {
        Some(path) if !path.exists() => check_source(source, proxies).await,
        _ => Ok(()),
    }
}

async fn check_source(source: &ObjectSource, proxies: &ProxyVariables) -> Result<(), WatchError> {
    match source {
        ObjectSource::Manifests(directory) => ManifestSource::new(directory).check(),
        ObjectSource::Api { kubeconfig, servers, .. } => {
            let client =
                watch::kube_client(kubeconfig.as_deref(), servers, proxies, &ignore_api_requests()).await;
            client.map(drop)
        }
    }
}

/// Listens on the addresses of the servers for a moment, if a start would end without them.
fn check_addresses(running: &Config, new: &Config) -> Result<(), BindError> {
    if !new.bind_address_hard_fail {
        return Ok(());
    }
    let is_own_port = |port| addresses(running).iter().any(|(_, address)| address.port() == port);
    // All at once: two servers cannot share an address.
    let mut listeners: Vec<(u16, TcpListener)> = Vec::new();
    for (server, address) in addresses(new) {
        let port = address.port();
        // The ports of this process are free after the restart. Another port stands for each.
        let before = listeners.iter().find(|(wanted, _)| *wanted == port);
        let stand_in = before.and_then(|(_, listener)| Some(listener.local_addr().ok()?.port()));
        let bound = if is_own_port(port) { stand_in.unwrap_or(0) } else { port };
        let listener = health::bind(server, SocketAddr::new(address.ip(), bound))
            .map_err(|error| BindError { address, ..error })?;
        listeners.push((port, listener));
    }
    Ok(())
}

fn addresses(config: &Config) -> Vec<(&'static str, SocketAddr)> {
    let named = [("healthz", config.healthz_bind_address), ("metrics", config.metrics_bind_address)];
    named.into_iter().filter_map(|(server, address)| Some((server, address?))).collect()
}

/// Probes for what the mode needs, unless it runs already.
fn check_mode(running: &Config, choice: &ModeChoice) -> anyhow::Result<()> {
    let new = &choice.config;
    let runs = running.mode == new.mode && running.ebpf.pin_dir == new.ebpf.pin_dir;
    if !runs && let Some(missing) = dataplane::missing(new, &choice.launcher) {
        anyhow::bail!(missing);
    }
    match new.mode {
        Mode::Ebpf => check_directories(running, new)?,
        // Also if the mode runs: a start looks for the scheduler, for which there is no probe.
        Mode::Ipvs => ipvs::check_requirements(&assembly::ipvs(new, &choice.launcher))?,
        Mode::Nftables | Mode::Iptables => {}
    }
    Ok(())
}

/// Checks the directories of the ebpf mode.
fn check_directories(running: &Config, new: &Config) -> Result<(), KernelError> {
    Cgroup::open(&new.ebpf.cgroup_root)?;
    let is_locked_here = running.mode == Mode::Ebpf && running.ebpf.pin_dir == new.ebpf.pin_dir;
    if !is_locked_here {
        PinDir::lock_existing(&new.ebpf.pin_dir)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proxy_userspace::{
        config::{Environment, Flags},
        kernel::command::Launcher,
    };

    use super::*;

    #[tokio::test]
    async fn a_source_that_is_not_there_is_found_without_the_kernel() {
        let check = async |flag| {
            let flags = Flags::parse(["shunt", "--mode", "nftables", flag, "/nonexistent"]);
            let environment = Environment::of_this_process();
            let config = Config::load(&flags.expect("valid flags"), &environment).expect("valid");
            check_path(&config.source, &environment.proxies).await
        };
        for flag in ["--manifests", "--kubeconfig"] {
            assert!(check(flag).await.is_err(), "{flag}");
        }
        assert!(check("--bpf-pin-dir").await.is_ok(), "the service account may come later");
    }

    /// Needs root, as every test of the kernel. A kernel without IPVS lacks every scheduler.
    #[test]
    fn a_scheduler_that_the_kernel_lacks_is_refused_while_the_ipvs_mode_runs() {
        let choice = |scheduler| {
            let flags = Flags::parse(["shunt", "--proxy-mode", "ipvs", "--ipvs-scheduler", scheduler]);
            let environment = Environment::of_this_process();
            let chosen = ModeChoice::new(flags.expect("valid flags"), environment, Launcher::default());
            chosen.expect("a valid configuration")
        };
        let checked = check_mode(&choice("rr").config, &choice("nosuch"));
        assert!(checked.is_err(), "a start would fail");
    }
}
