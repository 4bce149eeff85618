//! Finds pods by their addresses, and addresses by the names of pods. Only pods that are endpoints
//! of a Service are known.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use super::{Model, NamespacedName};

/// A pod that is an endpoint in some slice.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct KnownPod {
    /// Namespace and name.
    pub name: NamespacedName,
    /// Its address in the slice.
    pub address: IpAddr,
    /// `nodeName`.
    pub node_name: Option<Arc<str>>,
}

/// Where a pod is, whoever knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodPlace {
    /// Namespace and name.
    pub name: NamespacedName,
    /// Its addresses. Empty before it has one.
    pub addresses: Vec<IpAddr>,
    /// The node on which it runs.
    pub node_name: Option<String>,
    /// It has the network of its node (`hostNetwork`).
    pub host_network: bool,
}

impl Model {
    /// Returns the names of the pods with these addresses. Of two pods with one address, the one
    /// that is not terminating has it. Reads all slices once, so ask for many addresses at once.
    pub fn pods_at(&self, addresses: &BTreeSet<IpAddr>) -> BTreeMap<IpAddr, NamespacedName> {
        let mut found: BTreeMap<IpAddr, (bool, NamespacedName)> = BTreeMap::new();
        for (namespace, endpoints, pods) in self.slices.pods() {
            let wanted = endpoints.iter().enumerate().filter(|(_, it)| addresses.contains(&it.address));
            for (index, endpoint) in wanted {
                let is_better =
                    found.get(&endpoint.address).is_none_or(|(is_terminating, _)| *is_terminating);
                if let Some(name) = pods.get(index).filter(|_| is_better) {
                    let name = NamespacedName { namespace: namespace.clone(), name };
                    found.insert(endpoint.address, (endpoint.terminating, name));
                }
            }
        }
        found.into_iter().map(|(address, (_, name))| (address, name)).collect()
    }

    /// Returns the node of the pod with an address. Of two pods, the one that is not terminating
    /// has it. Reads all slices once.
    pub fn node_of_pod(&self, address: IpAddr) -> Option<Arc<str>> {
        let endpoints = self.slices.pods().flat_map(|(_, endpoints, _)| endpoints);
        let own = endpoints.filter(|endpoint| endpoint.address == address);
        own.min_by_key(|endpoint| endpoint.terminating)?.placement.node_name.clone()
    }

    /// Returns the pods with a name, in a namespace or in all. A pod with addresses of both
    /// families is there twice. Reads all slices once.
    pub fn pods_named(&self, namespace: Option<&str>, name: &str) -> BTreeSet<KnownPod> {
        let slices = self.slices.pods().filter(|(of, ..)| namespace.is_none_or(|wanted| wanted == &***of));
        let pods = slices.filter_map(|(namespace, endpoints, pods)| {
            let index = pods.position(name)?;
            let (endpoint, name) = (endpoints.get(index)?, pods.get(index)?);
            let name = NamespacedName { namespace: namespace.clone(), name };
            Some(KnownPod {
                name,
                address: endpoint.address,
                node_name: endpoint.placement.node_name.clone(),
            })
        });
        pods.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{
        Delta, EndpointSlice, SliceEndpoint, WatchEvent,
        testing::{endpoint, ip, key, service, settings, slice},
    };

    fn with_pods(name: &str, endpoints: Vec<SliceEndpoint>, pods: &[&'static str]) -> EndpointSlice {
        let pods = pods.iter().map(|pod| (!pod.is_empty()).then(|| (*pod).into())).collect();
        EndpointSlice { pods, ..slice(name, "web", endpoints) }
    }

    fn model(slices: Vec<EndpointSlice>) -> Model {
        let mut model = Model::new(settings());
        model.apply(WatchEvent::EndpointSlices(Delta::Replace(slices)));
        model
    }

    fn names(model: &Model, addresses: &[&str]) -> Vec<(String, String)> {
        let found = model.pods_at(&addresses.iter().copied().map(ip).collect());
        found.into_iter().map(|(address, name)| (address.to_string(), name.to_string())).collect()
    }

    #[test]
    fn a_pod_is_found_by_its_address_and_by_its_name() {
        let endpoints =
            vec![endpoint("10.1.0.1").on("n1"), endpoint("10.1.0.2"), endpoint("10.1.0.3").on("n2")];
        let six = vec![endpoint("fd00::1").on("n1")];
        let model = model(vec![
            with_pods("shop/web-1", endpoints, &["web-a", "", "web-c"]),
            with_pods("shop/web-2", six, &["web-a"]),
            with_pods("other/web-1", vec![endpoint("10.1.0.9")], &["web-a"]),
        ]);
        let expected = [("10.1.0.1", "shop/web-a"), ("10.1.0.3", "shop/web-c")];
        let expected = expected.map(|(address, name)| (address.to_owned(), name.to_owned()));
        assert_eq!(names(&model, &["10.1.0.1", "10.1.0.2", "10.1.0.3", "10.1.0.4"]), expected);
        let of = |namespace| {
            let pods = model.pods_named(namespace, "web-a").into_iter();
            pods.map(|pod| pod.address.to_string()).collect::<Vec<_>>()
        };
        assert_eq!(of(Some("shop")), ["10.1.0.1", "fd00::1"]);
        assert_eq!(of(None).len(), 3);
        assert!(of(Some("nowhere")).is_empty());
    }

    #[test]
    fn a_new_pod_has_the_address_of_a_terminating_one() {
        for (old, new) in [("shop/web-1", "shop/web-2"), ("shop/web-2", "shop/web-1")] {
            let model = model(vec![
                with_pods(old, vec![endpoint("10.1.0.1").terminating()], &["web-old"]),
                with_pods(new, vec![endpoint("10.1.0.1")], &["web-new"]),
            ]);
            assert_eq!(names(&model, &["10.1.0.1"]), [("10.1.0.1".to_owned(), "shop/web-new".to_owned())]);
        }
    }

    #[test]
    fn endpoints_that_are_left_out_do_not_move_the_names_of_others() {
        let endpoints = vec![endpoint("fd00::1"), endpoint("fd00::2"), endpoint("10.1.0.3")];
        let mut mixed = with_pods("shop/web-1", endpoints, &["web-a", "web-b", "web-c"]);
        mixed.address_type = crate::model::AddressType::Ipv4;
        let mut model = model(vec![mixed]);
        assert_eq!(names(&model, &["10.1.0.3"]), [("10.1.0.3".to_owned(), "shop/web-c".to_owned())]);
        model.apply(WatchEvent::Services(Delta::Replace(vec![service("shop/web", "10.96.0.1")])));
        model.apply(WatchEvent::Nodes(Delta::Replace(vec![])));
        model.set_node_facts(crate::model::NodeFacts::default());
        model.resolve();
        let known = model.known_endpoints(&key("shop/web", ""));
        assert_eq!(known.iter().map(|known| known.pod.as_deref()).collect::<Vec<_>>(), [Some("web-c")]);
    }
}
