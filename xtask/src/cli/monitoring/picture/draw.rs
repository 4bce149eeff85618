//! Draws a dashboard as SVG, in the grid of Grafana.

use std::ops::Range;

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;

use super::recording::{Line, Recording};
use super::units;
use crate::cli::monitoring::layout::{self, COLUMNS, Item, Place};
use crate::cli::monitoring::source::{Dashboard, Panel, Show};

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = Result<(), Box<dyn std::error::Error>>;

/// The size of a cell of the grid.
const CELL: (u32, u32) = (50, 30);
const FONT: &str = "sans-serif";
const INK: RGBColor = RGBColor(40, 40, 40);
const PALE: RGBColor = RGBColor(225, 225, 225);
/// The distance between panels, and around what is in them.
const GAP: i32 = 4;
/// The widths of a letter of the legend and of the sample before a name.
const LETTER: usize = 6;
const SAMPLE: usize = 22;
/// Labels of the target, which say nothing about shunt.
const OF_TARGET: [&str; 6] = ["__name__", "container", "instance", "job", "namespace", "pod"];

/// Returns the dashboard as SVG. The same recording always gives the same text.
pub(super) fn draw(dashboard: &Dashboard, recording: &Recording) -> Result<String> {
    let mut svg = String::new();
    render(dashboard, recording, &mut svg)
        .map_err(|error| anyhow!("cannot draw {}: {error}", dashboard.name))?;
    Ok(svg)
}

fn render(dashboard: &Dashboard, recording: &Recording, svg: &mut String) -> Drawn {
    let placed = layout::place(dashboard);
    let rows = placed.iter().map(|(place, _)| place.top + place.height).max().unwrap_or(1);
    let area = SVGBackend::with_string(svg, (COLUMNS * CELL.0, rows * CELL.1)).into_drawing_area();
    area.fill(&WHITE)?;
    for (place, item) in placed {
        let part = cut(&area, place);
        match item {
            Item::Title(title) => {
                part.draw(&Text::new(title, (2 * GAP, 10), (FONT, 17).into_font().color(&INK)))?;
            }
            Item::Panel(panel) => draw_panel(&part, panel, &recording.lines(&dashboard.name, panel))?,
        }
    }
    area.present()?;
    Ok(())
}

/// Returns the part of the area at a place of the grid.
fn cut<'a>(area: &Area<'a>, place: Place) -> Area<'a> {
    let x = (place.left * CELL.0).cast_signed();
    let y = (place.top * CELL.1).cast_signed();
    area.clone().shrink((x, y), (place.width * CELL.0, place.height * CELL.1))
}

fn draw_panel(area: &Area<'_>, panel: &Panel, lines: &[Line]) -> Drawn {
    let (width, height) = size(area);
    let border = Rectangle::new([(GAP, GAP), (width - GAP, height - GAP)], PALE.stroke_width(1));
    area.draw(&border)?;
    area.draw(&Text::new(&*panel.title, (3 * GAP, 3 * GAP), (FONT, 13).into_font().color(&INK)))?;
    match panel.show {
        Show::Stat => draw_stat(area, panel, lines),
        Show::Table => draw_table(area, lines),
        Show::Graph => draw_graph(area, panel, lines),
    }
}

fn size(area: &Area<'_>) -> (i32, i32) {
    let (width, height) = area.dim_in_pixel();
    (width.cast_signed(), height.cast_signed())
}

fn draw_stat(area: &Area<'_>, panel: &Panel, lines: &[Line]) -> Drawn {
    let last = lines.first().and_then(|line| line.points.last());
    let text = last.map_or_else(|| "no data".to_owned(), |(_, value)| units::text(*value, &panel.unit));
    area.draw(&Text::new(text, (5 * GAP, size(area).1 / 2), (FONT, 28).into_font().color(&INK)))?;
    Ok(())
}

/// Draws a row for each label.
fn draw_table(area: &Area<'_>, lines: &[Line]) -> Drawn {
    let labels = lines.iter().flat_map(|line| &line.labels);
    let labels = labels.filter(|(name, value)| !OF_TARGET.contains(&&***name) && !value.is_empty());
    let mut rows: Vec<String> = labels.map(|(name, value)| format!("{name}: {value}")).collect();
    if rows.is_empty() {
        rows.push("no data".to_owned());
    }
    for (row, y) in rows.into_iter().zip((44..).step_by(22)) {
        area.draw(&Text::new(row, (5 * GAP, y), (FONT, 14).into_font().color(&INK)))?;
    }
    Ok(())
}

