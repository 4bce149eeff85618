//! The source of the dashboards: `deploy/monitoring/dashboards.yaml`.

use std::collections::BTreeMap;

use serde::Deserialize;

/// What stands for the labels that a dashboard selects.
const SELECT: &str = "SELECT";

/// The whole file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Source {
    /// The queries for the values of the variables, by name.
    pub(super) variables: BTreeMap<String, String>,
    pub(super) dashboards: Vec<Dashboard>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Dashboard {
    /// The name of the file, and the UID.
    pub(super) name: String,
    pub(super) title: String,
    /// Label matchers.
    select: String,
    /// The names of its variables, in order. The first one can have several values.
    pub(super) variables: Vec<String>,
    pub(super) rows: Vec<Row>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Row {
    pub(super) title: String,
    pub(super) panels: Vec<Panel>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Panel {
    pub(super) title: String,
    /// Shown as a tooltip.
    #[serde(default)]
    pub(super) text: String,
    #[serde(default)]
    pub(super) show: Show,
    /// Grafana's name of a unit.
    #[serde(default = "default_unit")]
    pub(super) unit: String,
    /// In the columns of Grafana's grid, which has 24.
    pub(super) width: Option<u32>,
    /// The modes that have the metrics. Empty if all have.
    #[serde(default)]
    modes: Vec<String>,
    /// Why there is no data on a healthy node.
    #[serde(default)]
    empty: String,
    /// Expressions by legend.
    queries: serde_yaml_ng::Mapping,
}

/// The kinds of panels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Show {
    #[default]
    Graph,
    Stat,
    Table,
}

fn default_unit() -> String {
    "short".to_owned()
}

impl Dashboard {
    /// Returns legend and expression of each query of a panel.
    pub(super) fn queries(&self, panel: &Panel) -> Vec<(String, String)> {
        let text = |value: &serde_yaml_ng::Value| value.as_str().unwrap_or_default().to_owned();
        let queries = panel.queries.iter();
        queries.map(|(legend, query)| (text(legend), text(query).replace(SELECT, &self.select))).collect()
    }
}

impl Panel {
    /// Returns what the tooltip says.
    pub(super) fn description(&self) -> String {
        let modes = match &*self.modes {
            [] => String::new(),
            modes => format!("Only in mode {}.", modes.join(" and ")),
        };
        let empty = match &*self.empty {
            "" => String::new(),
            why => format!("No data: {why}."),
        };
        [&*self.text, &modes, &empty]
            .into_iter()
            .filter(|part| !part.is_empty())
            .collect::<Vec<_>>()
            .join(" ")
    }
}
