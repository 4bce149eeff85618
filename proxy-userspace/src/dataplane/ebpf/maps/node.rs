//! The map `node`: the facts about the node that the programs read.

use std::{path::Path, time::Duration};

use aya::maps::{Array, MapData};
use proxy_common::{
    Addr,
    layout::{
        LAYOUT_VERSION, LocalDetection, Masquerading, NewFlows, NodeValue, Refusing, STATE_LAYOUT_VERSION,
        SocketScope,
    },
};

use super::{
    super::{
        plan::{
            state::State,
            step::{DirectEpoch, DirectFields, MasqueradeFields, TunnelFields},
        },
        rules::Marks,
    },
    Maps, failed, open_pinned,
};
use crate::kernel::{KernelError, bpf::first_words, clock, netns::NetnsCookie};

/// What a plan sets in `node`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NodeSettings {
    pub(super) local_detection: u32,
    pub(super) socket_scope: u16,
    pub(super) new_flows: u16,
    pub(super) masquerade: MasqueradeFields,
    pub(super) direct: DirectFields,
    pub(super) tunnel: TunnelFields,
}

impl NodeSettings {
    /// Returns what they are as this process knows them.
    pub(crate) const fn of_state(state: &State) -> Self {
        Self {
            local_detection: state.local_detection,
            socket_scope: state.socket_scope,
            new_flows: state.new_flows,
            masquerade: state.masquerade,
            direct: state.direct,
            tunnel: state.tunnel,
        }
    }
}

impl Maps {
    /// Writes the network namespace of the node and the versions of the layout.
    ///
    /// If the namespace is unknown, the one that an earlier process found out stays. What the plan
    /// sets stays too, since the programs of an earlier process may still run.
    pub(crate) fn set_node(&mut self, netns: Option<NetnsCookie>) -> Result<(), KernelError> {
        let before = self.node.get(&0, 0).ok();
        let value = NodeValue {
            netns: netns
                .map(|cookie| cookie.0)
                .or(before.map(|value| value.netns))
                .unwrap_or(NodeValue::NETNS_UNKNOWN),
            layout: LAYOUT_VERSION,
            masquerade_mark: self.marks.masquerade,
            reject_mark: self.marks.reject,
            local_detection: before.map_or(LocalDetection::None as u32, |value| value.local_detection),
            state_layout: STATE_LAYOUT_VERSION,
            socket_scope: before.map_or(SocketScope::All as u16, |value| value.socket_scope),
            new_flows: before.map_or(NewFlows::Translate as u16, |value| value.new_flows),
            settling_until_ns: 0,
            masquerading: before.map_or(Masquerading::Netfilter as u16, |value| value.masquerading),
            first_port: before.map_or(0, |value| value.first_port),
            last_port: before.map_or(0, |value| value.last_port),
            direct_scope: before.map_or(0, |value| value.direct_scope),
            direct_epoch: before.map_or(0, |value| value.direct_epoch),
            direct_lease_ns: before.map_or(0, |value| value.direct_lease_ns),
            tunnel_link: before.map_or(0, |value| value.tunnel_link),
            tunnel_mtu: before.map_or(0, |value| value.tunnel_mtu),
            tunnel_v4: before.map_or(Addr::UNSPECIFIED_V6, |value| value.tunnel_v4),
            tunnel_v6: before.map_or(Addr::UNSPECIFIED_V6, |value| value.tunnel_v6),
            tunnel_returns: before.map_or(0, |value| value.tunnel_returns),
            refusing: before.map_or(Refusing::Netfilter as u32, |value| value.refusing),
        };
        self.node.set(0, value, 0).map_err(failed("write", "node"))
    }

    fn update_node(&mut self, update: impl FnOnce(&mut NodeValue)) -> Result<(), KernelError> {
        update_node(&mut self.node, update)
    }

    /// Sets the marks that the programs put on packets.
    pub(crate) fn set_marks(&mut self, marks: Marks) -> Result<(), KernelError> {
        self.update_node(|node| {
            node.masquerade_mark = marks.masquerade;
            node.reject_mark = marks.reject;
        })?;
        self.marks = marks;
        Ok(())
    }

    /// Sets how the programs recognize local clients.
    pub(crate) fn set_local_detection(&mut self, detection: LocalDetection) -> Result<(), KernelError> {
        self.update_node(|node| node.local_detection = detection as u32)
    }

    /// Sets which sockets the programs serve.
    pub(crate) fn set_socket_scope(&mut self, scope: SocketScope) -> Result<(), KernelError> {
        self.update_node(|node| node.socket_scope = scope as u16)
    }