fn draw_graph(area: &Area<'_>, panel: &Panel, lines: &[Line]) -> Drawn {
    let (width, height) = size(area);
    let shown = largest(lines);
    let legend = legend_rows(&shown, usize::try_from(width).unwrap_or(0));
    let legend_height = 15 * i32::try_from(legend.len()).unwrap_or(0) + 2 * GAP;
    let plot = area.clone().shrink(
        (2 * GAP, 30),
        ((width - 5 * GAP).cast_unsigned(), (height - 30 - legend_height).cast_unsigned()),
    );
    let (x, y) = ranges(&shown);
    let mut axes = ChartBuilder::on(&plot)
        .margin_right(8)
        .x_label_area_size(20)
        .y_label_area_size(62)
        .build_cartesian_2d(x, y)?;
    axes.configure_mesh()
        .x_labels(4)
        .y_labels(4)
        .label_style((FONT, 11))
        .max_light_lines(0)
        .bold_line_style(PALE)
        .axis_style(PALE)
        .x_label_formatter(&|seconds| units::text(*seconds, "s"))
        .y_label_formatter(&|value| units::text(*value, &panel.unit))
        .draw()?;
    for (index, line) in shown.iter().enumerate() {
        axes.draw_series(LineSeries::new(line.points.iter().copied(), color(index).stroke_width(2)))?;
    }
    draw_legend(area, &legend, height - legend_height)
}

/// Returns up to eight lines with the largest values, which a small picture can show.
fn largest(lines: &[Line]) -> Vec<&Line> {
    let most = |line: &Line| line.points.iter().map(|(_, value)| *value).fold(0.0, f64::max);
    let mut sorted: Vec<&Line> = lines.iter().collect();
    sorted.sort_by(|one, other| most(other).total_cmp(&most(one)));
    sorted.truncate(8);
    sorted
}

/// Distributes names over at most three rows. Each has its index and its distance from the left
/// edge.
fn legend_rows(lines: &[&Line], width: usize) -> Vec<Vec<(usize, i32, String)>> {
    let mut rows: Vec<Vec<(usize, i32, String)>> = Vec::new();
    let mut left = width;
    for (index, line) in lines.iter().enumerate().filter(|(_, line)| !line.name.is_empty()) {
        let needed = SAMPLE + LETTER * line.name.chars().count() + 2 * LETTER;
        if left + needed > width - SAMPLE {
            (left, rows) = (SAMPLE / 2, [rows, vec![Vec::new()]].concat());
        }
        if let Some(row) = rows.last_mut() {
            row.push((index, i32::try_from(left).unwrap_or(0), line.name.clone()));
        }
        left += needed;
    }
    rows.truncate(3);
    rows
}

fn draw_legend(area: &Area<'_>, rows: &[Vec<(usize, i32, String)>], top: i32) -> Drawn {
    for (row, y) in rows.iter().zip((top..).step_by(15)) {
        for (index, x, name) in row {
            area.draw(&PathElement::new([(*x, y + 6), (x + 12, y + 6)], color(*index).stroke_width(2)))?;
            area.draw(&Text::new(&**name, (x + 16, y), (FONT, 11).into_font().color(&INK)))?;
        }
    }
    Ok(())
}

fn color(index: usize) -> RGBColor {
    const COLORS: [RGBColor; 8] = [
        RGBColor(0, 90, 160),
        RGBColor(200, 85, 0),
        RGBColor(20, 130, 80),
        RGBColor(150, 60, 140),
        RGBColor(90, 90, 90),
        RGBColor(180, 140, 0),
        RGBColor(60, 150, 190),
        RGBColor(190, 50, 60),
    ];
    COLORS[index % COLORS.len()]
}

/// Returns the ranges of the axes: the time of all lines, and from 0 to above the largest value.
fn ranges(lines: &[&Line]) -> (Range<f64>, Range<f64>) {
    let points = || lines.iter().flat_map(|line| &line.points);
    let begin = points().map(|point| point.0).fold(-1.0, f64::min);
    let most = points().map(|point| point.1).fold(0.0, f64::max);
    (begin..0.0, 0.0..if most > 0.0 { most * 1.1 } else { 1.0 })
}
