//! Stores the objects, their resource versions, and the history from which watches and consistent
//! pages are made.

use std::{collections::BTreeMap, sync::Arc};

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};

use super::{kept_list::KeptList, stored::Stored};

/// A kind of object that the server has.
#[derive(Debug, PartialEq, Eq)]
pub struct Resource {
    /// The API group; empty for the core group.
    pub group: &'static str,
    /// The version.
    pub version: &'static str,
    /// The name in URLs.
    pub plural: &'static str,
    /// `kind`.
    pub kind: &'static str,
    /// Whether objects have a namespace.
    pub namespaced: bool,
}

impl Resource {
    /// All resources.
    pub const ALL: [Self; 6] = [
        Self { group: "", version: "v1", plural: "services", kind: "Service", namespaced: true },
        Self { group: "", version: "v1", plural: "nodes", kind: "Node", namespaced: false },
        Self { group: "", version: "v1", plural: "namespaces", kind: "Namespace", namespaced: false },
        Self { group: "", version: "v1", plural: "pods", kind: "Pod", namespaced: true },
        Self {
            group: "discovery.k8s.io",
            version: "v1",
            plural: "endpointslices",
            kind: "EndpointSlice",
            namespaced: true,
        },
        Self {
            group: "networking.k8s.io",
            version: "v1",
            plural: "servicecidrs",
            kind: "ServiceCIDR",
            namespaced: false,
        },
    ];

    /// `apiVersion`.
    pub fn api_version(&self) -> String {
        if self.group.is_empty() {
            self.version.to_owned()
        } else {
            format!("{}/{}", self.group, self.version)
        }
    }

    /// The path of the collection.
    pub fn path(&self) -> String {
        let root = if self.group.is_empty() { "api" } else { "apis" };
        format!("/{root}/{}/{}", self.api_version(), self.plural)
    }

    /// The path of the objects of a namespace, with a placeholder for it. `None` if they have none.
    pub(super) fn namespace_path(&self) -> Option<String> {
        let root = if self.group.is_empty() { "api" } else { "apis" };
        let path = || format!("/{root}/{}/namespaces/{{namespace}}/{}", self.api_version(), self.plural);
        self.namespaced.then(path)
    }

    /// The path of one object, with placeholders for its namespace and its name.
    pub(super) fn object_path(&self) -> String {
        format!("{}/{{name}}", self.namespace_path().unwrap_or_else(|| self.path()))
    }

    fn of(object: &Value) -> Result<&'static Self> {
        let (kind, api_version) = (&object["kind"], &object["apiVersion"]);
        Self::ALL
            .iter()
            .find(|resource| *kind == resource.kind && *api_version == resource.api_version())
            .with_context(|| format!("no such resource: {api_version} {kind}"))
    }
}

/// One object's change. Versions are unique over all resources.
#[derive(Clone, Debug)]
pub(super) struct Change {
    pub(super) version: u64,
    pub(super) plural: &'static str,
    pub(super) key: String,
    pub(super) old: Option<Arc<Stored>>,
    pub(super) new: Option<Arc<Stored>>,
}

/// All data of the server.
#[derive(Clone, Debug)]
pub(super) struct Store {
    version: u64,
    /// Changes up to this version have been deleted from the history.
    compacted: u64,
    objects: BTreeMap<(&'static str, String), Arc<Stored>>,
    history: Vec<Change>,
    /// The streaming lists of these objects that were encoded so far.
    kept_lists: Vec<Arc<KeptList>>,
}

impl Store {
    pub(super) fn new() -> Self {
        Self {
            version: 1,
            compacted: 0,
            objects: BTreeMap::new(),
            history: Vec::new(),
            kept_lists: Vec::new(),
        }
    }

    pub(super) fn version(&self) -> u64 {
        self.version
    }

    pub(super) fn compacted(&self) -> u64 {
        self.compacted
    }

    /// Makes `version` the current one, as if other objects had changed.
    pub(super) fn advance_to(&mut self, version: u64) {
        self.version = self.version.max(version);
    }

    /// Deletes all history.
    pub(super) fn compact(&mut self) {
        self.version += 1;
        self.compacted = self.version - 1;
        self.history.clear();
    }

