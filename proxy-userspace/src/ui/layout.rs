//! The frame of all pages: title, navigation, style, and a script for comfort.

use maud::{DOCTYPE, Markup, PreEscaped, html};

/// A part of the pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Section {
    /// The node.
    Node,
    /// The list of Services.
    Services,
    /// One Service.
    Service,
    /// Maps.
    Maps,
    /// Events.
    Events,
    /// No page of its own.
    Error,
}

impl Section {
    /// Returns the heading.
    pub(super) const fn title(self) -> &'static str {
        match self {
            Self::Node => "Node",
            Self::Services | Self::Service => "Services",
            Self::Maps => "Maps",
            Self::Events => "Events",
            Self::Error => "shunt",
        }
    }

    /// Returns what leads from the address of the page to that of the pages. Links are relative, so
    /// that they also work behind a proxy that adds a path. Only pages of Services lie deeper; an
    /// error can be anywhere.
    const fn root(self) -> &'static str {
        match self {
            Self::Service => "../../",
            Self::Error => "/ui/",
            _ => "",
        }
    }
}

/// The targets of the navigation.
const NAVIGATION: [(Section, &str); 4] = [
    (Section::Node, "./"),
    (Section::Services, "services"),
    (Section::Maps, "maps"),
    (Section::Events, "events"),
];

/// The style. It follows the colours that the reader's system prefers.
pub(super) const STYLE: &str = include_str!("style.css");
/// The script. It reloads the page every few seconds if the reader wants that.
pub(super) const SCRIPT: &str = include_str!("refresh.js");

/// Returns the whole document.
pub(super) fn frame(section: Section, content: &Markup) -> Markup {
    let root = section.root();
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { (section.title()) " - shunt" }
                link rel="icon" href="data:,";
                style { (PreEscaped(STYLE)) }
            }
            body {
                header {
                    strong { "shunt" }
                    nav aria-label="Pages" {
                        @for (target, path) in NAVIGATION {
                            @let href = if root == "/ui/" && path == "./" { root.to_owned() } else { format!("{root}{path}") };
                            a href=(href) aria-current=[(target.title() == section.title()).then_some("page")] { (target.title()) }
                        }
                    }
                    // Only the script shows it.
                    label #refresh hidden { input type="checkbox"; " reload every 5 s" }
                }
                main { (content) }
                script { (PreEscaped(SCRIPT)) }
            }
        }
    }
}

/// Returns a table with headings.
pub(super) fn table(caption: &str, headings: &[&str], rows: &Markup) -> Markup {
    html! {
        div.wide {
            table {
                caption { (caption) }
                thead { tr { @for heading in headings { th scope="col" { (heading) } } } }
                tbody { (rows) }
            }
        }
    }
}
