//! Finds the security module that confines this process. The error of a system call does not name
//! it.

use std::{fmt, fs, io};

use super::capabilities;

/// The security module that confines this process, and its rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Confinement {
    /// AppArmor, with the name of the profile that it enforces.
    AppArmor(String),
    /// SELinux, with the context of the process.
    SeLinux(String),
}

impl Confinement {
    /// Returns the security module that confines this process, if one does.
    pub fn of_this_process() -> Option<Self> {
        own_confinement()
    }

    /// Returns what the operator can do.
    pub const fn remedy(&self) -> &'static str {
        match self {
            Self::AppArmor(_) => {
                "run shunt without a profile: in a pod, set securityContext.appArmorProfile.type to Unconfined, or before \
                 Kubernetes 1.30 the annotation container.apparmor.security.beta.kubernetes.io/CONTAINER: unconfined"
            }
            Self::SeLinux(_) => {
                "run shunt in a domain that may use eBPF: in a pod, set securityContext.seLinuxOptions.type to spc_t"
            }
        }
    }
}

impl fmt::Display for Confinement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AppArmor(profile) => write!(f, "the AppArmor profile {profile}"),
            Self::SeLinux(context) => write!(f, "SELinux, with the context {context},"),
        }
    }
}

/// Returns the security module that caused an error of this process on bpffs or of bpf(2), if one
/// did. A missing capability causes the same errors, so none may be missing.
pub(super) fn cause_of(error: &io::Error) -> Option<Confinement> {
    let is_refused = error.kind() == io::ErrorKind::PermissionDenied && capabilities::check_bpf().is_ok();
    if is_refused { own_confinement() } else { None }
}

fn own_confinement() -> Option<Confinement> {
    let read = |path| fs::read_to_string(path).ok();
    // The folder of AppArmor's own (kernel 5.8, 6413f852ce08) also exists beside another module.
    let current = "/proc/self/attr/current";
    let apparmor = read("/proc/self/attr/apparmor/current").or_else(|| read(current));
    let profile = apparmor.as_deref().and_then(enforced_profile);
    profile.map(Confinement::AppArmor).or_else(|| {
        let context = confined_context(&read(current)?)?;
        // Containers do not see this file. A label in this format is then SELinux's.
        let is_permissive = read("/sys/fs/selinux/enforce").is_some_and(|enforce| enforce.trim() == "0");
        (!is_permissive).then_some(Confinement::SeLinux(context))
    })
}

/// Returns the name of a profile that AppArmor enforces, from a label such as
/// `cri-containerd.apparmor.d (enforce)`. Profiles in the modes complain and unconfined deny
/// nothing.
fn enforced_profile(label: &str) -> Option<String> {
    let (name, mode) = label.trim().strip_suffix(')')?.rsplit_once(" (")?;
    (mode != "complain" && mode != "unconfined").then(|| name.to_owned())
}

/// Returns a context of SELinux, which is `user:role:type:level`. Returns `None` for another
/// format, and for the types that SELinux does not confine.
fn confined_context(label: &str) -> Option<String> {
    let context = label.trim_matches(['\0', '\n']);
    let domain = context.split(':').nth(2)?;
    (domain != "spc_t" && !domain.starts_with("unconfined_")).then(|| context.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_enforced_profile_denies_something() {
        let profile = |label| enforced_profile(label);
        assert_eq!(
            profile("cri-containerd.apparmor.d (enforce)\n").as_deref(),
            Some("cri-containerd.apparmor.d")
        );
        assert_eq!(profile("a profile//child (kill)").as_deref(), Some("a profile//child"));
        for label in ["unconfined\n", "docker-default (complain)\n", "shunt (unconfined)\n", ""] {
            assert_eq!(profile(label), None, "{label}");
        }
    }

    #[test]
    fn context_of_a_container_is_confined_and_that_of_a_privileged_one_is_not() {
        let container = "system_u:system_r:container_t:s0:c14,c237";
        assert_eq!(confined_context(&format!("{container}\0")).as_deref(), Some(container));
        for label in
            ["system_u:system_r:spc_t:s0", "unconfined_u:unconfined_r:unconfined_t:s0", "unconfined\n"]
        {
            assert_eq!(confined_context(label), None, "{label}");
        }
    }
}
