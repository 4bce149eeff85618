//! Draws a chart as SVG.

use std::ops::Range;

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;

use super::charts::{Chart, Line, Stroke};

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Axes<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<LogCoord<f64>, LogCoord<f64>>>;

const SIZE: (u32, u32) = (860, 420);
/// The width of the part with the axes. The rest explains the lines.
const AXES_WIDTH: u32 = 630;
const FONT: &str = "sans-serif";
const EBPF: RGBColor = RGBColor(0, 90, 160);
const OTHER: RGBColor = RGBColor(200, 85, 0);
const OF_ALL: RGBColor = RGBColor(90, 90, 90);
/// The distance of lines from the edges of the axes, as a factor.
const ROOM: f64 = 1.4;
const ROW: i32 = 22;
/// The length of the dashes of targets, and of the gaps between them.
const TARGET_DASHES: (u32, u32) = (4, 8);

/// Returns the chart as SVG. The same chart always gives the same text.
pub(super) fn draw(chart: &Chart) -> Result<String> {
    let mut svg = String::new();
    render(chart, &mut svg).map_err(|error| anyhow!("cannot draw {}: {error}", chart.name))?;
    Ok(svg)
}

type Drawn = Result<(), Box<dyn std::error::Error>>;

fn render(chart: &Chart, svg: &mut String) -> Drawn {
    let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let (left, right) = area.split_horizontally(AXES_WIDTH);
    let (x, y) = ranges(chart);
    let mut axes = ChartBuilder::on(&left)
        .caption(chart.title, (FONT, 18))
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d(x.clone().log_scale(), y.log_scale())?;
    axes.configure_mesh()
        .x_desc("Services")
        .y_desc(chart.unit)
        .label_style((FONT, 13))
        .axis_desc_style((FONT, 14))
        .max_light_lines(0)
        .bold_line_style(RGBColor(225, 225, 225))
        .x_label_formatter(&|value| number(*value))
        .y_label_formatter(&|value| number(*value))
        .draw()?;
    for line in &chart.lines {
        draw_line(&mut axes, line)?;
    }
    for target in &chart.targets {
        let ends = [(x.start, target.value), (x.end, target.value)];
        axes.draw_series(DashedLineSeries::new(
            ends,
            TARGET_DASHES.0,
            TARGET_DASHES.1,
            color(target.mode).stroke_width(1),
        ))?;
    }
    explain(&right, chart)?;
    area.present()?;
    Ok(())
}

fn draw_line(axes: &mut Axes<'_, '_>, line: &Line) -> Drawn {
    let style = color(Some(&line.mode)).stroke_width(2);
    let points = line.points.iter().copied();
    match dashes(line.stroke) {
        None => axes.draw_series(LineSeries::new(points.clone(), style))?,
        Some((length, gap)) => axes.draw_series(DashedLineSeries::new(points.clone(), length, gap, style))?,
    };
    axes.draw_series(points.map(|point| Circle::new(point, 3, style.filled())))?;
    Ok(())
}

/// Draws a row with a sample for each line and target. plotters would put them over the lines.
fn explain(area: &Area<'_>, chart: &Chart) -> Drawn {
    let lines = chart.lines.iter().map(|line| {
        let dashes = dashes(line.stroke);
        (line.label.clone(), color(Some(&line.mode)).stroke_width(2), dashes)
    });
    let targets = chart.targets.iter().map(|target| {
        let label = format!("{}: {}", target.label, number(target.value));
        (label, color(target.mode).stroke_width(1), Some(TARGET_DASHES))
    });
    for ((label, style, dashes), y) in lines.chain(targets).zip((60..).step_by(ROW.unsigned_abs() as usize)) {
        sample(area, y, style, dashes)?;
        area.draw(&Text::new(label, (40, y - 7), (FONT, 13)))?;
    }
    Ok(())
}

