//! Reads the rules that select routing tables (`ip rule`), over rtnetlink, and how the kernel
//! chooses among the next hops of a route.

use std::io;

use libc::RTM_GETRULE;
use netlink_packet_core::NLM_F_DUMP;
use netlink_sys::protocols::NETLINK_ROUTE;

use super::{
    KernelError,
    netlink::{Attributes, NetlinkSocket, kernel_constants, uninterrupted},
    sysctl::Sysctl,
};

/// The length of `struct fib_rule_hdr`, and the position of the length of the source's prefix.
const HEADER_LENGTH: usize = 12;
const SOURCE_LENGTH: usize = 2;

// include/uapi/linux/fib_rules.h.
kernel_constants! {
    FRA_SPORT_RANGE = 23,
    FRA_DPORT_RANGE = 24,
}

/// Which parts of a packet choose among the next hops of a route. With the policy 0, ports do not.
const MULTIPATH_POLICIES: [Sysctl; 2] =
    [Sysctl("ipv4/fib_multipath_hash_policy"), Sysctl("ipv6/fib_multipath_hash_policy")];
/// The same for the policy 3. Kernel 5.14.
const MULTIPATH_FIELDS: [Sysctl; 2] =
    [Sysctl("ipv4/fib_multipath_hash_fields"), Sysctl("ipv6/fib_multipath_hash_fields")];

/// How the kernel chooses among the next hops of a route.
#[derive(Debug, PartialEq, Eq)]
pub struct MultipathHash {
    /// The sysctls that this kernel has.
    policies: Vec<i64>,
    fields: Vec<i64>,
}

impl MultipathHash {
    /// Reads the sysctls of this network namespace.
    pub fn read() -> Result<Self, KernelError> {
        let read = |sysctls: [Sysctl; 2]| sysctls.into_iter().filter_map(|sysctl| sysctl.read().transpose());
        Ok(Self {
            policies: read(MULTIPATH_POLICIES).collect::<Result<_, _>>()?,
            fields: read(MULTIPATH_FIELDS).collect::<Result<_, _>>()?,
        })
    }

    /// Returns true if ports may choose the next hop.
    fn may_depend_on_ports(&self) -> bool {
        self.policies.iter().any(|policy| *policy != 0)
    }
}

/// Returns true if a rule of any family selects by source address (`ip rule add from`).
pub fn select_by_source() -> Result<bool, KernelError> {
    has_rule(|rule| rule.get(SOURCE_LENGTH).is_none_or(|length| *length != 0))
}

/// Returns true if ports may decide about a route of this network namespace.
pub fn routes_depend_on_ports() -> Result<bool, KernelError> {
    Ok(MultipathHash::read()?.may_depend_on_ports() || select_by_port()?)
}

/// Returns true if a rule of any family selects by ports (`ip rule add dport`).
fn select_by_port() -> Result<bool, KernelError> {
    has_rule(|rule| {
        let attributes = Attributes(rule.get(HEADER_LENGTH..).unwrap_or_default());
        attributes.get(FRA_SPORT_RANGE).is_some() || attributes.get(FRA_DPORT_RANGE).is_some()
    })
}

/// Returns true if there is such a rule. It gets what follows the header of a message.
fn has_rule(is_one: impl Fn(&[u8]) -> bool) -> Result<bool, KernelError> {
    let list = || -> io::Result<bool> {
        let socket = NetlinkSocket::open(NETLINK_ROUTE)?;
        let mut rules = socket.request(RTM_GETRULE, NLM_F_DUMP, [0; HEADER_LENGTH], |_| {})?;
        let mut is_found = false;
        while let Some(rule) = rules.next()? {
            is_found |= is_one(rule.payload());
        }
        Ok(is_found)
    };
    match uninterrupted(list) {
        // A kernel without CONFIG_IP_MULTIPLE_TABLES has no rules.
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(false),
        found => found.map_err(KernelError::call("list", "routing rules")),
    }
}

#[cfg(test)]
mod tests {
    use nix::sched::{CloneFlags, unshare};

    use super::*;
    use crate::kernel::command::{Command, Launcher};

    /// Runs `ip`. Returns true if a rule then selects by ports.
    fn selects_by_port_after(arguments: &str) -> bool {
        let command = Command::new("ip", &Launcher::default()).args(arguments.split(' '));
        command.run().expect(arguments);
        select_by_port().expect("rules")
    }

    #[test]
    fn rules_with_ports_and_hashes_over_ports_are_found() {
        let test = || {
            unshare(CloneFlags::CLONE_NEWNET).expect("a network namespace, as root");
            for (arguments, expected) in [
                ("rule add from 192.0.2.0/24 fwmark 7 table 7", false),
                ("-6 rule add dport 80 table 7", true),
                ("-6 rule delete dport 80 table 7", false),
                ("rule add sport 1000-2000 table 7", true),
                ("rule delete sport 1000-2000 table 7", false),
            ] {
                assert_eq!(selects_by_port_after(arguments), expected, "{arguments}");
            }
            for policy in MULTIPATH_POLICIES {
                let before = MultipathHash::read().expect("sysctls");
                policy.write(1).expect("a sysctl of this namespace");
                let after = MultipathHash::read().expect("sysctls");
                assert_eq!([&before, &after].map(MultipathHash::may_depend_on_ports), [false, true]);
                policy.write(2).expect("a sysctl of this namespace");
                assert_ne!(MultipathHash::read().expect("sysctls"), after);
                policy.write(0).expect("a sysctl of this namespace");
            }
        };
        std::thread::spawn(test).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    }
}
