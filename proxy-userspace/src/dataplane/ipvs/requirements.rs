//! Checks what the mode needs from the kernel, in a temporary network namespace.

use std::net::SocketAddr;

use super::{
    error::IpvsError,
    settings::{DUMMY_LINK, IpvsSettings},
    sysctls,
};
use crate::{
    kernel::{
        KernelError,
        ipset::Ipset,
        ipvs::{self, Change, Ipvs, VirtualKey, VirtualServer},
        netns,
        own_link::OwnLink,
        sysctl::Sysctl,
    },
    model::Protocol,
};

/// An address that no Service has (RFC 5737). kube-proxy checks with the same one.
const TEST_ADDRESS: ([u8; 4], u16) = ([198, 51, 100, 0], 20_000);

/// `disable_ipv6` of [`DUMMY_LINK`], and of links that are created later.
const DISABLE_IPV6: [Sysctl; 2] =
    [Sysctl("ipv6/conf/kube-ipvs0/disable_ipv6"), Sysctl("ipv6/conf/default/disable_ipv6")];

/// Checks the requirements of the mode with these settings. An error names what is missing and what
/// to do about it.
pub fn check(settings: &IpvsSettings) -> Result<(), IpvsError> {
    ipvs::load_module(&settings.launcher);
    netns::within_new(|| check_namespace(settings))?
}

/// Returns true if the dummy link of this network namespace cannot have IPv6 addresses.
pub(super) fn is_ipv6_disabled() -> Result<bool, KernelError> {
    let [of_link, of_new_links] = DISABLE_IPV6;
    let value = match of_link.read()? {
        None => of_new_links.read()?,
        value => value,
    };
    Ok(value.is_some_and(|value| value != 0))
}

fn check_namespace(settings: &IpvsSettings) -> Result<(), IpvsError> {
    let mut ipvs = Ipvs::open().map_err(IpvsError::NoIpvs)?;
    sysctls::check(Sysctl::read)?;
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Needs root, as every test of the kernel.
    #[test]
    fn ipv6_is_disabled_if_a_new_link_would_have_no_ipv6() {
        let is_disabled = |value| {
            let disable = || DISABLE_IPV6[1].write(value).and_then(|()| is_ipv6_disabled());
            netns::within_new(disable).expect("a network namespace").expect("IPv6")
        };
        assert!(is_disabled(1));
        assert!(!is_disabled(0));
    }
}
