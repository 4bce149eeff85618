//! Warns of what kube-proxy warns of at its start: the ipvs mode, and deprecated flags.

use proxy_userspace::{
    config::{Config, DeprecatedSetting},
    dataplane::Mode,
    node::NodeEvents,
};

/// kube-proxy's message of 1.35 and 1.36 (`cmd/kube-proxy/app/server_linux.go`).
const IPVS_DEPRECATED: &str = "The ipvs proxier is now deprecated and may be removed in a future release. \
     Please use 'nftables' instead.";

/// Logs the warnings. The ipvs mode is also an Event with kube-proxy's reason.
pub(super) fn warn(config: &Config, events: &NodeEvents) {
    if config.mode == Mode::Ipvs {
        tracing::warn!("{IPVS_DEPRECATED}");
        events.warning("IPVSDeprecation", IPVS_DEPRECATED);
    }
    for DeprecatedSetting { setting, instead } in &config.deprecated {
        tracing::warn!(setting, instead, "kube-proxy will remove this flag in a future release");
    }
}

#[cfg(test)]
mod tests {
    use proxy_userspace::config::{Environment, Flags};

    use super::*;

    #[test]
    fn the_ipvs_mode_has_kube_proxys_event() {
        for (mode, expected) in [("ipvs", Some("IPVSDeprecation")), ("nftables", None)] {
            let arguments = ["shunt", "--hostname-override=n1", "--mode", mode];
            let flags = Flags::parse(arguments).expect("valid flags");
            let config = Config::load(&flags, &Environment::default()).expect("a valid configuration");
            let (events, mut received) = NodeEvents::channel();
            warn(&config, &events);
            let event = received.try_recv().ok();
            assert_eq!(event.as_ref().map(|event| event.reason), expected);
            assert!(event.is_none_or(|event| event.is_warning && event.action == "StartKubeProxy"));
        }
    }
}
