//! Draws the screen.

use proxy_common::layout::fills_up;
use ratatui::{
    Frame,
    layout::{Alignment, Constraint, Layout, Rect},
    style::{Color, Modifier, Style, Stylize as _},
    text::{Line, Span, Text},
    widgets::{Block, Clear, Paragraph, Row as TableRow, Table},
};

use super::{Rows, Screen, View, arguments::is_number, screen::NodeLine};
use crate::inspect::Row;

const HELP: &str = "\
1 2 3, Tab     Services, maps, programs
up, down, j k  choose a row; it stays chosen
PgUp, PgDn     a page; Home and End: first and last row
Enter          the endpoints of the Service
Esc            all rows, no chosen row, back
left, right    sort by another column
r              reverse the order
/              show only rows that contain a text
space, p       pause, continue
q              quit

Press any key.";

/// The space between two columns.
const SPACING: u16 = 2;
/// So many columns are shown on any screen.
const FEWEST_COLUMNS: usize = 6;
/// From this fill on a map is marked.
const NEARLY_FULL: f64 = 75.0;

/// Draws the whole screen.
pub fn draw(frame: &mut Frame<'_>, screen: &mut Screen) {
    let areas = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Min(2),
        Constraint::Length(1),
    ]);
    let [status, tabs, table, keys] = areas.areas(frame.area());
    frame.render_widget(status_line(screen), status);
    frame.render_widget(tab_line(screen), tabs);
    draw_table(frame, screen, table);
    frame.render_widget(key_line(screen), keys);
    if screen.has_help {
        draw_help(frame);
    }
}

fn status_line(screen: &Screen) -> Line<'_> {
    let NodeLine { mode, state, is_well } = screen.node_line();
    let seconds = screen.interval.as_secs_f64();
    let paused = if screen.is_paused { "paused" } else { "" };
    let state = if is_well { state.green() } else { state.red() };
    Line::from_iter([
        Span::from("shunt top  ").bold(),
        Span::from(format!("mode {mode}  ")),
        state,
        Span::from(format!("  every {seconds} s  ")),
        Span::from(paused).yellow().bold(),
    ])
}

fn tab_line(screen: &Screen) -> Line<'_> {
    let mut spans = Vec::new();
    for (view, number) in screen.views().into_iter().zip(["1", "2", "3"]) {
        let number = match view {
            View::Maps => "2",
            View::Programs => "3",
            _ => number,
        };
        let is_shown = view == screen.view || (view == View::Services && screen.view == View::Endpoints);
        let title = format!(" {number} {} ", view.title());
        spans.push(if is_shown { title.reversed() } else { title.into() });
        spans.push(Span::from(" "));
    }
    if let (View::Endpoints, Some(service)) = (screen.view, &screen.service) {
        spans.push(format!(" > endpoints of {}/{}", service.namespace, service.name).bold());
    }
    spans.push(format!("  {} rows", screen.shown.len()).dim());
    Line::from(spans)
}

fn key_line(screen: &Screen) -> Line<'_> {
    if screen.is_typing {
        return Line::from(format!("/{}_", screen.filter())).bold();
    }
    if let Some(problem) = &screen.problem {
        return Line::from(problem.as_str()).red();
    }
    let filter = match screen.filter() {
        "" => String::new(),
        filter => format!("only {filter:?} (Esc: all)  "),
    };
    let enter = if screen.view == View::Services { "Enter endpoints  " } else { "" };
    let back = if screen.view == View::Endpoints { "Esc back  " } else { "" };
    let keys = format!("{enter}{back}arrows sort, choose  r reverse  / filter  space pause  ? help  q quit");
    Line::from_iter([Span::from(filter).yellow(), Span::from(keys).dim()])
}

