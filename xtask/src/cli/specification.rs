//! Checks that each promise of SPECIFICATION.md names a check that exists. The numbers of the
//! benchmark are compared with its targets in `bench/targets/mod.rs`.

use std::fs;

use anyhow::{Context as _, Result, bail, ensure};
use xtask::workspace;

use super::checks::{self, Check, Sources};

/// A row of a table: the promise, and its checks.
struct Row {
    what: String,
    promise: String,
    checks: Vec<Check>,
}

fn rows() -> Result<Vec<Row>> {
    let text = fs::read_to_string(workspace::root().join("SPECIFICATION.md")).context("SPECIFICATION.md")?;
    let is_header = |line: &&str| !line.starts_with("| what |") && !line.starts_with("|---");
    let lines = text.lines().filter(|line| line.starts_with('|')).filter(is_header);
    lines.map(|line| row(line).with_context(|| line.to_owned())).collect()
}

fn row(line: &str) -> Result<Row> {
    let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
    let [what, promise, _, _, check] = cells[..] else { bail!("not five cells") };
    Ok(Row { what: what.to_owned(), promise: promise.to_owned(), checks: checks::named(check) })
}

#[test]
fn every_promise_names_checks_that_exist() -> Result<()> {
    let sources = Sources::read()?;
    let rows = rows()?;
    ensure!(rows.len() > 30, "{} rows", rows.len());
    for Row { what, promise, checks } in rows {
        ensure!(!promise.is_empty(), "{what}: it promises nothing");
        ensure!(!checks.is_empty(), "{what}: nothing checks it");
        for check in checks {
            ensure!(sources.have(&check)?, "{what}: there is no {} {}", check.kind, check.name);
        }
    }
    Ok(())
}
