//! Which source and which dataplane a configuration stands for.

use proxy_userspace::{
    config::{Config, MapSizes, Mode, ObjectSource},
    dataplane::{
        RenderError, Renderer, Rendering,
        ebpf::{self, Ebpf, EbpfSettings},
    },
    kernel,
    model::{NodeFacts, WatchEvent},
    watch::{self, ApiSource, ManifestSource},
};
use tokio::sync::{mpsc, watch as channel};

/// The dataplane of the configured mode.
pub(super) fn renderer(config: &Config) -> anyhow::Result<Box<dyn Renderer>> {
    match config.mode {
        Mode::Ebpf => Ok(Box::new(Rendering::new(Ebpf::new(&ebpf_settings(config))?))),
    }
}

/// Removes what any mode ever put into the kernel; goes on past errors.
pub(super) fn cleanup(config: &Config) -> Vec<RenderError> {
    let errors = Ebpf::cleanup_at(&config.ebpf.pin_dir);
    errors
        .into_iter()
        .map(|source| RenderError::Cleanup {
            source: source.into(),
        })
        .collect()
}

fn ebpf_settings(config: &Config) -> EbpfSettings {
    EbpfSettings {
        cgroup_root: config.ebpf.cgroup_root.clone(),
        pin_dir: config.ebpf.pin_dir.clone(),
        map_sizes: map_sizes(&config.ebpf.map_sizes),
    }
}

fn map_sizes(given: &MapSizes) -> ebpf::MapSizes {
    let default = ebpf::MapSizes::default();
    ebpf::MapSizes {
        services: given.services.unwrap_or(default.services),
        endpoints: given.endpoints.unwrap_or(default.endpoints),
        members: given.members.unwrap_or(default.members),
        source_ranges: given.source_ranges.unwrap_or(default.source_ranges),
        node_addresses: given.node_addresses.unwrap_or(default.node_addresses),
        affinity: given.affinity.unwrap_or(default.affinity),
        udp_flows: given.udp_flows.unwrap_or(default.udp_flows),
        udp_sockets: given.udp_sockets.unwrap_or(default.udp_sockets),
    }
}

/// Feeds the loop with objects.
pub(super) async fn objects(config: Config, to: mpsc::Sender<WatchEvent>) -> anyhow::Result<()> {
    match config.source {
        ObjectSource::Manifests(directory) => ManifestSource::new(directory).run(to).await?,
        ObjectSource::Api { kubeconfig, master } => {
            let client = watch::kube_client(kubeconfig.as_deref(), master.as_deref()).await?;
            ApiSource::new(client, &*config.model.node_name).run(to).await?;
        }
    }
    Ok(())
}

/// Feeds the loop with this node's addresses.
pub(super) async fn node_facts(to: channel::Sender<Option<NodeFacts>>) -> anyhow::Result<()> {
    Ok(kernel::addresses::report(to).await?)
}
