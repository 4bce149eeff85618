//! The image: for each architecture a layer with the commands that shunt runs and a layer with
//! shunt, and an index of all architectures.

use anyhow::Result;
use serde_json::{Value, json};

use super::digest;
use super::oci::{CONFIG, Descriptor, INDEX, LAYER, Layout, MANIFEST};
use super::settings::Settings;
use super::source::Source;
use super::target::Target;
use super::tree::{Tree, gzip};

/// The path of the binary, which runs if the pod names no command.
const PROGRAM: &str = "usr/local/bin/shunt";

/// What is in the image of an architecture.
pub(crate) struct Content {
    /// The architecture.
    pub(crate) target: Target,
    /// The files of Debian's packages.
    pub(crate) base: Tree,
    /// The binary.
    pub(crate) shunt: Vec<u8>,
}

/// An image of several architectures.
pub(crate) struct Image {
    /// The archive of its layout.
    pub(crate) archive: Vec<u8>,
    /// The digest by which a registry names it.
    pub(crate) digest: String,
    /// The layers of each architecture.
    pub(crate) layers: Vec<Layers>,
}

/// The compressed sizes of the layers of an architecture, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layers {
    /// The architecture.
    pub(crate) target: Target,
    /// The layer of Debian's packages.
    pub(crate) packages: usize,
    /// The layer of shunt.
    pub(crate) shunt: usize,
}

/// Returns the image.
pub(crate) fn build(contents: &[Content], settings: &Settings, source: &Source) -> Result<Image> {
    let mut layout = Layout::default();
    let (mut manifests, mut layers) = (Vec::new(), Vec::new());
    for content in contents {
        let (manifest, sizes) = manifest(&mut layout, content, settings, source)?;
        let platform = json!({"platform": {"architecture": content.target.name(), "os": "linux"}});
        manifests.push(manifest.with(&platform));
        layers.push(sizes);
    }
    let index = json!({
        "schemaVersion": 2,
        "mediaType": INDEX,
        "manifests": manifests,
        "annotations": annotations(settings, source),
    });
    let root = layout.document(INDEX, &index)?;
    let archive = layout.archive(&root, &settings.reference())?;
    Ok(Image { archive, digest: root.digest, layers })
}

/// Returns the annotations that registries show.
pub(crate) fn annotations(settings: &Settings, source: &Source) -> Value {
    json!({
        "org.opencontainers.image.title": "shunt",
        "org.opencontainers.image.version": settings.version,
        "org.opencontainers.image.revision": source.commit,
        "org.opencontainers.image.created": source.date,
        "org.opencontainers.image.source": settings.repository,
        "org.opencontainers.image.licenses": settings.license,
    })
}

fn manifest(
    layout: &mut Layout,
    content: &Content,
    settings: &Settings,
    source: &Source,
) -> Result<(Descriptor, Layers)> {
    let mut program = Tree::default();
    program.program(PROGRAM, content.shunt.clone());
    let (mut layers, mut differences, mut sizes) = (Vec::new(), Vec::new(), [0; 2]);
    for (tree, size) in [&content.base, &program].into_iter().zip(&mut sizes) {
        let archive = tree.tar()?;
        differences.push(format!("sha256:{}", digest::sha256(&archive)));
        let compressed = gzip(&archive)?;
        *size = compressed.len();
        layers.push(layout.blob(LAYER, compressed).value());
    }
    let config = layout.document(CONFIG, &config(content.target, &differences, settings, source))?;
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": config.value(),
        "layers": layers,
        "annotations": annotations(settings, source),
    });
    let [packages, shunt] = sizes;
    Ok((layout.document(MANIFEST, &manifest)?, Layers { target: content.target, packages, shunt }))
}

fn config(target: Target, differences: &[String], settings: &Settings, source: &Source) -> Value {
    json!({
        "created": source.date,
        "architecture": target.name(),
        "os": "linux",
        "config": {
            "Entrypoint": [format!("/{PROGRAM}")],
            "Env": ["PATH=/usr/local/bin:/usr/sbin:/usr/bin"],
            "WorkingDir": "/",
            "Labels": annotations(settings, source),
        },
        "rootfs": {"type": "layers", "diff_ids": differences},
        "history": [
            {"created": source.date, "created_by": "Debian packages of deploy/image/packages.json"},
            {"created": source.date, "created_by": "cargo xtask release"},
        ],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn content(target: Target) -> Content {
        let mut base = Tree::default();
        base.program("usr/sbin/nft", b"nft".to_vec());
        Content { target, base, shunt: b"shunt".to_vec() }
    }

    fn build_for(targets: &[Target]) -> Image {
        let contents: Vec<Content> = targets.iter().copied().map(content).collect();
        build(&contents, &Settings::example(), &Source::example()).unwrap()
    }

    #[test]
    fn image_of_the_same_content_is_the_same() {
        let targets = [Target::Amd64, Target::Arm64];
        let (one, other) = (build_for(&targets), build_for(&targets));
        assert_eq!(one.digest, other.digest);
        assert!(one.archive == other.archive);
        assert_ne!(one.digest, build_for(&targets[..1]).digest);
    }

    #[test]
    fn index_has_a_manifest_for_each_platform() {
        let image = build_for(&[Target::Amd64, Target::Arm64]);
        let digest = image.digest.strip_prefix("sha256:").unwrap();
        let mut archive = tar::Archive::new(image.archive.as_slice());
        let is_root = |entry: &tar::Entry<'_, &[u8]>| entry.path().unwrap().ends_with(digest);
        let root = archive.entries().unwrap().map(Result::unwrap).find(is_root).unwrap();
        let index: Value = serde_json::from_reader(root).unwrap();
        let platforms = index["manifests"].as_array().unwrap().iter();
        let platforms: Vec<&str> =
            platforms.map(|manifest| manifest["platform"]["architecture"].as_str().unwrap()).collect();
        assert_eq!(platforms, ["amd64", "arm64"]);
    }
}
