//! Features of rules that an iptables or a kernel can lack, and the test for them. If iptables
//! refuses a feature that one Service needs, it refuses all rules of the family.

use std::collections::BTreeMap;

use crate::{
    dataplane::iptables::IptablesError,
    kernel::{KernelError, iptables::Iptables as Commands, netns},
    model::IpFamily,
};

/// A feature that plans do without if iptables refuses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum RuleFeature {
    /// The match `ipvs`, for load-balancer IPs whose source ranges do not contain the node.
    IpvsMatch,
    /// The match `physdev`, for external IPs.
    PhysdevMatch,
    /// The option `--random-fully` of MASQUERADE.
    RandomFully,
}

/// The features that iptables refuses in the rules of a family, each with the error.
pub(super) type RefusedFeatures = BTreeMap<(IpFamily, RuleFeature), String>;

impl RuleFeature {
    const ALL: [Self; 3] = [Self::IpvsMatch, Self::PhysdevMatch, Self::RandomFully];

    /// Returns the words of a rule that need the feature.
    const fn words(self) -> &'static str {
        match self {
            Self::IpvsMatch => "-m ipvs",
            Self::PhysdevMatch => "-m physdev",
            Self::RandomFully => "--random-fully",
        }
    }

    /// Returns an input with a rule that needs nothing but the feature.
    const fn trial(self) -> &'static str {
        match self {
            Self::IpvsMatch => "*filter\n-A OUTPUT -m ipvs --vproto 6 -j DROP\nCOMMIT\n",
            Self::PhysdevMatch => "*nat\n-A PREROUTING -m physdev ! --physdev-is-in -j ACCEPT\nCOMMIT\n",
            Self::RandomFully => "*nat\n-A POSTROUTING -j MASQUERADE --random-fully\nCOMMIT\n",
        }
    }

    /// Returns what the rules do without the feature.
    const fn consequence(self) -> &'static str {
        match self {
            Self::IpvsMatch => "load-balancer IPs whose source ranges do not contain the node are left out",
            // A later rule accepts the same packets: an external IP is an address of the node.
            Self::PhysdevMatch => "the rules do without it",
            Self::RandomFully => "masqueraded connections get ports that are easier to guess",
        }
    }
}

/// Returns the features of a failed input that iptables refuses, and logs them. None if it refuses
/// plain rules too: the input failed for another reason.
///
/// This is not tested at the start, because the match `physdev` loads `br_netfilter`
/// (`physdev_mt_check` of `net/netfilter/xt_physdev.c`), which changes how bridges forward.
pub(super) fn refused_by(commands: &Commands, input: &str) -> RefusedFeatures {
    let used = RuleFeature::ALL.into_iter().filter(|feature| input.contains(feature.words()));
    let used: Vec<_> = used.collect();
    if used.is_empty() {
        return RefusedFeatures::new();
    }
    let refused = netns::within_new(|| {
        commands.try_rules()?;
        Ok(used.into_iter().filter_map(|feature| Some((feature, refusal(commands, feature)?))).collect())
    });
    let refused: Vec<_> = refused.and_then(|refused: Result<_, KernelError>| refused).unwrap_or_default();
    for (feature, error) in &refused {
        let (family, feature, consequence) = (commands.family, feature.words(), feature.consequence());
        tracing::warn!(%family, feature, error, "iptables refuses rules with this: until shunt restarts, {consequence}");
    }
    refused.into_iter().map(|(feature, error)| ((commands.family, feature), error)).collect()
}

/// Returns the error if iptables refuses the feature, not if it fails for lack of time or the lock.
fn refusal(commands: &Commands, feature: RuleFeature) -> Option<String> {
    let source = commands.restore(feature.trial()).err()?;
    let error = IptablesError::of_restore(commands.family, feature.trial(), source);
    error.is_rejection().then(|| error.to_string())
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt as _};

    use super::*;
    use crate::kernel::command::Launcher;

    /// Returns the refused features of an input if iptables-restore ends with `status` when a line
    /// of its input matches a pattern of the shell. Needs root, as every test of the kernel.
    fn refused(pattern: &str, status: u8, input: &str) -> Vec<RuleFeature> {
        let directory = tempfile::tempdir().expect("a directory");
        let script = format!(
            "#!/bin/sh\nwhile read -r line; do\ncase \"$line\" in {pattern}) echo no such match >&2; exit {status};; esac\ndone\nexit 0\n"
        );
        for name in ["iptables-legacy-save", "iptables-legacy-restore"] {
            let path = directory.path().join(name);
            fs::write(&path, &script).expect("a script");
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("executable");
        }
        let launcher = Launcher::only_in([directory.path().to_owned()]);
        let commands = Commands::installed(IpFamily::V4, &launcher).pop().expect("installed");
        refused_by(&commands, input).into_keys().map(|(_, feature)| feature).collect()
    }

    #[test]
    fn a_feature_is_refused_if_plain_rules_are_accepted_and_a_rule_with_it_is_not() {
        let input = "-A X -m ipvs --vproto 6 -j DROP\n-A Y -m physdev ! --physdev-is-in -j ACCEPT\n";
        assert_eq!(refused("*'-m ipvs'*", 2, input), [RuleFeature::IpvsMatch]);
        assert_eq!(refused("*'-m ipvs'*", 2, "-A Y -m physdev ! --physdev-is-in -j ACCEPT\n"), []);
        assert_eq!(refused("*", 2, input), [], "plain rules fail too");
        assert_eq!(refused("*'-m ipvs'*", 4, input), [], "others hold the lock");
    }
}
