//! Whether the kernel has a generic netlink family, which is how its subsystems are reached.

use super::Fact;
use crate::kernel::{command::SearchPath, ipvs, netlink::generic};

/// The kernel's virtual server, which has to be loaded where it is a module.
pub(super) fn ipvs(path: &SearchPath) -> Fact {
    ipvs::load_module(path);
    generic_family(ipvs::FAMILY)
}

/// Asks for a family; the kernel loads the module that brings it, if there is one.
fn generic_family(name: &str) -> Fact {
    match generic::open().and_then(|socket| generic::family(&socket, name)) {
        Ok(_) => Fact::Present(String::new()),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {
            Fact::Missing(format!("this kernel does not have {name}"))
        }
        Err(error) => Fact::Unknown(format!("ask for netlink family {name}: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_family_that_every_kernel_has_is_found_and_one_that_none_has_is_not() {
        assert_eq!(generic_family("nlctrl"), Fact::Present(String::new()));
        assert!(generic_family("shunt-none").is_missing());
    }
}
