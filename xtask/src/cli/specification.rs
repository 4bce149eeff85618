//! Checks that each promise of SPECIFICATION.md names a check that exists. The numbers of the
//! benchmark are compared with its targets in `bench/targets.rs`.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};
use xtask::workspace;

use super::test::is_step;

/// The kinds of checks: their words in the document.
const KINDS: [&str; 11] = [
    "bench",
    "test",
    "tests",
    "case",
    "cases",
    "scenario",
    "scenarios",
    "step",
    "steps",
    "kernel",
    "kernels",
];

fn read(path: &str) -> Result<String> {
    fs::read_to_string(workspace::root().join(path)).with_context(|| path.to_owned())
}

/// A row of a table: the promise, and the kinds and names of its checks.
struct Row {
    what: String,
    promise: String,
    checks: Vec<(String, String)>,
}

fn rows() -> Result<Vec<Row>> {
    let text = read("SPECIFICATION.md")?;
    let is_header = |line: &&str| !line.starts_with("| what |") && !line.starts_with("|---");
    let lines = text.lines().filter(|line| line.starts_with('|')).filter(is_header);
    lines.map(|line| row(line).with_context(|| line.to_owned())).collect()
}

fn row(line: &str) -> Result<Row> {
    let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
    let [what, promise, _, _, check] = cells[..] else { bail!("not five cells") };
    let (mut kind, mut checks) = (String::new(), Vec::new());
    for (number, part) in check.split('`').enumerate() {
        if number % 2 == 1 && !part.starts_with("cargo ") {
            checks.push((kind.clone(), part.to_owned()));
        } else if let Some(word) = part.split_whitespace().rfind(|word| KINDS.contains(word)) {
            word.trim_end_matches('s').clone_into(&mut kind);
        }
    }
    Ok(Row { what: what.to_owned(), promise: promise.to_owned(), checks })
}

/// Returns the text of all sources below a folder.
fn sources(folder: &Path) -> Result<String> {
    let mut text = String::new();
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.is_dir() {
            text += &sources(&path)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            text += &fs::read_to_string(&path)?;
        }
    }
    Ok(text)
}

fn exists(kind: &str, name: &str, sources: &str) -> Result<bool> {
    Ok(match kind {
        // The targets of the benchmark are compared where they are.
        "bench" => true,
        "test" => sources.contains(&format!("fn {name}(")),
        "case" => workspace::root().join(format!("tests/cases/{name}.yaml")).is_file(),
        "scenario" => {
            let (program, name) = name.split_once(": ").context("a scenario has a program")?;
            read(&format!("tests/src/bin/{program}/main.rs"))?.contains(&format!("(\"{name}\","))
        }
        "step" => is_step(name),
        "kernel" => read("xtask/src/cli/vm/kernel.rs")?.contains(&format!("\"{name}\"")),
        other => bail!("{other:?} is no kind of check"),
    })
}

#[test]
fn every_promise_names_checks_that_exist() -> Result<()> {
    let folders = [
        "proxy-common/src",
        "proxy-userspace/src",
        "proxy-userspace/tests",
        "tests/src",
        "tests/tests",
        "xtask/src",
    ];
    let sources =
        folders.iter().map(|folder| sources(&workspace::root().join(folder))).collect::<Result<String>>()?;
    let rows = rows()?;
    ensure!(rows.len() > 30, "{} rows", rows.len());
    for Row { what, promise, checks } in rows {
        ensure!(!promise.is_empty(), "{what}: it promises nothing");
        ensure!(!checks.is_empty(), "{what}: nothing checks it");
        for (kind, name) in checks {
            ensure!(exists(&kind, &name, &sources)?, "{what}: there is no {kind} {name}");
        }
    }
    Ok(())
}

#[test]
fn names_that_do_not_exist_are_found() -> Result<()> {
    for (kind, name) in
        [("test", "no_test"), ("case", "no-case"), ("scenario", "daemon: none"), ("step", "none")]
    {
        assert!(!exists(kind, name, "fn other() {}")?, "{kind}");
    }
    assert!(exists("lemma", "x", "").is_err());
    Ok(())
}