    /// Creates or replaces an object, which gets a new version.
    pub(super) fn put(&mut self, mut object: Value) -> Result<u64> {
        let resource = Resource::of(&object)?;
        let metadata = object["metadata"].as_object_mut().context("no metadata")?;
        if resource.namespaced && !metadata.contains_key("namespace") {
            metadata.insert("namespace".to_owned(), json!("default"));
        }
        let key = key(resource, &object)?;
        self.version += 1;
        let old = self.objects.get(&(resource.plural, key.clone())).cloned();
        let metadata = &mut object["metadata"];
        if metadata["uid"].is_null() {
            metadata["uid"] = match &old {
                Some(old) => old.value()["metadata"]["uid"].clone(),
                None => json!(format!("00000000-0000-4000-8000-{:012x}", self.version)),
            };
        }
        metadata["resourceVersion"] = json!(self.version.to_string());
        self.change(resource.plural, key, old, Some(Arc::new(Stored::new(object))));
        Ok(self.version)
    }

    /// Stores an object with the version that it has, without history.
    pub(super) fn insert_recorded(&mut self, object: Value) -> Result<()> {
        let resource = Resource::of(&object)?;
        let key = key(resource, &object)?;
        let version = object["metadata"]["resourceVersion"].as_str().context("no resourceVersion")?;
        self.advance_to(version.parse().context("resourceVersion")?);
        self.kept_lists.clear();
        self.objects.insert((resource.plural, key), Arc::new(Stored::new(object)));
        Ok(())
    }

    /// Deletes an object.
    pub(super) fn delete(&mut self, kind: &str, namespace: &str, name: &str) -> Result<u64> {
        let resource = Resource::ALL.iter().find(|resource| resource.kind == kind).context("no such kind")?;
        let key = if resource.namespaced { format!("/{namespace}/{name}") } else { format!("/{name}") };
        let Some(old) = self.objects.get(&(resource.plural, key.clone())).cloned() else {
            bail!("no {kind} {key}")
        };
        self.version += 1;
        self.change(resource.plural, key, Some(old), None);
        Ok(self.version)
    }

    /// Returns an object.
    pub(super) fn get(&self, plural: &'static str, key: String) -> Option<&Arc<Stored>> {
        self.objects.get(&(plural, key))
    }

    /// Returns the objects of a resource as of `version`, in the order of their keys.
    pub(super) fn list(&self, plural: &'static str, version: u64) -> BTreeMap<&str, &Arc<Stored>> {
        let of_plural =
            self.objects.range((plural, String::new())..).take_while(|((of, _), _)| *of == plural);
        let mut objects: BTreeMap<&str, &Arc<Stored>> =
            of_plural.map(|((_, key), object)| (&**key, object)).collect();
        let undo = self.history.iter().rev().take_while(|change| change.version > version);
        for change in undo.filter(|change| change.plural == plural) {
            match &change.old {
                Some(old) => objects.insert(&change.key, old),
                None => objects.remove(&*change.key),
            };
        }
        objects
    }

    /// Returns the streaming lists that were encoded since the last change.
    pub(super) fn kept_lists(&self) -> &[Arc<KeptList>] {
        &self.kept_lists
    }

    /// Keeps a streaming list of the present objects.
    pub(super) fn keep_list(&mut self, list: Arc<KeptList>) {
        self.kept_lists.push(list);
    }

    /// Returns the changes of a resource after `version`.
    pub(super) fn since(&self, plural: &'static str, version: u64) -> impl Iterator<Item = &Change> {
        self.history.iter().filter(move |change| change.version > version && change.plural == plural)
    }

    fn change(
        &mut self,
        plural: &'static str,
        key: String,
        old: Option<Arc<Stored>>,
        new: Option<Arc<Stored>>,
    ) {
        self.kept_lists.clear();
        match &new {
            Some(object) => self.objects.insert((plural, key.clone()), Arc::clone(object)),
            None => self.objects.remove(&(plural, key.clone())),
        };
        self.history.push(Change { version: self.version, plural, key, old, new });
    }
}

fn key(resource: &Resource, object: &Value) -> Result<String> {
    let metadata = &object["metadata"];
    let name = metadata["name"].as_str().context("no metadata.name")?;
    if resource.namespaced {
        let namespace = metadata["namespace"].as_str().context("no metadata.namespace")?;
        Ok(format!("/{namespace}/{name}"))
    } else {
        Ok(format!("/{name}"))
    }
}
