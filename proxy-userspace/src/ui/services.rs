//! The page with the list of Services, and the search.

use maud::{Markup, html};
use serde::{Deserialize, Serialize};

use super::layout::table;
use crate::inspect::{Counts, FoundServices, ROWS_A_PAGE, Search, ServiceRow};

/// The query of the page.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct SearchForm {
    search: String,
    /// The number of the page; the first one is 1. Anything else that is no such number means 1.
    page: String,
}

impl SearchForm {
    pub(super) fn search(&self) -> Search {
        Search::of(&self.search)
    }

    /// Returns the index of the page.
    pub(super) fn index(&self) -> usize {
        self.page.parse::<usize>().unwrap_or(1).saturating_sub(1)
    }

    fn href(&self, index: usize) -> String {
        let other = Self { search: self.search.clone(), page: (index + 1).to_string() };
        format!("services?{}", serde_urlencoded::to_string(other).unwrap_or_default())
    }
}

const HEADINGS: [&str; 9] =
    ["Service", "Port", "Protocol", "Addresses", "Endpoints", "Connections", "Refused", "Dropped", "State"];

/// Returns the content.
pub(super) fn page(form: &SearchForm, FoundServices { rows, found }: &FoundServices) -> Markup {
    let first = form.index().saturating_mul(ROWS_A_PAGE);
    let is_everything = form.search.trim().is_empty();
    html! {
        h1 { "Services" }
        form method="get" action="services" role="search" {
            label { "Name, namespace/name, or address" input type="search" name="search" value=(form.search); }
            button type="submit" { "Search" }
        }
        @if rows.is_empty() {
            p role="status" { (if is_everything { "This node serves no Services on this page." } else { "No service port was found." }) }
        } @else {
            p role="status" { (first + 1) " to " (first + rows.len()) " of " (found) " service ports" }
            (table("Service ports", &HEADINGS, &html! { @for row in rows { (service_row(row)) } }))
        }
        (pages(form, *found))
    }
}

fn service_row(row: &ServiceRow) -> Markup {
    let port = &row.port;
    html! {
        tr {
            th scope="row" { a href=(format!("services/{}/{}", port.namespace, port.name)) { (port.namespace) "/" (port.name) } }
            td { (port.port_name) } td { (port.protocol) }
            td { (addresses(row)) }
            td.number.bad[row.eligible_endpoints == 0] { (row.eligible_endpoints) "/" (row.total_endpoints) }
            (counts(row.counts.as_ref()))
            (state(row))
        }
    }
}

/// Returns all addresses in one text.
pub(super) fn addresses(row: &ServiceRow) -> String {
    row.addresses.iter().map(|served| served.address.as_str()).collect::<Vec<_>>().join(", ")
}

/// Returns the cells of connections, refusals and drops.
pub(super) fn counts(counts: Option<&Counts>) -> Markup {
    let number = |count: Option<u64>| count.map_or_else(|| "-".to_owned(), |count| count.to_string());
    let of = |read: fn(&Counts) -> Option<u64>| number(counts.and_then(read));
    html! {
        td.number { (of(|counts| Some(counts.connections))) }
        td.number { (of(|counts| counts.refusals)) }
        td.number { (of(|counts| counts.drops)) }
    }
}

/// Returns the cell of the state.
pub(super) fn state(row: &ServiceRow) -> Markup {
    match (&row.left_out, &row.programmed) {
        (Some(reason), _) => html! { td.bad { "left out: " (reason) } },
        (None, Some(_)) => html! { td { "programmed" } },
        (None, None) => html! { td.warn { "waiting" } },
    }
}

/// Returns links to the pages before and behind.
fn pages(form: &SearchForm, found: usize) -> Markup {
    let (index, pages) = (form.index(), found.div_ceil(ROWS_A_PAGE));
    html! {
        @if pages > 1 {
            nav.pages aria-label="Pages of the list" {
                @if index > 0 { a rel="prev" href=(form.href(index.min(pages) - 1)) { "previous" } }
                span { "page " (index + 1) " of " (pages) }
                @if index + 1 < pages { a rel="next" href=(form.href(index + 1)) { "next" } }
            }
        }
    }
}
