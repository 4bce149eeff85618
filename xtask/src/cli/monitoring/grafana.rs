//! Writes a dashboard as Grafana's JSON (schema version 39, Grafana 10.4).

use serde_json::{Value, json};

use super::layout::{self, Item, Place};
use super::source::{Dashboard, Panel, Show, Source};

/// Returns the text of the file of a dashboard.
pub(super) fn text(source: &Source, dashboard: &Dashboard) -> String {
    format!("{:#}\n", json(source, dashboard))
}

fn json(source: &Source, dashboard: &Dashboard) -> Value {
    json!({
        "uid": dashboard.name,
        "title": dashboard.title,
        "tags": ["shunt"],
        "schemaVersion": 39,
        "editable": false,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables(source, dashboard)},
        "panels": panels(dashboard),
    })
}

fn variables(source: &Source, dashboard: &Dashboard) -> Vec<Value> {
    let data_source =
        json!({"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"});
    let of_dashboard = dashboard.variables.iter().enumerate().map(|(index, name)| {
        let query = source.variables.get(name).map_or("", String::as_str);
        // The first one is the job: all jobs with shunt, unless one is chosen.
        let is_first = index == 0;
        json!({
            "name": name,
            "type": "query",
            "datasource": data_source_of_panels(),
            "definition": query,
            "query": {"query": query, "refId": name},
            "refresh": 2,
            "sort": 1,
            "multi": is_first,
            "includeAll": is_first,
            "allValue": is_first.then_some(".+"),
            "current": if is_first { json!({"text": "All", "value": "$__all"}) } else { json!({}) },
        })
    });
    [data_source].into_iter().chain(of_dashboard).collect()
}

fn data_source_of_panels() -> Value {
    json!({"type": "prometheus", "uid": "${datasource}"})
}

fn panels(dashboard: &Dashboard) -> Vec<Value> {
    let placed = layout::place(dashboard).into_iter().zip(1..);
    placed
        .map(|((Place { left, top, width, height }, item), id)| {
            let place = json!({"x": left, "y": top, "w": width, "h": height});
            match item {
                Item::Title(title) => json!({"type": "row", "title": title, "id": id, "collapsed": false,
                                             "panels": [], "gridPos": place}),
                Item::Panel(panel) => panel_json(dashboard, panel, id, &place),
            }
        })
        .collect()
}

fn panel_json(dashboard: &Dashboard, panel: &Panel, id: u32, place: &Value) -> Value {
    let queries = dashboard.queries(panel).into_iter().zip('A'..);
    let is_instant = panel.show != Show::Graph;
    let targets: Vec<Value> = queries
        .map(|((legend, expr), id)| {
            json!({
                "refId": id.to_string(),
                "datasource": data_source_of_panels(),
                "expr": expr,
                "legendFormat": legend,
                "instant": is_instant,
                "range": !is_instant,
                "format": if panel.show == Show::Table { "table" } else { "time_series" },
            })
        })
        .collect();
    let (kind, options, transformations) = look(panel.show);
    json!({
        "id": id,
        "type": kind,
        "title": panel.title,
        "description": panel.description(),
        "datasource": data_source_of_panels(),
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": {"fillOpacity": 10}}, "overrides": []},
        "options": options,
        "targets": targets,
        "transformations": transformations,
    })
}

/// Returns type, options and transformations of a panel.
fn look(show: Show) -> (&'static str, Value, Value) {
    match show {
        Show::Graph => {
            let legend = json!({"displayMode": "list", "placement": "bottom", "showLegend": true});
            ("timeseries", json!({"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}), json!([]))
        }
        Show::Stat => {
            ("stat", json!({"colorMode": "none", "reduceOptions": {"calcs": ["lastNotNull"]}}), json!([]))
        }
        Show::Table => {
            // Labels of the target say nothing about shunt.
            let hidden = ["Time", "Value", "__name__", "container", "endpoint", "job", "namespace", "pod"];
            let hidden: serde_json::Map<String, Value> =
                hidden.into_iter().map(|name| (name.to_owned(), true.into())).collect();
            (
                "table",
                json!({"showHeader": true}),
                json!([{"id": "organize", "options": {"excludeByName": hidden}}]),
            )
        }
    }
}
