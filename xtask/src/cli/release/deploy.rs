//! The manifests and the chart of a release: those of `deploy`, with the image by its digest.

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};

use super::image;
use super::oci::{Layout, MANIFEST};
use super::settings::Settings;
use super::source::Source;
use super::tree::{Node, Tree, gzip};

/// Folders of manifests in `deploy`.
const MANIFESTS: [&str; 3] = ["kubernetes/", "components/", "pods/"];
const CHART: &str = "chart/shunt/";
/// Media types of charts in registries.
const CHART_CONFIG: &str = "application/vnd.cncf.helm.config.v1+json";
const CHART_LAYER: &str = "application/vnd.cncf.helm.chart.content.v1.tar+gzip";

/// A packed chart.
pub(crate) struct Chart {
    /// The archive that helm installs.
    pub(crate) archive: Vec<u8>,
    /// The layout that can be copied into a registry.
    pub(crate) layout: Vec<u8>,
}

/// Returns the manifests, where the image has its digest behind the tag.
pub(crate) fn manifests(deploy: &Tree, settings: &Settings, digest: &str) -> Result<Tree> {
    let reference = settings.reference();
    let (old, new) = (format!("image: {reference}\n"), format!("image: {reference}@{digest}\n"));
    let mut pinned = Tree::default();
    for (path, node) in
        deploy.iter().filter(|(path, _)| MANIFESTS.iter().any(|folder| path.starts_with(folder)))
    {
        let Node::File { bytes, .. } = node else { continue };
        let text = std::str::from_utf8(bytes).with_context(|| format!("deploy/{path} is no text"))?;
        let count = text.lines().filter(|line| line.trim_start().starts_with("image:")).count();
        ensure!(
            text.matches(&old).count() == count,
            "deploy/{path} has an image that is not {reference}, the image of Cargo.toml"
        );
        pinned.file(path, text.replace(&old, &new));
    }
    ensure!(pinned.get("kubernetes/daemonset.yaml").is_some(), "deploy has no kubernetes/daemonset.yaml");
    Ok(pinned)
}

/// Returns the chart, whose default image has its digest behind the tag.
pub(crate) fn chart(deploy: &Tree, settings: &Settings, source: &Source, digest: &str) -> Result<Chart> {
    let mut files = Tree::default();
    for (path, node) in deploy.iter() {
        let Some(path) = path.strip_prefix(CHART) else { continue };
        let Node::File { bytes, .. } = node else { continue };
        let bytes =
            if path == "values.yaml" { pinned_values(bytes, settings, digest)? } else { bytes.clone() };
        files.file(&format!("shunt/{path}"), bytes);
    }
    let Some(Node::File { bytes: description, .. }) = files.get("shunt/Chart.yaml") else {
        bail!("deploy/chart/shunt has no Chart.yaml");
    };
    let description: Value = serde_yaml_ng::from_slice(description).context("Chart.yaml is damaged")?;
    for field in ["version", "appVersion"] {
        ensure!(
            description[field] == settings.version.as_str(),
            "{field} of deploy/chart/shunt/Chart.yaml is {}; the version of the workspace is {}",
            description[field],
            settings.version
        );
    }
    let archive = gzip(&files.tar()?)?;
    let layout = chart_layout(&archive, &description, settings, source)?;
    Ok(Chart { archive, layout })
}

fn pinned_values(bytes: &[u8], settings: &Settings, digest: &str) -> Result<Vec<u8>> {
    let text = std::str::from_utf8(bytes).context("values.yaml is no text")?;
    let repository = format!("  repository: {}\n", settings.image);
    let (old, new) =
        (format!("  tag: {}\n", settings.version), format!("  tag: {}@{digest}\n", settings.version));
    ensure!(
        text.matches(&old).count() == 1 && text.contains(&repository),
        "deploy/chart/shunt/values.yaml must have the image of Cargo.toml:\n{repository}{old}"
    );
    Ok(text.replace(&old, &new).into_bytes())
}

fn chart_layout(
    archive: &[u8],
    description: &Value,
    settings: &Settings,
    source: &Source,
) -> Result<Vec<u8>> {
    let mut layout = Layout::default();
    let config = layout.document(CHART_CONFIG, description)?;
    let layer = layout.blob(CHART_LAYER, archive.to_vec());
    let mut annotations = image::annotations(settings, source);
    annotations["org.opencontainers.image.description"] = description["description"].clone();
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": config.value(),
        "layers": [layer.value()],
        "annotations": annotations,
    });
    let root = layout.document(MANIFEST, &manifest)?;
    layout.archive(&root, &format!("{}-chart:{}", settings.image, settings.version))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIGEST: &str = "sha256:abc";

    fn tree(image: &str) -> Tree {
        let mut deploy = Tree::default();
        deploy.file("kubernetes/daemonset.yaml", format!("spec:\n  image: {image}\n"));
        deploy.file("chart/shunt/Chart.yaml", "name: shunt\nversion: 1.2.3\nappVersion: 1.2.3\n");
        let values = "image:\n  repository: registry.example/shunt\n  tag: 1.2.3\n";
        deploy.file("chart/shunt/values.yaml", values);
        deploy
    }

    fn text<'a>(tree: &'a Tree, path: &str) -> &'a str {
        let Some(Node::File { bytes, .. }) = tree.get(path) else { panic!("no {path}") };
        std::str::from_utf8(bytes).unwrap()
    }

    #[test]
    fn manifests_name_the_image_by_its_digest() {
        let pinned = manifests(&tree("registry.example/shunt:1.2.3"), &Settings::example(), DIGEST).unwrap();
        let daemon_set = text(&pinned, "kubernetes/daemonset.yaml");
        assert_eq!(daemon_set, "spec:\n  image: registry.example/shunt:1.2.3@sha256:abc\n");
    }

    #[test]
    fn another_image_in_a_manifest_is_an_error_that_names_the_file() {
        let error = manifests(&tree("registry.example/shunt:1.2.2"), &Settings::example(), DIGEST);
        let error = error.err().unwrap().to_string();
        assert!(error.contains("deploy/kubernetes/daemonset.yaml"), "{error}");
    }

    #[test]
    fn chart_has_its_folder_and_the_image_by_its_digest() {
        let chart = chart(&tree("x"), &Settings::example(), &Source::example(), DIGEST).unwrap();
        let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(chart.archive.as_slice()));
        let mut found = Vec::new();
        for entry in archive.entries().unwrap() {
            let mut entry = entry.unwrap();
            let path = entry.path().unwrap().display().to_string();
            found.push((path, std::io::read_to_string(&mut entry).unwrap()));
        }
        let names: Vec<&str> = found.iter().map(|(path, _)| path.as_str()).collect();
        assert_eq!(names, ["shunt/", "shunt/Chart.yaml", "shunt/values.yaml"]);
        assert!(found[2].1.contains("tag: 1.2.3@sha256:abc\n"));
    }

    #[test]
    fn chart_of_another_version_is_an_error() {
        let mut deploy = tree("x");
        deploy.file("chart/shunt/Chart.yaml", "name: shunt\nversion: 1.2.2\nappVersion: 1.2.3\n");
        let error =
            chart(&deploy, &Settings::example(), &Source::example(), DIGEST).err().unwrap().to_string();
        assert!(error.contains("version") && error.contains("1.2.2"), "{error}");
    }
}
