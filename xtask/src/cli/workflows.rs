//! Checks the workflows of `.github`: they are thin, and use what the project has.

use std::fs;

use anyhow::{Context as _, Result};
use serde_yaml_ng::Value;
use toml_edit::DocumentMut;
use xtask::workspace;

fn read(path: &str) -> Result<String> {
    fs::read_to_string(workspace::root().join(path)).with_context(|| format!("cannot read {path}"))
}

/// Returns the commands of a workflow's steps.
fn commands(workflow: &str) -> Result<Vec<String>> {
    let workflow: Value = serde_yaml_ng::from_str(&read(&format!(".github/workflows/{workflow}"))?)?;
    let jobs = workflow["jobs"].as_mapping().context("a workflow has jobs")?.values();
    let steps = jobs.filter_map(|job| job["steps"].as_sequence()).flatten();
    Ok(steps.filter_map(|step| step["run"].as_str().map(str::to_owned)).collect())
}

#[test]
fn ci_runs_every_check_and_the_oldest_supported_compiler() -> Result<()> {
    let commands = commands("ci.yaml")?;
    assert!(commands.iter().any(|command| command.ends_with(" .ci/run")), "{commands:?}");
    let manifest: DocumentMut = read("Cargo.toml")?.parse()?;
    let version = manifest["workspace"]["package"]["rust-version"].as_str().context("rust-version")?;
    let check = format!("cargo +{version}.0 check ");
    assert!(commands.iter().any(|command| command.starts_with(&check)), "{version}: {commands:?}");
    Ok(())
}

#[test]
fn releases_are_built_by_xtask() -> Result<()> {
    let commands = commands("release.yaml")?;
    assert!(commands.iter().any(|command| command.contains("cargo xtask release ")), "{commands:?}");
    Ok(())
}

#[test]
fn templates_of_issues_are_yaml_with_unique_identifiers() -> Result<()> {
    for name in ["bug", "feature"] {
        let template: Value = serde_yaml_ng::from_str(&read(&format!(".github/ISSUE_TEMPLATE/{name}.yml"))?)?;
        let fields = template["body"].as_sequence().context("a template has a body")?;
        let mut identifiers: Vec<&str> = fields.iter().filter_map(|field| field["id"].as_str()).collect();
        let all = identifiers.len();
        identifiers.sort_unstable();
        identifiers.dedup();
        assert!(all > 0 && all == identifiers.len(), "{name}: {identifiers:?}");
    }
    Ok(())
}