/// Draws a short line with dashes of this length and gap.
fn sample(area: &Area<'_>, y: i32, style: ShapeStyle, dashes: Option<(u32, u32)>) -> Drawn {
    let (start, end) = (4, 34);
    let Some((length, gap)) = dashes else {
        area.draw(&PathElement::new([(start, y), (end, y)], style))?;
        return Ok(());
    };
    let [length, gap] = [length, gap].map(u32::cast_signed);
    let mut from = start;
    while from < end {
        area.draw(&PathElement::new([(from, y), (end.min(from + length), y)], style))?;
        from += length + gap;
    }
    Ok(())
}

/// Returns the length of dashes and of the gaps between them. None for a solid line.
const fn dashes(stroke: Stroke) -> Option<(u32, u32)> {
    match stroke {
        Stroke::Solid => None,
        Stroke::Dashed => Some((9, 5)),
        Stroke::Dotted => Some((3, 5)),
    }
}

fn color(mode: Option<&str>) -> RGBColor {
    match mode {
        Some("ebpf") => EBPF,
        Some(_) => OTHER,
        None => OF_ALL,
    }
}

/// Returns the ranges of the axes, with room around all lines and targets.
fn ranges(chart: &Chart) -> (Range<f64>, Range<f64>) {
    let points = || chart.lines.iter().flat_map(|line| &line.points);
    let values = points().map(|point| point.1).chain(chart.targets.iter().map(|target| target.value));
    (around(points().map(|point| point.0)), around(values))
}

/// Returns a range around positive values. A logarithmic axis cannot show others.
fn around(values: impl Iterator<Item = f64>) -> Range<f64> {
    let values: Vec<f64> = values.filter(|value| *value > 0.0).collect();
    let least = values.iter().copied().min_by(f64::total_cmp).unwrap_or(1.0);
    let most = values.iter().copied().max_by(f64::total_cmp).unwrap_or(1.0);
    least / ROOM..most * ROOM
}

/// Formats a number with up to four decimals, and with commas between thousands.
fn number(value: f64) -> String {
    let text = format!("{value:.4}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    let (whole, rest) = text.split_at(text.find('.').unwrap_or(text.len()));
    let mut grouped = String::new();
    for (index, digit) in whole.chars().enumerate() {
        if index > 0 && (whole.len() - index).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped + rest
}

#[cfg(test)]
mod tests {
    use super::super::charts::{self, tests::figures};
    use super::*;

    #[test]
    fn every_line_and_target_is_drawn_and_named() {
        for chart in charts::all(&["ebpf", "nftables"].map(figures)) {
            let svg = draw(&chart).unwrap();
            let names = chart.lines.iter().map(|line| &*line.label);
            for name in names.chain(chart.targets.iter().map(|target| target.label)).chain([chart.title]) {
                assert!(svg.contains(name), "{name} is not in {}", chart.name);
            }
            let circles = svg.matches("<circle").count();
            let points: usize = chart.lines.iter().map(|line| line.points.len()).sum();
            assert_eq!(circles, points, "{}", chart.name);
            assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"));
        }
    }

    #[test]
    fn same_chart_gives_the_same_text() {
        let draw_all = || charts::all(&[figures("ebpf")]).iter().map(|chart| draw(chart).unwrap()).collect();
        let [first, second]: [Vec<String>; 2] = [draw_all(), draw_all()];
        assert_eq!(first, second);
    }

    #[test]
    fn chart_without_figures_is_drawn_empty() {
        let empty = Chart { name: "none", title: "None", unit: "s", lines: Vec::new(), targets: Vec::new() };
        assert!(draw(&empty).unwrap().contains("None"));
    }

    #[test]
    fn numbers_have_commas_and_no_needless_zeros() {
        assert_eq!(
            [0.001, 0.3, 1.0, 950.0, 1_000.0, 30_000.0].map(number),
            ["0.001", "0.3", "1", "950", "1,000", "30,000"]
        );
    }
}
