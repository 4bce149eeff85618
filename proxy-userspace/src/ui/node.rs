//! The page of the node: what shunt does here, and what is wrong.

use maud::{Markup, html};

use super::layout::table;
use crate::{
    health::NodeReport,
    inspect::{LeftOutRow, LinkRow, NodeDetails},
    sync::NoAnswer,
};

/// Returns the content. `details` are an error while the sync loop does not answer.
pub(super) fn page(report: &NodeReport, details: Result<&NodeDetails, &NoAnswer>) -> Markup {
    let configuration_refused: Vec<String> = report.configuration_refused.iter().cloned().collect();
    let troubles = [
        ("Not ready", &report.not_ready),
        ("Fails", &report.failing),
        ("Not up to date", &report.watch_errors),
        ("Refused configuration", &configuration_refused),
        ("Unreadable manifest", &report.unreadable_manifests),
        ("Link without programs", &report.left_out_links),
        ("Another program runs first", &report.displaced_links),
    ];
    html! {
        h1 { "Node" }
        @for (kind, texts) in troubles {
            @for text in texts { p.trouble role="status" { strong { (kind) ": " } (text) } }
        }
        (state(report, details.ok()))
        @match details {
            Ok(NodeDetails { links, left_out, left_out_count, .. }) => {
                (left_out_ports(left_out, *left_out_count))
                (table("Links", &["Name", "Index", "Header", "Path"], &html! { @for link in links { (link_row(link)) } }))
            }
            Err(error) => p.trouble role="status" { (error) "." }
        }
    }
}

fn state(report: &NodeReport, details: Option<&NodeDetails>) -> Markup {
    let ready = report.not_ready.is_empty();
    let pending = report.oldest_pending_seconds.map(|seconds| format!("for {seconds} s"));
    let service_ports = details.map(|details| details.service_ports.to_string());
    let facts = [
        ("Mode", report.mode.as_deref()),
        ("Why this mode", report.mode_reason.as_deref()),
        ("Service ports", service_ports.as_deref()),
        ("Changes wait", pending.as_deref()),
        ("Backstop", report.backstop.as_deref()),
        ("Netfilter translates on links", report.netfilter_on_links.as_deref()),
        ("Not all sockets are served", report.sockets_left_alone.as_deref()),
        ("Version", Some(report.version.as_str())),
    ];
    html! {
        table {
            caption { "State" }
            tbody {
                tr {
                    th scope="row" { "Ready" }
                    td.good[ready].bad[!ready] { (if ready { "yes" } else { "no" }) }
                }
                @for (name, value) in facts {
                    @if let Some(value) = value { tr { th scope="row" { (name) } td { (value) } } }
                }
            }
        }
    }
}

fn left_out_ports(left_out: &[LeftOutRow], count: usize) -> Markup {
    let rows = html! {
        @for LeftOutRow { port, reason, message } in left_out {
            tr {
                td { a href=(format!("services/{}/{}", port.namespace, port.name)) { (port.namespace) "/" (port.name) } }
                td { (port.port_name) } td { (port.protocol) } td { (port.family) } td { (reason) } td { (message) }
            }
        }
    };
    html! {
        @if !left_out.is_empty() {
            p.trouble role="status" { (count) " service ports are left out." }
            (table("Service ports that are left out", &["Service", "Port", "Protocol", "Family", "Reason", "Error"], &rows))
        }
    }
}

fn link_row(LinkRow { name, index, header, path, .. }: &LinkRow) -> Markup {
    html! {
        tr { td { (name) } td.number { (index) } td { (header) } td { (path) } }
    }
}
