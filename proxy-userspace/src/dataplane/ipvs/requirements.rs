//! Checks what the mode needs from the kernel, in a temporary network namespace.

use std::net::SocketAddr;

use super::{
    error::IpvsError,
    settings::{DUMMY_LINK, IpvsSettings},
};
use crate::{
    kernel::{
        ipset::Ipset,
        ipvs::{self, Change, Ipvs, VirtualKey, VirtualServer},
        netns,
        own_link::OwnLink,
    },
    model::Protocol,
};

/// An address that no Service has (RFC 5737). kube-proxy checks with the same one.
const TEST_ADDRESS: ([u8; 4], u16) = ([198, 51, 100, 0], 20_000);

/// Checks the requirements of the mode with these settings. An error names what is missing and what
/// to do about it.
pub fn check(settings: &IpvsSettings) -> Result<(), IpvsError> {
    ipvs::load_module(&settings.launcher);
    netns::within_new(|| check_namespace(settings))?
}

fn check_namespace(settings: &IpvsSettings) -> Result<(), IpvsError> {
    let mut ipvs = Ipvs::open().map_err(IpvsError::NoIpvs)?;
    let address = SocketAddr::from(TEST_ADDRESS);
    let key = VirtualKey { protocol: Protocol::Tcp, address };
    let server = VirtualServer::new(settings.scheduler.clone(), address.ip());
    // The kernel loads the module of the scheduler automatically.
    if let Some((_, source)) = ipvs.commit(&[Change::AddServer(key, server)])?.into_iter().next() {
        return Err(IpvsError::NoScheduler { name: settings.scheduler.to_string(), source });
    }
    OwnLink::open(DUMMY_LINK)?.create_dummy().map_err(IpvsError::NoDummyLinks)?;
    Ipset::new(&settings.launcher).names().map_err(IpvsError::NoIpset)?;
    Ok(())
}
