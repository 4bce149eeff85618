//! Decodes ServiceCIDRs: the ranges from which Services get their cluster IPs.

use super::{Problems, parse, raw::RawServiceCidr};
use crate::model::{NamespacedName, ServiceCidr, SharedValues};

pub(super) fn service_cidr(
    name: NamespacedName,
    raw: RawServiceCidr<'_>,
    _: &mut SharedValues,
    problems: &mut Problems,
) -> ServiceCidr {
    let cidrs = raw.spec.map(|spec| spec.cidrs).unwrap_or_default();
    ServiceCidr { name: name.name, cidrs: parse::list("spec.cidrs", &cidrs, problems, parse::cidr) }
}
