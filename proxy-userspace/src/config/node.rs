//! What is set on the node at start: `conntrack` and `oomScoreAdj`.

use super::settings::Settings;
use crate::node::{ConntrackSettings, NodeSettings};

pub(super) fn node_settings(settings: &Settings) -> NodeSettings {
    let conntrack = ConntrackSettings {
        max_per_core: settings.integer("conntrack.maxPerCore"),
        min: settings.integer("conntrack.min"),
        tcp_established_timeout: settings.duration("conntrack.tcpEstablishedTimeout"),
        tcp_close_wait_timeout: settings.duration("conntrack.tcpCloseWaitTimeout"),
        tcp_be_liberal: settings.is_true("conntrack.tcpBeLiberal"),
        udp_timeout: settings.duration("conntrack.udpTimeout"),
        udp_stream_timeout: settings.duration("conntrack.udpStreamTimeout"),
    };
    NodeSettings { conntrack, oom_score_adj: settings.integer("oomScoreAdj") }
}
