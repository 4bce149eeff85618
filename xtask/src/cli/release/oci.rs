//! Image layouts of the Open Container Initiative, written as one archive: blobs by their digests,
//! and an index that names the root.

use anyhow::Result;
use serde_json::{Value, json};

use super::digest;
use super::tree::Tree;

pub(crate) const INDEX: &str = "application/vnd.oci.image.index.v1+json";
pub(crate) const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub(crate) const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
pub(crate) const LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";

/// A layout that grows.
#[derive(Debug, Default)]
pub(crate) struct Layout {
    files: Tree,
}

/// The type, digest and size of a blob.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Descriptor {
    media_type: String,
    /// The digest with its algorithm: `sha256:` and hexadecimal digits.
    pub(crate) digest: String,
    size: usize,
}

impl Descriptor {
    /// Returns the descriptor as documents contain it, with these fields in addition.
    pub(crate) fn with(&self, more: &Value) -> Value {
        let mut value = json!({"mediaType": self.media_type, "digest": self.digest, "size": self.size});
        if let (Value::Object(fields), Value::Object(more)) = (&mut value, more) {
            fields.extend(more.clone());
        }
        value
    }

    /// Returns the descriptor as documents contain it.
    pub(crate) fn value(&self) -> Value {
        self.with(&Value::Null)
    }
}

impl Layout {
    /// Adds a blob.
    pub(crate) fn blob(&mut self, media_type: &str, bytes: Vec<u8>) -> Descriptor {
        let (digest, size) = (digest::sha256(&bytes), bytes.len());
        self.files.file(&format!("blobs/sha256/{digest}"), bytes);
        Descriptor { media_type: media_type.to_owned(), digest: format!("sha256:{digest}"), size }
    }

    /// Adds a document.
    pub(crate) fn document(&mut self, media_type: &str, document: &Value) -> Result<Descriptor> {
        Ok(self.blob(media_type, serde_json::to_vec(document)?))
    }

    /// Returns the archive of the layout, whose root has a name for programs that import it.
    pub(crate) fn archive(mut self, root: &Descriptor, reference: &str) -> Result<Vec<u8>> {
        let tag = reference.rsplit(':').next().unwrap_or(reference);
        let names = json!({"annotations": {
            "io.containerd.image.name": reference,
            "org.opencontainers.image.ref.name": tag,
        }});
        let index = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": [root.with(&names)]});
        self.files.file("index.json", serde_json::to_vec(&index)?);
        self.files.file("oci-layout", r#"{"imageLayoutVersion":"1.0.0"}"#);
        self.files.tar()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io::Read as _;

    use super::*;

    #[test]
    fn every_blob_is_named_by_its_digest_and_the_index_names_the_root() {
        let mut layout = Layout::default();
        let layer = layout.blob(LAYER, b"layer".to_vec());
        let manifest = json!({"schemaVersion": 2, "layers": [layer.value()]});
        let root = layout.document(MANIFEST, &manifest).unwrap();
        let bytes = layout.archive(&root, "registry.example/shunt:1.0.0").unwrap();
        let mut files = BTreeMap::new();
        for entry in tar::Archive::new(bytes.as_slice()).entries().unwrap() {
            let mut entry = entry.unwrap();
            let path = entry.path().unwrap().display().to_string();
            let mut bytes = Vec::new();
            entry.read_to_end(&mut bytes).unwrap();
            files.insert(path, bytes);
        }
        let blobs = files.iter().filter_map(|(path, bytes)| {
            Some((path.strip_prefix("blobs/sha256/")?, bytes)).filter(|(name, _)| !name.is_empty())
        });
        let blobs: Vec<_> = blobs.collect();
        assert_eq!(blobs.len(), 2);
        assert!(blobs.iter().all(|(name, bytes)| digest::sha256(bytes) == *name));
        let index: Value = serde_json::from_slice(&files["index.json"]).unwrap();
        assert_eq!(index["manifests"][0]["digest"], root.digest);
        assert_eq!(index["manifests"][0]["annotations"]["org.opencontainers.image.ref.name"], "1.0.0");
    }
}