fn draw_table(frame: &mut Frame<'_>, screen: &mut Screen, area: Rect) {
    let height = usize::from(area.height.saturating_sub(1));
    let first = screen.scroll(height);
    let indexes = screen.shown.iter().skip(first).take(height);
    let rows: Vec<Cells> = match &screen.rows {
        Rows::Services(rows) => indexes.filter_map(|&index| rows.get(index)).map(service).collect(),
        Rows::Endpoints(rows) => indexes.filter_map(|&index| rows.get(index)).map(plain).collect(),
        Rows::Maps(rows) => indexes.filter_map(|&index| rows.get(index)).map(map).collect(),
        Rows::Programs(rows) => indexes.filter_map(|&index| rows.get(index)).map(plain).collect(),
    };
    let headings = headings(screen);
    let widths = widths(&headings, &rows, usize::from(area.width));
    let chosen = screen.chosen().map(|position| position.wrapping_sub(first));
    let view = screen.view;
    let columns = widths.len();
    let body = rows.iter().enumerate().map(|(index, (cells, style))| {
        let style = if chosen == Some(index) { style.add_modifier(Modifier::REVERSED) } else { *style };
        TableRow::new(
            cells.iter().take(columns).enumerate().map(|(column, cell)| aligned(view, column, cell)),
        )
        .style(style)
    });
    let header = headings.iter().take(columns).enumerate().map(|(column, cell)| aligned(view, column, cell));
    let header = TableRow::new(header).style(Style::new().bold().underlined());
    let table = Table::new(body, widths).header(header).column_spacing(SPACING);
    frame.render_widget(table, area);
}

/// The cells of a row, and its style.
type Cells = (Vec<String>, Style);

fn plain(row: &impl Row) -> Cells {
    (row.cells(), Style::new())
}

/// Marks Services that refuse or drop connections at the moment.
fn service(row: &super::ServiceRate) -> Cells {
    let fails = row
        .per_second
        .as_ref()
        .is_some_and(|rates| [rates.refusals, rates.drops].iter().flatten().any(|rate| *rate > 0.0));
    (row.cells(), if fails { Style::new().fg(Color::Yellow) } else { Style::new() })
}

/// Marks maps that are nearly full, unless that is normal for them.
pub(super) fn map(row: &super::MapRow) -> Cells {
    let is_marked = row.fill_percent >= NEARLY_FULL && !fills_up(&row.name);
    (row.cells(), if is_marked { Style::new().fg(Color::Red) } else { Style::new() })
}

/// Returns the headings, of which the sorted one has an arrow.
fn headings(screen: &Screen) -> Vec<String> {
    let sorting = screen.sorting();
    let heading = |(column, name): (usize, &&str)| match (column == sorting.column, sorting.descending) {
        (false, _) => (*name).to_owned(),
        (true, true) => format!("{name}▼"),
        (true, false) => format!("{name}▲"),
    };
    screen.view.columns().iter().enumerate().map(heading).collect()
}

fn aligned(view: View, column: usize, cell: &str) -> Text<'_> {
    let alignment = if is_number(view, column) { Alignment::Right } else { Alignment::Left };
    Text::from(cell).alignment(alignment)
}

/// Returns the widths of the columns that fit: what the rows on the screen need. Columns at the
/// right are left out first. If names are still too long, the second column, which has the longest,
/// gets less.
fn widths(headings: &[String], rows: &[Cells], available: usize) -> Vec<Constraint> {
    let mut widths: Vec<usize> = headings.iter().map(|heading| heading.chars().count()).collect();
    for (cells, _) in rows {
        for (width, cell) in widths.iter_mut().zip(cells) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let needed = |widths: &[usize]| {
        widths.iter().map(|width| width + usize::from(SPACING)).sum::<usize>() - usize::from(SPACING)
    };
    while widths.len() > FEWEST_COLUMNS && needed(&widths) > available {
        widths.pop();
    }
    let excess = needed(&widths).saturating_sub(available);
    if let Some(name) = widths.get_mut(1) {
        *name = name.saturating_sub(excess).max(1);
    }
    widths.into_iter().map(|width| Constraint::Length(u16::try_from(width).unwrap_or(u16::MAX))).collect()
}

fn draw_help(frame: &mut Frame<'_>) {
    let (whole, lines) = (frame.area(), u16::try_from(HELP.lines().count()).unwrap_or(u16::MAX));
    let [area] =
        Layout::vertical([Constraint::Length(lines + 2)]).flex(ratatui::layout::Flex::Center).areas(whole);
    let [area] = Layout::horizontal([Constraint::Length(60)]).flex(ratatui::layout::Flex::Center).areas(area);
    frame.render_widget(Clear, area);
    frame.render_widget(Paragraph::new(HELP).block(Block::bordered().title(" Keys ")), area);
}
