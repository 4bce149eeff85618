//! What addresses mean that no service port serves: for answers to people.

use std::{
    net::{IpAddr, SocketAddr},
    num::NonZeroU16,
};

use super::{FrontendKind, IpFamily, LoadBalancerIpMode, Model, NamespacedName, ServicePortKey};

impl Model {
    /// Returns true if the address is the cluster IP of a service port.
    pub fn is_cluster_ip(&self, address: IpAddr) -> bool {
        self.ports_at(address).into_iter().any(|(_, key)| {
            let frontends = self.snapshot.ports.get(key).map_or(&[][..], |port| &port.frontends);
            let is_it = |kind, at| kind == FrontendKind::ClusterIp && at == Some(address);
            frontends.iter().any(|frontend| is_it(frontend.kind, frontend.address))
        })
    }

    /// Returns the Service of which the address is a load-balancer IP with ipMode `Proxy`. Packets
    /// to it go to the load balancer. Looks at all Services.
    pub fn service_with_proxy_ip(&self, address: IpAddr) -> Option<&NamespacedName> {
        self.services.with_load_balancer_ip(address, LoadBalancerIpMode::Proxy)
    }

    /// Returns the Service whose health check node port this is. Looks at all health checks.
    pub fn service_with_health_check(&self, port: NonZeroU16, family: IpFamily) -> Option<&NamespacedName> {
        let mut checks = self.health_checks().iter();
        checks.find(|((_, of), check)| *of == family && check.port == port).map(|((service, _), _)| service)
    }

    /// Returns a service port with an endpoint at this address; if there are several, one whose
    /// endpoint has this port. Looks at all endpoints.
    pub fn endpoint_at(&self, address: IpAddr, port: NonZeroU16) -> Option<(&ServicePortKey, SocketAddr)> {
        let endpoints = self.snapshot.ports.iter().flat_map(|(key, port)| {
            let both = port.cluster_endpoints.iter().chain(&port.local_endpoints);
            both.map(move |endpoint| (key, endpoint.address))
        });
        let own = endpoints.filter(|(_, endpoint)| endpoint.ip() == address);
        own.min_by_key(|(_, endpoint)| endpoint.port() != port.get())
    }
}
