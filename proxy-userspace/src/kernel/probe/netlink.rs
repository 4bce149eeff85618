//! Probes generic netlink families of the kernel.

use super::Fact;
use crate::kernel::{command::Launcher, ipvs, netlink::generic};

/// Probes IPVS. Loads its module if needed.
pub(super) fn ipvs(launcher: &Launcher) -> Fact {
    ipvs::load_module(launcher);
    generic_family(ipvs::FAMILY)
}

/// Requests a family. The kernel loads its module, if there is one.
fn generic_family(name: &str) -> Fact {
    match generic::open().and_then(|socket| generic::family(&socket, name)) {
        Ok(_) => Fact::Present(String::new()),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {
            Fact::Missing(format!("this kernel does not have {name}"))
        }
        Err(error) => Fact::Unknown(format!("cannot request netlink family {name}: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_family_is_found_and_unknown_one_is_not() {
        assert_eq!(generic_family("nlctrl"), Fact::Present(String::new()));
        assert!(generic_family("shunt-none").is_missing());
    }
}
