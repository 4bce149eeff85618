//! The page of maps.

use maud::{Markup, html};
use proxy_common::layout::fills_up;

use super::layout::table;
use crate::health::ReportedMap;

/// From these shares on, a map is marked.
const HIGH: f64 = 0.75;
const VERY_HIGH: f64 = 0.9;

/// Returns the content, with the fullest map first.
pub(super) fn page(maps: &[ReportedMap], mode: Option<&str>) -> Markup {
    let mut maps: Vec<_> = maps.iter().map(|map| (share(map), map)).collect();
    maps.sort_by(|(one, _), (other, _)| other.total_cmp(one));
    let rows = html! {
        @for (share, map) in &maps {
            @let marks = !fills_up(&map.name);
            tr {
                th scope="row" { (map.name) }
                td.number { (map.entries) } td.number { (map.capacity) }
                td { meter value=(share) min="0" max="1" low=[marks.then_some(HIGH)] high=[marks.then_some(VERY_HIGH)] optimum="0" {} " " (format!("{:.1} %", 100.0 * share)) }
            }
        }
    };
    html! {
        h1 { "Maps" }
        @if maps.is_empty() {
            p { "The mode " (mode.unwrap_or("that comes")) " has no maps: only the ebpf mode has them." }
        } @else {
            (table("How full the maps are", &["Map", "Entries", "Capacity", "Fill"], &rows))
            p { "Maps that evict their least recently used entry fill up on any node. They are not marked." }
            p { "The entries of maps that programs write are counted every half a minute or more." }
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "a share needs no more digits")]
fn share(map: &ReportedMap) -> f64 {
    map.entries as f64 / f64::from(map.capacity.max(1))
}
