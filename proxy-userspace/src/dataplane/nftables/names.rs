//! The names of chains and sets that belong to one Service. They are kube-proxy's
//! (`pkg/proxy/nftables/proxier.go`), so that shunt recognizes and takes over what kube-proxy left.

use std::net::SocketAddr;

use crate::{dataplane::name_hash::base32, kernel::nftables::Name, model::ServicePortName};

/// The kernel's limit is 256 with the terminating zero. The difference is for the longest prefix.
const MAX_LENGTH: usize = 240;

/// The prefix of the set of an endpoint's clients.
pub(super) const AFFINITY: &str = "affinity";

/// Returns the suffix of a service port's names: a hash and the name, truncated.
pub(super) fn of_port(name: &ServicePortName) -> String {
    hashed(&text(name))
}

/// Returns the suffix of an endpoint's names. Names cannot contain colons.
pub(super) fn of_endpoint(name: &ServicePortName, endpoint: SocketAddr) -> String {
    let address = endpoint.ip().to_string().replace(':', ".");
    hashed(&format!("{}__{address}/{}", text(name), endpoint.port()))
}

/// Returns a name with this prefix: `service-UEU3GDQ7-default/web/tcp/http`.
pub(super) fn name(prefix: &str, suffix: &str) -> Name {
    format!("{prefix}-{suffix}").into()
}

fn text(name: &ServicePortName) -> String {
    let protocol = name.protocol.lowercase_name();
    format!("{}/{}/{protocol}/{}", name.service.namespace, name.service.name, name.port)
}

fn hashed(text: &str) -> String {
    let hash = base32::<8>(text).map(char::from);
    let mut name: String = hash.into_iter().chain(['-']).chain(text.chars()).collect();
    if name.len() > MAX_LENGTH {
        name.truncate(MAX_LENGTH - 3);
        name.push_str("...");
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::testing::key;

    #[test]
    fn names_are_those_of_kube_proxy() {
        let name = key("default/af", "").name;
        assert_eq!(of_port(&name), "UEU3GDQ7-default/af/tcp/");
        let endpoint = |text: &str| of_endpoint(&name, text.parse().unwrap());
        assert_eq!(endpoint("10.244.1.11:8080"), "UPR4LYLF-default/af/tcp/__10.244.1.11/8080");
        assert!(endpoint("[fd44:1::11]:8080").ends_with("-default/af/tcp/__fd44.1..11/8080"));
    }

    #[test]
    fn truncated_names_still_differ() {
        let long =
            |end: &str| of_port(&key(&format!("{}/{}{end}", "n".repeat(63), "s".repeat(200)), "").name);
        assert_eq!(long("a").len(), MAX_LENGTH);
        assert_ne!(long("a"), long("b"));
    }
}
