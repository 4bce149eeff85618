//! Places rows and panels in Grafana's grid.

use super::source::{Dashboard, Panel, Show};

pub(super) const COLUMNS: u32 = 24;
const TITLE_HEIGHT: u32 = 1;

/// A place in the grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) left: u32,
    pub(super) top: u32,
    pub(super) width: u32,
    pub(super) height: u32,
}

/// What is placed.
#[derive(Clone, Copy, Debug)]
pub(super) enum Item<'a> {
    /// The title of a row.
    Title(&'a str),
    Panel(&'a Panel),
}

/// Returns the rows and their panels, from left to right and from top to bottom.
pub(super) fn place(dashboard: &Dashboard) -> Vec<(Place, Item<'_>)> {
    let (mut all, mut top) = (Vec::new(), 0);
    for row in &dashboard.rows {
        let title = Place { left: 0, top, width: COLUMNS, height: TITLE_HEIGHT };
        all.push((title, Item::Title(&row.title)));
        top += TITLE_HEIGHT;
        let (mut left, mut row_height) = (0, 0);
        for panel in &row.panels {
            let (width, height) = size(panel);
            if left + width > COLUMNS {
                (left, top, row_height) = (0, top + row_height, 0);
            }
            all.push((Place { left, top, width, height }, Item::Panel(panel)));
            (left, row_height) = (left + width, row_height.max(height));
        }
        top += row_height;
    }
    all
}

/// Returns width and height of a panel.
fn size(panel: &Panel) -> (u32, u32) {
    let (width, height) = match panel.show {
        Show::Stat => (4, 4),
        Show::Graph | Show::Table => (8, 7),
    };
    (panel.width.unwrap_or(width), height)
}
