//! Checks the workflows of `.github`: they are thin, and use what the project has.

use std::fs;

use anyhow::{Context as _, Result, bail};
use serde_yaml_ng::Value;
use toml_edit::DocumentMut;
use xtask::workspace;

fn read(path: &str) -> Result<String> {
    fs::read_to_string(workspace::root().join(path)).with_context(|| format!("cannot read {path}"))
}

/// Returns the jobs of a workflow.
fn jobs(workflow: &str) -> Result<Vec<Value>> {
    let workflow: Value = serde_yaml_ng::from_str(&read(&format!(".github/workflows/{workflow}"))?)?;
    let jobs = workflow["jobs"].as_mapping().context("a workflow has jobs")?;
    Ok(jobs.values().cloned().collect())
}

fn commands_of(job: &Value) -> Vec<String> {
    let steps = job["steps"].as_sequence().into_iter().flatten();
    steps.filter_map(|step| step["run"].as_str().map(str::to_owned)).collect()
}

/// Returns the commands of a workflow's steps.
fn commands(workflow: &str) -> Result<Vec<String>> {
    Ok(jobs(workflow)?.iter().flat_map(commands_of).collect())
}

#[test]
fn ci_runs_every_check_and_the_oldest_supported_compiler() -> Result<()> {
    let commands = commands("ci.yaml")?;
    assert!(commands.iter().any(|command| command == ".ci/run"), "{commands:?}");
    let manifest: DocumentMut = read("Cargo.toml")?.parse()?;
    let version = manifest["workspace"]["package"]["rust-version"].as_str().context("rust-version")?;
    let check = format!("cargo +{version}.0 check ");
    assert!(commands.iter().any(|command| command.starts_with(&check)), "{version}: {commands:?}");
    Ok(())
}

#[test]
fn releases_are_built_by_xtask() -> Result<()> {
    let commands = commands("release.yaml")?;
    let is_release = |command: &&String| command.starts_with("cargo xtask release ");
    let releases: Vec<&String> = commands.iter().filter(is_release).collect();
    let [verified, made] = releases[..] else { bail!("not two: {commands:?}") };
    assert!(verified.ends_with(" --verify") && made.contains(" --out "), "{releases:?}");
    Ok(())
}

/// setup installs with apt as root, and Debian's names of packages.
#[test]
fn jobs_that_run_setup_are_in_a_container_of_debian() -> Result<()> {
    let needs_setup = |job: &Value| {
        let commands = commands_of(job);
        commands.iter().any(|command| command == ".ci/run" || command.starts_with("cargo xtask"))
    };
    let jobs = [jobs("ci.yaml")?, jobs("release.yaml")?].concat();
    let (mut checked, is_debian) = (0, |image: &Value| *image == "debian:13");
    for job in jobs.iter().filter(|job| needs_setup(job)) {
        let container = &job["container"];
        assert!(is_debian(container) || is_debian(&container["image"]), "{job:?}");
        let is_privileged = container["options"].as_str() == Some("--privileged");
        assert_eq!(is_privileged, commands_of(job).iter().any(|command| command == ".ci/run"));
        let actions: Vec<&str> = job["steps"]
            .as_sequence()
            .into_iter()
            .flatten()
            .filter_map(|step| step["uses"].as_str())
            .collect();
        assert!(actions.contains(&"./.github/actions/rust"), "{actions:?}");
        checked += 1;
    }
    assert_eq!(checked, 3);
    read(".github/actions/rust/action.yaml").map(drop)
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
