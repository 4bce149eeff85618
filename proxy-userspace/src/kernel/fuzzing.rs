//! Reads bytes as the answers and notifications of the kernel, for fuzz targets.

use netlink_packet_core::{NetlinkDeserializable as _, NetlinkHeader, NetlinkMessage, Parseable as _};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_sock_diag::SockDiagMessage;

use super::{
    conntrack, foreign_changes, foreign_filters, ipset, ipvs, links, local_routes,
    netlink::{Attributes, error_of, messages_of},
    nftables, redirecting_pods, ruleset_changes, xfrm, xt_recent,
};

/// Reads a datagram of netlink with the parsers of all subsystems.
pub fn read_datagram(datagram: &[u8]) {
    ruleset_changes::has_removal(datagram, &["shunt"]);
    foreign_changes::is_foreign(datagram, &[(libc::NFPROTO_INET, "shunt")]);
    for message in messages_of(datagram) {
        error_of(&message);
        let payload = message.payload();
        let attributes = Attributes::after_header(payload);
        conntrack::read_any(attributes);
        ipvs::read_any(attributes);
        nftables::read_any(attributes);
        redirecting_pods::read_any(attributes);
        foreign_filters::read_any(payload);
        local_routes::read_any(payload);
        if let Ok(Some(policy)) = xfrm::read(payload) {
            let _ = policy.to_string();
        }
        if let Ok(header) = NetlinkHeader::parse(&message) {
            drop(SockDiagMessage::deserialize(&header, payload));
        }
        if let Ok(message) = NetlinkMessage::<RouteNetlinkMessage>::deserialize(message.into_inner()) {
            links::read_any(&message);
        }
    }
}

/// Reads a text of `/proc` and of commands with all parsers.
pub fn read_text(text: &str) {
    ipset::parse(text);
    xt_recent::TimerTicks::read(text);
    for line in text.lines() {
        ipvs::connections::virtual_server(line);
        ipvs::connections::persistence(line);
        xt_recent::read_line(line);
    }
}
