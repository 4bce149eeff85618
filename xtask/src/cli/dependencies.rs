//! Checks that dependencies keep the rules of `deny.toml`, from `cargo metadata`.
//! `cargo deny check` does the same and more, but is not on every machine.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde::Deserialize;
use spdx::{Expression, Licensee, ParseMode};
use toml_edit::{DocumentMut, Item};
use xtask::workspace;

use super::steps;

const LIMIT: Duration = Duration::from_mins(2);
const CRATES_IO: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// The part of the output of `cargo metadata` that is read here.
#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    version: String,
    license: Option<String>,
    source: Option<String>,
}

fn packages() -> Result<Vec<Package>> {
    let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let arguments = ["metadata", "--locked", "--format-version", "1", "--filter-platform", &target];
    let text = steps::cargo(LIMIT).args(arguments).read()?;
    let Metadata { packages } = serde_json::from_str(&text).context("cannot read cargo metadata")?;
    Ok(packages)
}

fn rules() -> Result<DocumentMut> {
    let text = fs::read_to_string(workspace::root().join("deny.toml")).context("cannot read deny.toml")?;
    text.parse().context("cannot parse deny.toml")
}

/// Returns the texts of a list.
fn texts(list: &Item) -> Vec<&str> {
    list.as_array().into_iter().flatten().filter_map(|item| item.as_str()).collect()
}

/// Returns the crates of a list with reasons.
fn crates(list: &Item) -> Vec<&str> {
    let entries = list.as_array().into_iter().flatten();
    entries.filter_map(|entry| entry.as_inline_table()?.get("crate")?.as_str()).collect()
}

/// Returns true if a licence expression permits the use under allowed licences.
fn is_allowed(license: &str, allowed: &[Licensee]) -> Result<bool> {
    let expression = Expression::parse_mode(license, ParseMode::LAX).with_context(|| license.to_owned())?;
    Ok(expression.evaluate(|asked| allowed.iter().any(|allowed| allowed.satisfies(asked))))
}

/// Returns crates in several versions, each version but the newest, as `deny.toml` names them:
/// `syn@1`, `nix@0.26`.
fn older_versions(packages: &[Package]) -> BTreeSet<String> {
    let mut versions: BTreeMap<&str, BTreeSet<(u64, u64)>> = BTreeMap::new();
    for Package { name, version, .. } in packages {
        let mut parts = version.split('.').map(|part| part.parse().unwrap_or_default());
        let compatible = match (parts.next().unwrap_or_default(), parts.next().unwrap_or_default()) {
            (0, minor) => (0, minor),
            (major, _) => (major, 0),
        };
        versions.entry(name).or_default().insert(compatible);
    }
    let older = versions.into_iter().flat_map(|(name, mut versions)| {
        versions.pop_last();
        versions.into_iter().map(move |version| (name, version))
    });
    older
        .map(|(name, version)| match version {
            (0, minor) => format!("{name}@0.{minor}"),
            (major, _) => format!("{name}@{major}"),
        })
        .collect()
}

#[test]
fn every_dependency_has_an_allowed_licence() -> Result<()> {
    let rules = rules()?;
    let allowed = texts(&rules["licenses"]["allow"]).into_iter().map(Licensee::parse);
    let allowed = allowed.collect::<Result<Vec<_>, _>>().context("licenses.allow of deny.toml")?;
    for Package { name, version, license, .. } in packages()? {
        let license = license.with_context(|| format!("{name} {version} has no licence"))?;
        assert!(is_allowed(&license, &allowed)?, "{name} {version}: {license} is not in deny.toml");
    }
    Ok(())
}

#[test]
fn crates_in_several_versions_are_those_that_are_listed() -> Result<()> {
    let rules = rules()?;
    let listed: BTreeSet<String> = crates(&rules["bans"]["skip"]).into_iter().map(str::to_owned).collect();
    assert_eq!(older_versions(&packages()?), listed, "left: in Cargo.lock, right: bans.skip of deny.toml");
    Ok(())
}

#[test]
fn no_dependency_is_banned_or_from_elsewhere() -> Result<()> {
    let rules = rules()?;
    let banned = crates(&rules["bans"]["deny"]);
    assert!(!banned.is_empty(), "deny.toml bans something");
    for Package { name, version, source, .. } in packages()? {
        assert!(!banned.contains(&&*name), "{name} {version} is banned by deny.toml");
        assert!(source.is_none_or(|source| source == CRATES_IO), "{name} {version} is not from crates.io");
    }
    Ok(())
}

#[test]
fn every_patch_of_a_dependency_is_used() -> Result<()> {
    let lock = fs::read_to_string(workspace::root().join("Cargo.lock")).context("cannot read Cargo.lock")?;
    assert!(!lock.contains("[[patch.unused]]"), "Cargo.lock names a patch that no dependency uses");
    Ok(())
}

#[test]
fn older_versions_are_all_but_the_newest_compatible_one() {
    let package = |name: &str, version: &str| Package {
        name: name.into(),
        version: version.into(),
        license: None,
        source: None,
    };
    let packages = [
        package("a", "0.1.2"),
        package("a", "0.2.0"),
        package("b", "1.2.0"),
        package("b", "2.0.0"),
        package("b", "10.0.0"),
        package("c", "1.0.0"),
    ];
    let older: Vec<String> = older_versions(&packages).into_iter().collect();
    assert_eq!(older, ["a@0.1", "b@1", "b@2"]);
}

#[test]
fn licence_expressions_are_evaluated() -> Result<()> {
    let allowed = [Licensee::parse("MIT")?, Licensee::parse("ISC")?];
    assert!(is_allowed("GPL-2.0-only OR MIT", &allowed)? && is_allowed("Apache-2.0/MIT", &allowed)?);
    assert!(!is_allowed("Apache-2.0 AND ISC", &allowed)?);
    Ok(())
}
