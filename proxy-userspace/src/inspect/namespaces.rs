//! Names the network namespaces of pods and of the node.

use std::collections::{BTreeSet, HashMap};

use crate::kernel::netns::{self, NetnsCookie};

/// The names of network namespaces by cookie.
pub(super) struct Namespaces(HashMap<NetnsCookie, String>);

impl Namespaces {
    /// Reads the addresses in the namespaces with these cookies. Namespaces that cannot be entered
    /// get no name.
    pub(super) fn read(wanted: &BTreeSet<NetnsCookie>) -> Self {
        let mut names = HashMap::new();
        if wanted.is_empty() {
            return Self(names);
        }
        let own = netns::current_cookie().ok().flatten();
        for (path, namespace) in netns::handles() {
            let entered = netns::within(&path, &namespace, || {
                Ok((netns::current_cookie()?.filter(|cookie| wanted.contains(cookie)), netns::addresses()?))
            });
            if let Ok((Some(cookie), addresses)) = entered {
                let addresses: Vec<_> = addresses.iter().map(ToString::to_string).collect();
                let is_named = Some(cookie) != own && !addresses.is_empty();
                names.insert(cookie, if is_named { addresses.join(",") } else { unnamed(cookie) });
            }
        }
        names.extend(own.map(|own| (own, "node".to_owned())));
        Self(names)
    }

    /// Returns `node`, the addresses of a pod, or the cookie.
    pub(super) fn name(&self, cookie: NetnsCookie) -> String {
        self.0.get(&cookie).cloned().unwrap_or_else(|| unnamed(cookie))
    }
}

fn unnamed(NetnsCookie(cookie): NetnsCookie) -> String {
    format!("namespace {cookie}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_own_namespace_is_the_node_and_an_unknown_one_has_its_cookie() {
        let own = netns::current_cookie().expect("a socket").expect("kernel 5.14 or newer");
        let names = Namespaces::read(&[own, NetnsCookie(u64::MAX)].into());
        assert_eq!(names.name(own), "node");
        assert_eq!(names.name(NetnsCookie(7)), "namespace 7");
    }
}
