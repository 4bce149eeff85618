//! Names of what a Service has to itself, made as kube-proxy makes them (`pkg/proxy/nftables/proxier.go`), so that its are
//! recognized and taken over.

use std::net::SocketAddr;

use crate::{dataplane::name_hash::base32, kernel::nftables::Name, model::ServicePortName};

/// The kernel's limit is 256 with the zero at the end; the longest prefix of ours is taken off that.
const LONGEST: usize = 240;

/// What the names of a service port end in: a hash of it, and as much of it as there is room for.
pub(super) fn of_port(name: &ServicePortName) -> String {
    hashed(&text(name))
}

/// The same of one of its endpoints. Colons are not allowed in names.
pub(super) fn of_endpoint(name: &ServicePortName, endpoint: SocketAddr) -> String {
    let address = endpoint.ip().to_string().replace(':', ".");
    hashed(&format!("{}__{address}/{}", text(name), endpoint.port()))
}

/// A name of this kind: `service-UEU3GDQ7-default/web/tcp/http`.
pub(super) fn name(kind: &str, ending: &str) -> Name {
    format!("{kind}-{ending}").into()
}

fn text(name: &ServicePortName) -> String {
    let protocol = name.protocol.lowercase_name();
    format!("{}/{}/{protocol}/{}", name.service.namespace, name.service.name, name.port)
}

fn hashed(text: &str) -> String {
    let hash = base32::<8>(text).map(char::from);
    let mut name: String = hash.into_iter().chain(['-']).chain(text.chars()).collect();
    if name.len() > LONGEST {
        name.truncate(LONGEST - 3);
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
    fn long_names_are_cut_and_still_differ() {
        let long =
            |end: &str| of_port(&key(&format!("{}/{}{end}", "n".repeat(63), "s".repeat(200)), "").name);
        assert_eq!(long("a").len(), LONGEST);
        assert_ne!(long("a"), long("b"));
    }
}
