//! What is set on the node at start: `conntrack` and `oomScoreAdj`.

use std::time::Duration;

use super::settings::Settings;
use crate::node::{ConntrackSettings, NodeSettings};

pub(super) fn node_settings(settings: &Settings) -> NodeSettings {
    let NodeSettings { conntrack: default, oom_score_adj } = NodeSettings::default();
    let timeout = |path, default: Duration| settings.duration(path).unwrap_or(default);
    let conntrack = ConntrackSettings {
        max_per_core: settings.integer("conntrack.maxPerCore").unwrap_or(default.max_per_core),
        min: settings.integer("conntrack.min").unwrap_or(default.min),
        tcp_established_timeout: timeout("conntrack.tcpEstablishedTimeout", default.tcp_established_timeout),
        tcp_close_wait_timeout: timeout("conntrack.tcpCloseWaitTimeout", default.tcp_close_wait_timeout),
        tcp_be_liberal: settings.is_true("conntrack.tcpBeLiberal"),
        udp_timeout: timeout("conntrack.udpTimeout", default.udp_timeout),
        udp_stream_timeout: timeout("conntrack.udpStreamTimeout", default.udp_stream_timeout),
    };
    NodeSettings { conntrack, oom_score_adj: settings.signed("oomScoreAdj").unwrap_or(oom_score_adj) }
}
