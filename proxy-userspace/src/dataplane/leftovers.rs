//! What the ipvs mode leaves in the kernel besides rules, and its removal.

use super::ipvs::{Ipvs, IpvsError, IpvsSettings};
use crate::kernel::command::SearchPath;

/// Removes the link, the virtual servers and the sets of the ipvs mode; its chains must be gone before, since they use the sets.
/// Goes on past errors and returns them all.
pub fn remove_ipvs(path: &SearchPath) -> Vec<IpvsError> {
    Ipvs::remove(&IpvsSettings { path: path.clone(), ..IpvsSettings::default() })
}
