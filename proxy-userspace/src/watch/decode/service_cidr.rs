//! Decodes ServiceCIDRs: the ranges from which Services get their cluster IPs.

use super::{Problems, parse, raw::RawServiceCidr};
use crate::model::ServiceCidr;

pub(super) fn service_cidr(raw: RawServiceCidr, problems: &mut Problems) -> Option<ServiceCidr> {
    let Some(name) = raw.metadata.unwrap_or_default().cluster_scoped_name() else {
        problems.add("metadata.name", "missing; a ServiceCIDR needs a name");
        return None;
    };
    let cidrs = raw.spec.and_then(|spec| spec.cidrs).unwrap_or_default();
    let cidrs = parse::cidrs("spec.cidrs", Some(&cidrs), problems);
    Some(ServiceCidr { name: name.name, cidrs: cidrs.iter().map(ipnet::IpNet::trunc).collect() })
}
