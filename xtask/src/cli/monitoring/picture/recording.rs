//! What the dashboards showed: the file that `daemon --record` of the test world writes.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::cli::monitoring::source::Panel;

/// The whole file.
#[derive(Debug, Deserialize)]
pub(super) struct Recording {
    queries: Vec<Query>,
}

/// The answer to one query of a panel.
#[derive(Debug, Deserialize)]
struct Query {
    /// `DASHBOARD: TITLE`.
    panel: String,
    legend: String,
    series: Vec<Series>,
}

#[derive(Debug, Deserialize)]
struct Series {
    labels: BTreeMap<String, String>,
    /// Seconds since 1970, and values.
    points: Vec<(f64, f64)>,
}

/// A series with its name.
#[derive(Debug, PartialEq)]
pub(super) struct Line {
    pub(super) name: String,
    pub(super) labels: BTreeMap<String, String>,
    /// Seconds, of which the last ones of the recording are 0, and values.
    pub(super) points: Vec<(f64, f64)>,
}

impl Recording {
    /// Returns the series of a panel.
    pub(super) fn lines(&self, dashboard: &str, panel: &Panel) -> Vec<Line> {
        let title = format!("{dashboard}: {}", panel.title);
        let end = self.end();
        let of_panel = self.queries.iter().filter(|query| query.panel == title);
        let series = of_panel.flat_map(|query| query.series.iter().map(|series| (&*query.legend, series)));
        series
            .map(|(legend, series)| Line {
                name: name(legend, &series.labels),
                labels: series.labels.clone(),
                points: series.points.iter().map(|(time, value)| (time - end, *value)).collect(),
            })
            .collect()
    }

    /// Returns the time of the last point of all.
    fn end(&self) -> f64 {
        let series = self.queries.iter().flat_map(|query| &query.series);
        series.filter_map(|series| series.points.last()).map(|(time, _)| *time).fold(0.0, f64::max)
    }
}

/// Puts the values of labels into a legend.
fn name(legend: &str, labels: &BTreeMap<String, String>) -> String {
    let mut parts = legend.split("{{");
    let mut name = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (label, rest) = part.split_once("}}").unwrap_or((part, ""));
        name += labels.get(label).map_or("", String::as_str);
        name += rest;
    }
    name.trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn legend_has_the_values_of_labels() {
        let labels = BTreeMap::from([("name", "web"), ("namespace", "shop")]);
        let labels = labels.into_iter().map(|(name, value)| (name.into(), value.into())).collect();
        assert_eq!(name("{{namespace}}/{{name}}", &labels), "shop/web");
        assert_eq!(name("{{port_name}} {{name}} of all", &labels), "web of all");
        assert_eq!(name("99 %", &labels), "99 %");
    }
}