    /// Sets what masquerades.
    pub(crate) fn set_masquerade(&mut self, fields: MasqueradeFields) -> Result<(), KernelError> {
        let MasqueradeFields { masquerading, first_port, last_port } = fields;
        self.update_node(|node| {
            (node.masquerading, node.first_port, node.last_port) = (masquerading, first_port, last_port);
        })
    }

    /// Sets which flows take the direct path.
    pub(crate) fn set_direct(&mut self, fields: DirectFields) -> Result<(), KernelError> {
        let DirectFields { epoch, scope, lease_ns } = fields;
        self.update_node(|node| {
            (node.direct_epoch, node.direct_scope, node.direct_lease_ns) = (epoch.0, scope, lease_ns);
        })
    }

    /// Sets what refuses packets.
    pub(crate) fn set_refusing(&mut self, refusing: Refusing) -> Result<(), KernelError> {
        self.update_node(|node| node.refusing = refusing as u32)
    }

    /// Returns the [`Refusing`].
    pub(crate) fn refusing(&self) -> Result<u32, KernelError> {
        Ok(self.node.get(&0, 0).map_err(failed("read", "node"))?.refusing)
    }

    /// Sets the tunnel to other nodes.
    pub(crate) fn set_tunnel(&mut self, fields: TunnelFields) -> Result<(), KernelError> {
        let TunnelFields { link, mtu, v4, v6, returns } = fields;
        self.update_node(|node| {
            (node.tunnel_link, node.tunnel_mtu) = (link, mtu);
            (node.tunnel_v4, node.tunnel_v6, node.tunnel_returns) = (v4, v6, returns);
        })
    }

    /// Sets what the link programs do with new flows.
    pub(crate) fn set_new_flows(&mut self, new_flows: NewFlows) -> Result<(), KernelError> {
        self.update_node(|node| node.new_flows = new_flows as u16)
    }

    /// Tells the programs that flows may be missing during this time from now on. Zero ends it.
    pub(crate) fn set_settling(&mut self, duration: Duration) -> Result<(), KernelError> {
        let until = if duration.is_zero() { Duration::ZERO } else { clock::monotonic()? + duration };
        self.update_node(|node| node.settling_until_ns = clock::nanos(until))
    }

    /// Returns what a plan sets in `node`.
    pub(crate) fn node_settings(&self) -> Result<NodeSettings, KernelError> {
        let node = self.node.get(&0, 0).map_err(failed("read", "node"))?;
        let NodeValue { masquerading, first_port, last_port, .. } = node;
        Ok(NodeSettings {
            local_detection: node.local_detection,
            socket_scope: node.socket_scope,
            new_flows: node.new_flows,
            masquerade: MasqueradeFields { masquerading, first_port, last_port },
            direct: DirectFields {
                epoch: DirectEpoch(node.direct_epoch),
                scope: node.direct_scope,
                lease_ns: node.direct_lease_ns,
            },
            tunnel: TunnelFields {
                link: node.tunnel_link,
                mtu: node.tunnel_mtu,
                v4: node.tunnel_v4,
                v6: node.tunnel_v6,
                returns: node.tunnel_returns,
            },
        })
    }
}

/// Changes the only value of the map `node`.
pub(crate) fn update_node(
    node: &mut Array<MapData, NodeValue>,
    update: impl FnOnce(&mut NodeValue),
) -> Result<(), KernelError> {
    let mut value = node.get(&0, 0).map_err(failed("read", "node"))?;
    update(&mut value);
    node.set(0, value, 0).map_err(failed("write", "node"))
}

/// Returns the value of the map `node` that is pinned in a directory. Returns `None` if there is no
/// such map, or if the maps have another layout.
pub(crate) fn pinned_node(directory: &Path) -> Result<Option<NodeValue>, KernelError> {
    if pinned_layouts(directory).is_none_or(|(layout, _)| layout != LAYOUT_VERSION) {
        return Ok(None);
    }
    let node: Array<MapData, NodeValue> = open_pinned(directory, "node")?;
    node.get(&0, 0).map(Some).map_err(failed("read", "node"))
}

/// Returns the marks that the programs with the maps pinned in a directory use. Returns `None` if
/// there are no such maps, or if they have another layout.
pub(crate) fn pinned_marks(directory: &Path) -> Option<Marks> {
    let node = pinned_node(directory).ok()??;
    let NodeValue { masquerade_mark: masquerade, reject_mark: reject, .. } = node;
    (masquerade != 0).then_some(Marks { masquerade, reject })
}

/// Returns the layout versions of the maps pinned in a directory: that of all maps, and that of the
/// maps with [`MapContent::State`]. Returns `None` if no map `node` is pinned there. These two
/// fields have the same position in every version; the others may not.
pub(crate) fn pinned_layouts(directory: &Path) -> Option<(u32, u32)> {
    first_words(&directory.join("node")).ok().map(|[layout, state_layout]| (layout, state_layout))
}
