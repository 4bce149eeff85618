//! Finds the Service of a filter among those that this node serves, so that a typo is an error and
//! not silence.

use super::filter::{FilterPort, TraceFilter};
use crate::model::{NamespacedName, ResolvedPort, ServicePortKey, Snapshot};

/// The filter names what this node does not serve.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotServed {
    /// A Service with its namespace.
    #[error("this node serves no Service {0}/{1}")]
    Service(String, String),
    /// A name in any namespace.
    #[error("this node serves no Service {0} in any namespace")]
    Name(String),
    /// A namespace.
    #[error("this node serves no Service in the namespace {0}")]
    Namespace(String),
    /// A port of a Service that is there.
    #[error("the Service {0} has no port {1} on this node")]
    Port(String, FilterPort),
}

/// Returns the filter with the names of its ports. Fails if nothing is served that it names.
pub(super) fn find(snapshot: &Snapshot, filter: &TraceFilter) -> Result<TraceFilter, NotServed> {
    let TraceFilter { namespace, name, service_port, .. } = filter;
    if namespace.is_none() && name.is_none() {
        return Ok(filter.clone());
    }
    let ports = snapshot.ports.iter().filter(|(key, _)| is_of(filter, &key.name.service));
    let ports: Vec<(&ServicePortKey, &ResolvedPort)> = ports.map(|(key, port)| (key, &**port)).collect();
    match (namespace, name, service_port) {
        (Some(namespace), Some(name), _) if ports.is_empty() => {
            Err(NotServed::Service(namespace.clone(), name.clone()))
        }
        (None, Some(name), _) if ports.is_empty() => Err(NotServed::Name(name.clone())),
        (Some(namespace), None, _) if ports.is_empty() => Err(NotServed::Namespace(namespace.clone())),
        (_, Some(name), Some(wanted)) => {
            let found = ports.into_iter().filter(|(key, port)| has(key, port, wanted));
            let found: Vec<String> = found.map(|(key, _)| key.name.port.to_string()).collect();
            if found.is_empty() {
                let service = namespace.iter().chain([name]).map(String::as_str).collect::<Vec<_>>();
                return Err(NotServed::Port(service.join("/"), wanted.clone()));
            }
            Ok(TraceFilter { port_names: Some(found), ..filter.clone() })
        }
        _ => Ok(filter.clone()),
    }
}

fn is_of(filter: &TraceFilter, service: &NamespacedName) -> bool {
    filter.namespace.as_deref().is_none_or(|wanted| wanted == &*service.namespace)
        && filter.name.as_deref().is_none_or(|wanted| wanted == &*service.name)
}

fn has(key: &ServicePortKey, port: &ResolvedPort, wanted: &FilterPort) -> bool {
    match wanted {
        FilterPort::Number(number) => port.frontends.iter().any(|frontend| frontend.port == *number),
        FilterPort::Name(name) => *key.name.port == **name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{
        Delta, Model, WatchEvent,
        testing::{facts, node, service, settings},
    };

    fn find_in_shop(query: &str) -> Result<TraceFilter, String> {
        let mut model = Model::new(settings());
        model.set_node_facts(facts(&[("eth0", "192.0.2.11/24")]));
        model.apply(WatchEvent::Nodes(Delta::Replace(vec![node("n1")])));
        let mut web = service("shop/web", "10.96.0.1");
        web.ports[0].name = "http".into();
        model.apply(WatchEvent::Services(Delta::Replace(vec![web])));
        model.apply(WatchEvent::EndpointSlices(Delta::Replace(Vec::new())));
        model.resolve();
        let filter = serde_urlencoded::from_str(query).expect("a filter");
        find(model.snapshot(), &filter).map_err(|error| error.to_string())
    }

    #[test]
    fn what_is_not_served_is_an_error_that_names_it() {
        for (query, expected) in [
            ("namespace=shop&name=wbe", "this node serves no Service shop/wbe"),
            ("name=wbe", "this node serves no Service wbe in any namespace"),
            ("namespace=nope", "this node serves no Service in the namespace nope"),
            ("namespace=shop&name=web&service_port=81", "the Service shop/web has no port 81 on this node"),
            ("name=web&service_port=dns", "the Service web has no port dns on this node"),
        ] {
            assert_eq!(find_in_shop(query), Err(expected.to_owned()), "{query}");
        }
    }

    #[test]
    fn what_is_served_is_found_by_each_of_its_names() {
        for query in ["", "address=192.0.2.1", "namespace=shop", "name=web", "namespace=shop&name=web"] {
            assert_eq!(find_in_shop(query).expect(query).port_names, None);
        }
        for query in ["name=web&service_port=http", "namespace=shop&name=web&service_port=80"] {
            let found = find_in_shop(query).expect(query);
            assert_eq!(found.port_names, Some(vec!["http".to_owned()]));
            assert!(found.matches_service(Some("shop/web:http")));
            assert!(!found.matches_service(Some("shop/web:metrics")));
        }
    }
}
