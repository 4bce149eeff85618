//! Decodes ServiceCIDRs: the ranges from which Services get their cluster IPs.

use super::{Problems, parse, raw::RawServiceCidr};
use crate::model::{NamespacedName, ServiceCidr};

pub(super) fn service_cidr(
    name: NamespacedName,
    raw: RawServiceCidr,
    problems: &mut Problems,
) -> ServiceCidr {
    let cidrs = raw.spec.and_then(|spec| spec.cidrs);
    ServiceCidr { name: name.name, cidrs: parse::list("spec.cidrs", cidrs.as_deref(), problems, parse::cidr) }
}
