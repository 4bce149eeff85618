//! Reads what is in the kernel while the proxy runs, and changes nothing.
#![forbid(unsafe_code)]

pub mod probe;

use std::{net::SocketAddr, path::Path};

use aya::maps::{HashMap, Map, MapData, MapError};
use proxy_common::layout::{ServiceKey, ServiceValue};

use crate::{dataplane::ebpf, kernel::KernelError, model::Protocol};

/// The pinned map `services` of the eBPF mode.
pub struct PinnedServices(HashMap<MapData, ServiceKey, ServiceValue>);

impl PinnedServices {
    /// Opens the map in a pin directory.
    pub fn open(pin_dir: &Path) -> Result<Self, KernelError> {
        let path = pin_dir.join("services");
        let object = path.display().to_string();
        MapData::from_pin(path)
            .and_then(Map::from_map_data)
            .and_then(HashMap::try_from)
            .map(Self)
            .map_err(KernelError::bpf("open map", object))
    }

    /// How many endpoints callers on this node have behind a destination; none where it is no Service's.
    pub fn endpoint_count(
        &self,
        destination: SocketAddr,
        protocol: Protocol,
    ) -> Result<Option<u32>, KernelError> {
        let key = ServiceKey::new(destination.ip().into(), destination.port(), ebpf::proto(protocol));
        match self.0.get(&key, 0) {
            Ok(value) => Ok(Some(value.inside_count)),
            Err(MapError::KeyNotFound) => Ok(None),
            Err(error) => Err(KernelError::bpf("read map", "services")(error)),
        }
    }
}
