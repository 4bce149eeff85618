//! The page of events.

use jiff::Timestamp;
use maud::{Markup, html};

use super::layout::table;
use crate::node::RecentEvent;

/// Returns the content, with the newest event first.
pub(super) fn page(events: &[RecentEvent]) -> Markup {
    let rows = html! {
        @for RecentEvent { event, first, last } in events {
            tr {
                td { (time(*last)) } td { (time(*first)) }
                td.warn[event.is_warning] { (if event.is_warning { "Warning" } else { "Normal" }) }
                td {
                    @match &event.service {
                        Some(service) => a href=(format!("services/{}/{}", service.namespace, service.name)) { (service.namespace) "/" (service.name) }
                        None => "this node"
                    }
                }
                td { (event.reason) } td { (event.note) }
            }
        }
    };
    html! {
        h1 { "Events" }
        @if events.is_empty() { p { "None since shunt started." } } @else {
            (table("The last events of this shunt", &["Last", "First", "Type", "About", "Reason", "Message"], &rows))
        }
    }
}

/// Writes a time to the second.
fn time(time: Timestamp) -> Markup {
    let text = format!("{time:.0}");
    html! { time datetime=(text) { (text) } }
}
