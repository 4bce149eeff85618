//! Tries what the mode needs of the kernel before anything is changed, in a network namespace that goes with the trial.

use std::{net::SocketAddr, thread};

use nix::sched::{CloneFlags, unshare};

use super::{DUMMY_LINK, IpvsError, IpvsSettings};
use crate::{
    kernel::{
        KernelError,
        dummy_link::DummyLink,
        ipset::Ipset,
        ipvs::{self, Change, Ipvs, VirtualKey, VirtualServer},
    },
    model::Protocol,
};

/// Where no Service is (RFC 5737), as upstream's trial.
const NOWHERE: &str = "198.51.100.0:20000";

/// An error tells what is missing and what to do about it.
pub(super) fn check(settings: &IpvsSettings) -> Result<(), IpvsError> {
    ipvs::load_module(&settings.path);
    let tried = || {
        unshare(CloneFlags::CLONE_NEWNET)
            .map_err(|error| KernelError::call("make", "a network namespace to try IPVS in")(error.into()))?;
        try_ipvs(settings)
    };
    // Commands are started by this thread too, so that they are in its namespace.
    thread::scope(|scope| scope.spawn(tried).join()).unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn try_ipvs(settings: &IpvsSettings) -> Result<(), IpvsError> {
    let mut ipvs = Ipvs::open().map_err(|source| IpvsError::NoIpvs { source })?;
    let address: SocketAddr = NOWHERE.parse().unwrap_or(SocketAddr::from(([198, 51, 100, 0], 20_000)));
    let key = VirtualKey { protocol: Protocol::Tcp, address };
    let server = VirtualServer::new(settings.scheduler.clone(), address.ip());
    // The kernel loads the scheduler's module by itself.
    if let Some((_, source)) = ipvs.commit(&[Change::AddServer(key, server)])?.into_iter().next() {
        return Err(IpvsError::NoScheduler { name: settings.scheduler.to_string(), source });
    }
    DummyLink::open(DUMMY_LINK)?.create().map_err(|source| IpvsError::NoDummyLinks { source })?;
    Ipset::new(&settings.path).names().map_err(|source| IpvsError::NoIpset { source })?;
    Ok(())
}
