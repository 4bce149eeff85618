//! Records what the dashboards show, for the pictures in the documents.

use std::{fs, path::Path};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use shunt_tests::deadline::Stopwatch;

use super::{
    OFTEN, load,
    prometheus::{Prometheus, Series},
    queries, wait_until_scraped,
};
use crate::test_node::{Setup, TestNode};

/// Some two minutes.
const ROUNDS: usize = 120;
/// Short, so that the changes of the load are seen.
const INTERVAL: &str = "10s";

/// Makes load, then writes the series of each query of the dashboards to a file.
pub(crate) fn record(setup: &Setup, file: &Path) -> Result<()> {
    let mut node = TestNode::started(setup, &setup.mode, OFTEN)?;
    load::prepare(&node)?;
    let prometheus = Prometheus::start(&mut node.world)?;
    wait_until_scraped(&prometheus, &mut node)?;
    let began = Stopwatch::start();
    for number in 0..ROUNDS {
        load::round(&mut node, number)?;
    }
    let seconds = began.elapsed().as_secs_f64();
    let queries = queries::of_dashboards("shunt", INTERVAL)?.into_iter();
    let queries = queries.filter(|query| !query.panel.starts_with("variable "));
    let recorded = queries.map(|query| {
        let series = prometheus.query_range(&mut node.world, &query.expression, seconds)?;
        let series: Vec<Value> = series.iter().map(json_of).collect();
        Ok(json!({"panel": query.panel, "legend": query.legend, "series": series}))
    });
    let recorded: Vec<Value> = recorded.collect::<Result<_>>()?;
    let text = json!({"seconds": seconds, "queries": recorded}).to_string();
    fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))?;
    node.end()
}

fn json_of(series: &Series) -> Value {
    // JSON has no NaN: it becomes null.
    let points = series.points().into_iter().filter(|(_, value)| value.is_finite());
    json!({"labels": series.metric, "points": points.collect::<Vec<_>>()})
}
