//! The files of a release, from what they are made of. Nothing here depends on a folder, a time or
//! an order, so the same inputs give the same bytes.

use std::fmt::Write as _;

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::crates::Crate;
use super::image::{self, Content, Image, Layers};
use super::linked::Linked;
use super::lock::Lock;
use super::packages::Unpacked;
use super::provenance::{self, Build};
use super::sbom::{self, Materials};
use super::settings::Settings;
use super::source::Source;
use super::target::Target;
use super::tree::{Node, Tree};
use super::{deploy, digest, notes, rootfs};

/// The list of digests of all other files, which `sha256sum --check` reads.
pub(crate) const CHECKSUMS: &str = "SHA256SUMS";

/// What a release is made of.
pub(crate) struct Inputs {
    pub(crate) settings: Settings,
    pub(crate) source: Source,
    pub(crate) lock: Lock,
    /// The files of `deploy`.
    pub(crate) deploy: Tree,
    /// The text of CHANGELOG.md.
    pub(crate) changelog: String,
    /// Files that pin dependencies, with their digests.
    pub(crate) pins: Vec<(&'static str, String)>,
    /// What each architecture is made of.
    pub(crate) parts: Vec<Part>,
}

/// What the image of an architecture is made of.
pub(crate) struct Part {
    pub(crate) target: Target,
    pub(crate) shunt: Vec<u8>,
    pub(crate) crates: Vec<Crate>,
    pub(crate) linked: Linked,
    pub(crate) packages: Vec<Unpacked>,
}

/// A release.
pub(crate) struct Made {
    /// Its files by their names.
    pub(crate) files: Tree,
    /// The layers of the image.
    pub(crate) layers: Vec<Layers>,
}

/// Makes the release.
pub(crate) fn make(inputs: &Inputs) -> Result<Made> {
    let mut files = Tree::default();
    let Inputs { settings, source, .. } = inputs;
    let name = |rest: &str| format!("shunt-{}{rest}", settings.version);
    for part in &inputs.parts {
        files.program(&format!("shunt-{}", part.target.name()), part.shunt.clone());
        let bill = sbom::document(&materials(part, &inputs.lock), settings, source)?;
        files.file(&name(&format!("-{}.spdx.json", part.target.name())), pretty(&bill)?);
    }
    let image = image_of(inputs)?;
    let chart = deploy::chart(&inputs.deploy, settings, source, &image.digest)?;
    for (path, node) in deploy::manifests(&inputs.deploy, settings, &image.digest)?.iter() {
        files.insert(path, node.clone());
    }
    files.file("RELEASE_NOTES.md", notes::notes(&inputs.changelog, settings, &image.digest)?);
    files.file(&name("-image.tar"), image.archive);
    files.file(&name("-chart.tar"), chart.layout);
    files.file(&name(".tgz"), chart.archive);
    let targets: Vec<_> = inputs.parts.iter().map(|part| (part.target, part.linked.clone())).collect();
    let build = Build { settings, source, targets: &targets, lock: &inputs.lock, pins: &inputs.pins };
    let statement = provenance::statement(&build, &digests(&files));
    files.file(&name(".provenance.json"), pretty(&statement)?);
    files.file(CHECKSUMS, checksums(&files));
    Ok(Made { files, layers: image.layers })
}

/// Returns the image.
pub(crate) fn image_of(inputs: &Inputs) -> Result<Image> {
    let content = |part: &Part| {
        let base = rootfs::build(part.target, &part.packages)
            .with_context(|| format!("cannot make the image of {}", part.target.name()))?;
        anyhow::Ok(Content { target: part.target, base, shunt: part.shunt.clone() })
    };
    let contents = inputs.parts.iter().map(content).collect::<Result<Vec<_>>>()?;
    image::build(&contents, &inputs.settings, &inputs.source)
}

fn materials<'a>(part: &'a Part, lock: &'a Lock) -> Materials<'a> {
    Materials {
        target: part.target,
        shunt: &part.shunt,
        crates: &part.crates,
        libraries: &part.linked.libraries,
        packages: &part.packages,
        release: &lock.release,
    }
}

fn pretty(document: &Value) -> Result<String> {
    Ok(serde_json::to_string_pretty(document)? + "\n")
}

/// Returns the paths and digests of all files.
fn digests(files: &Tree) -> Vec<(String, String)> {
    let digest = |(path, node): (&str, &Node)| match node {
        Node::File { bytes, .. } => Some((path.to_owned(), digest::sha256(bytes))),
        Node::Folder(_) | Node::Link(_) => None,
    };
    files.iter().filter_map(digest).collect()
}

fn checksums(files: &Tree) -> String {
    digests(files).iter().fold(String::new(), |mut text, (path, sha256)| {
        let _infallible = writeln!(text, "{sha256}  {path}");
        text
    })
}

#[cfg(test)]
mod tests;
