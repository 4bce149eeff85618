//! Finds a pod in manifests, for a question about it. Pods are no objects of
//! [`super::ManifestSource`].

use std::{
    ffi::OsStr,
    fs::{self, File},
    io::{BufRead, BufReader, Seek},
    path::Path,
};

use serde_json::{Map, Value};

use super::{
    documents::Sink,
    file::{self, Text},
    json, yaml,
};
use crate::{
    model::{NamespacedName, PodPlace},
    watch::{
        WatchError,
        decode::{RawPod, pod_place},
    },
};

/// Finds a pod among the manifests of a directory. What cannot be read holds no pod.
///
/// # Errors
/// Returns an error if the directory cannot be read.
pub fn find_pod(directory: &Path, name: &NamespacedName) -> Result<Option<PodPlace>, WatchError> {
    let failed = |source| WatchError::ManifestDir { path: directory.to_owned(), source };
    let mut sink = PodSink { name, found: None };
    for entry in fs::read_dir(directory).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let is_manifest = path.file_name().is_some_and(file::is_manifest);
        if let Some(text) = is_manifest.then(|| file::open(&path).ok().flatten()).flatten() {
            read::<BufReader<File>>(&path, text, &mut sink);
        }
    }
    Ok(sink.found.map(|raw| pod_place(name.clone(), raw)))
}

fn read<R: BufRead + Seek>(path: &Path, text: Text<R>, sink: &mut PodSink<'_>) {
    if path.extension() == Some(OsStr::new("json")) || text.first == Some(b'{') {
        json::read(text.reader, sink);
    } else {
        yaml::read_parts(text.reader, sink, yaml::PART);
    }
}

/// Keeps the pod with the name.
struct PodSink<'a> {
    name: &'a NamespacedName,
    found: Option<RawPod<'static>>,
}

impl PodSink<'_> {
    fn object(&mut self, list_kind: Option<&str>, value: Value) {
        let kind = value.get("kind").and_then(Value::as_str);
        if kind == Some("Pod") || (kind.is_none() && list_kind == Some("PodList")) {
            let pod = serde_json::from_value(value).ok().filter(|raw| self.is_it(raw));
            self.found = pod.or_else(|| self.found.take());
        }
    }

    fn is_it(&self, raw: &RawPod<'_>) -> bool {
        let metadata = raw.metadata.as_ref();
        let namespace = metadata.and_then(|metadata| metadata.non_empty_namespace()).unwrap_or("default");
        metadata.and_then(|metadata| metadata.non_empty_name()) == Some(&*self.name.name)
            && namespace == &*self.name.namespace
    }
}

impl Sink for PodSink<'_> {
    fn start_document(&mut self, _: usize) {}

    fn start_items(&mut self) {}

    fn forget_items(&mut self) {}

    fn item(&mut self, header: &Map<String, Value>, item: Value) {
        self.object(header.get("kind").and_then(Value::as_str), item);
    }

    fn end_document(&mut self, value: Value) {
        self.object(None, value);
    }

    fn fail(&mut self, _: &str, _: String) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_are_found_in_documents_and_lists() {
        let directory = tempfile::tempdir().expect("a directory");
        let write = |name: &str, text: &str| fs::write(directory.path().join(name), text).expect("written");
        write(
            "a.yaml",
            "kind: Service\nmetadata: {name: web-0}\n---\nkind: Pod\nmetadata: {name: web-0}\nstatus: {podIP: 10.0.0.1}\n",
        );
        write(
            "b.json",
            r#"{"kind": "PodList", "items": [{"metadata": {"name": "web-1", "namespace": "shop"}, "spec": {"hostNetwork": true}}]}"#,
        );
        write("c.txt", "kind: Pod\nmetadata: {name: web-2}\n");
        write("d.yaml", "kind: [Pod\n");
        let find = |namespace, name| {
            find_pod(directory.path(), &NamespacedName::new(namespace, name)).expect("readable")
        };
        assert_eq!(find("default", "web-0").expect("in a document").addresses.len(), 1);
        assert!(find("shop", "web-1").expect("in a list").host_network);
        assert_eq!([find("shop", "web-0"), find("default", "web-2")], [None, None]);
        let missing = find_pod(&directory.path().join("none"), &NamespacedName::new("a", "b"));
        assert!(missing.expect_err("no directory").to_string().contains("cannot read manifests directory"));
    }
}
