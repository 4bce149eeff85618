//! Real files in real directories, changed in the ways in which people and programs change them.

use std::{fs, os::unix::fs::symlink, time::Duration};

use tempfile::TempDir;
use tokio::{sync::mpsc, task::JoinHandle, time::timeout};

use super::*;
use crate::model::Delta;

mod documents;
mod lists;
mod writers;

/// The longest wait in these tests.
const DEADLINE: Duration = Duration::from_mins(1);

/// A directory, a source that follows it, and the source's events.
struct Scene {
    /// Contains the directory that is followed, `manifests`.
    root: TempDir,
    events: mpsc::Receiver<WatchEvent>,
    status: watch::Receiver<WatchStatus>,
    source: JoinHandle<()>,
    log: Vec<String>,
}

impl Scene {
    /// Starts a source that follows a directory with these files, and takes its lists.
    async fn start(files: &[(&str, &str)]) -> Self {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("manifests");
        fs::create_dir(&dir).unwrap();
        for (name, text) in files {
            fs::write(dir.join(name), text).unwrap();
        }
        let source = ManifestSource::new(&dir);
        let status = source.status();
        let (tx, events) = mpsc::channel(16);
        let source = tokio::spawn(async move { source.run(tx).await.unwrap() });
        let mut scene = Self { root, events, status, source, log: Vec::new() };
        scene.events(3).await;
        scene.status.wait_for(WatchStatus::synced).await.unwrap();
        scene
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.path().join("manifests").join(name)
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
    }

    /// Waits for this many events, and returns them in short.
    async fn events(&mut self, number: usize) -> Vec<String> {
        for _ in 0..number {
            let event = timeout(DEADLINE, self.events.recv()).await;
            let event = event.unwrap_or_else(|_| panic!("no event; so far {:?}", self.log)).unwrap();
            self.log.push(brief(&event));
        }
        self.log.split_off(self.log.len() - number)
    }

    /// Waits for an error of the watch or of manifests in the status, empty for none, and returns
    /// it.
    async fn error(&mut self, is_expected: impl Fn(&str) -> bool) -> String {
        let text = |status: &WatchStatus| {
            let errors = status.services.last_error.iter().chain(&status.manifest_errors.texts);
            errors.map(String::as_str).collect::<Vec<_>>().join("; ")
        };
        let matches = |status: &WatchStatus| is_expected(&text(status));
        let status = timeout(DEADLINE, self.status.wait_for(matches)).await.unwrap().unwrap();
        text(&status)
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.source.abort();
    }
}

/// `Service + a:80` for a change, `Service - a` for a deletion, `Service = a:80` for a list.
fn brief(event: &WatchEvent) -> String {
    fn text<T>(kind: &str, delta: &Delta<T>, object: impl Fn(&T) -> String) -> String {
        match delta {
            Delta::Replace(list) => {
                format!("{kind} = {}", list.iter().map(object).collect::<Vec<_>>().join(" "))
            }
            Delta::Apply(changed) => format!("{kind} + {}", object(changed)),
            Delta::Delete(name) => format!("{kind} - {}", name.name),
        }
    }
    match event {
        WatchEvent::Services(delta) => text("Service", delta, |service| {
            let ports: Vec<String> = service.ports.iter().map(|port| port.port.to_string()).collect();
            format!("{}:{}", service.name.name, ports.join(","))
        }),
        WatchEvent::EndpointSlices(delta) => {
            text("EndpointSlice", delta, |slice| slice.name.name.to_string())
        }
        WatchEvent::Nodes(delta) => text("Node", delta, |node| node.name.to_string()),
        WatchEvent::ServicePart(_) | WatchEvent::EndpointSlicePart(_) => panic!("manifests come as a whole"),
        WatchEvent::ServiceCidrs(delta) => text("ServiceCIDR", delta, |object| object.name.to_string()),
    }
}

/// Changes that make the directory read all files.
fn all() -> Changes {
    Changes { all: true, ..Changes::default() }
}

fn service(name: &str, port: u16) -> String {
    format!(
        "apiVersion: v1\nkind: Service\nmetadata:\n  name: {name}\nspec:\n  clusterIP: 10.96.0.1\n  ports:\n  - port: {port}\n"
    )
}

fn documents(texts: &[String]) -> String {
    texts.join("---\n")
}

const SLICE: &str =
    "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: s}\naddressType: IPv4\n";
const NODE: &str = r#"{"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n"}}"#;

#[tokio::test]
async fn an_empty_directory_yields_an_empty_list_of_each_kind() {
    let mut scene = Scene::start(&[]).await;
    scene.write("a.yaml", &service("a", 80));
    assert_eq!(scene.events(1).await, ["Service + a:80"]);
}

#[tokio::test]
async fn yaml_json_and_lists_are_read_and_other_kinds_ignored() {
    let list = format!(
        "kind: List\napiVersion: v1\nitems:\n- {}- {{apiVersion: v1, kind: Pod, metadata: {{name: p}}}}\n",
        service("l", 3).replace('\n', "\n  ").trim_end_matches(' ')
    );
    let typed = r#"{"kind": "NodeList", "apiVersion": "v1", "items": [{"metadata": {"name": "m"}}]}"#;
    let knative = "apiVersion: serving.knative.dev/v1\nkind: Service\nmetadata: {name: k}\ndata: {1: one}\n";
    let mixed =
        documents(&["# nothing here\n".to_owned(), service("a", 1), knative.to_owned(), service("b", 2)]);
    let root = Scene::start(&[
        ("a.yaml", &mixed),
        ("l.yml", &list),
        ("n.json", &format!("{NODE}\n{typed}")),
        ("s.yaml", SLICE),
        (".hidden.yaml", &service("hidden", 1)),
        ("notes.txt", &service("text", 1)),
    ])
    .await;
    assert_eq!(root.status.borrow().services.last_error, None);
    let mut directory = Directory::new(root.path(""));
    directory.update(all(), Instant::now()).unwrap();
    let texts: Vec<String> = directory.list().iter().map(brief).collect();
    assert_eq!(texts, ["Node = m n", "EndpointSlice = s", "Service = a:1 b:2 l:3"]);
}

#[tokio::test]
async fn only_changes_are_sent_endpoints_first_and_deletions_last() {
    let before = documents(&[service("a", 1), service("b", 2), service("c", 3)]);
    let mut scene = Scene::start(&[("x.yaml", &before)]).await;
    let after = documents(&[service("d", 4), service("b", 2), service("c", 33), SLICE.to_owned()]);
    scene.write("x.yaml", &after);
    let events = scene.events(4).await;
    assert_eq!(events, ["EndpointSlice + s", "Service + c:33", "Service + d:4", "Service - a"]);
    fs::remove_file(scene.path("x.yaml")).unwrap();
    assert_eq!(scene.events(4).await, ["Service - b", "Service - c", "Service - d", "EndpointSlice - s"]);
}

#[tokio::test]
async fn a_file_replaced_by_rename_is_one_change() {
    let mut scene = Scene::start(&[("a.yaml", &service("a", 1))]).await;
    fs::write(scene.path(".a.tmp"), service("a", 2)).unwrap();
    fs::rename(scene.path(".a.tmp"), scene.path("a.yaml")).unwrap();
    assert_eq!(scene.events(1).await, ["Service + a:2"]);
}

#[tokio::test]
async fn a_file_that_stays_empty_loses_its_objects() {
    let mut scene = Scene::start(&[("a.yaml", &service("a", 1))]).await;
    scene.write("a.yaml", "");
    assert_eq!(scene.events(1).await, ["Service - a"]);
}

#[tokio::test]
async fn an_invalid_document_is_reported_and_keeps_its_last_object() {
    let mut scene = Scene::start(&[("a.yaml", &documents(&[service("a", 1), service("b", 1)]))]).await;
    let broken = service("a", 2).replace("port: 2", "port: 70000");
    scene.write("a.yaml", &documents(&[broken, service("b", 2)]));
    assert_eq!(scene.events(1).await, ["Service + b:2"]);
    let error = scene.error(|error| !error.is_empty()).await;
    let expected = "a.yaml: document 1 (from line 1), Service default/a: spec.ports[0].port: 70000 is not a port number, 1 to 65535";
    assert!(error.ends_with(expected), "{error}");
    let errors = scene.status.borrow().manifest_errors.clone();
    assert_eq!((errors.count, errors.texts), (1, vec![error]));
    assert_eq!(scene.status.borrow().services.last_error, None, "the directory is watched");
    scene.write("a.yaml", &documents(&[service("a", 3), service("b", 2)]));
    assert_eq!(scene.events(1).await, ["Service + a:3"]);
    scene.error(str::is_empty).await;
    assert_eq!(scene.status.borrow().manifest_errors, ManifestErrors::default());
}

#[tokio::test]
async fn all_errors_are_counted_and_the_first_ones_named() {
    let broken: Vec<String> = (0..8).map(|n| format!("kind: Service\nmetadata: {{name: s{n}}}\n")).collect();
    let mut scene = Scene::start(&[("a.yaml", &documents(&broken))]).await;
    scene.error(|error| !error.is_empty()).await;
    let errors = scene.status.borrow().manifest_errors.clone();
    assert_eq!((errors.count, errors.texts.len(), &*errors.texts[5]), (8, 6, "and 3 more"));
}

#[tokio::test]
async fn a_wrong_type_is_named_by_document_and_path() {
    let list = "kind: List\napiVersion: v1\nitems:\n- {apiVersion: v1, kind: Service, metadata: {name: a}, spec: {ports: [{port: x}]}}\n";
    let mut scene = Scene::start(&[("a.yaml", &documents(&[service("b", 1), list.to_owned()]))]).await;
    let error = scene.error(|error| !error.is_empty()).await;
    assert!(
        error.contains("document 2 (from line 9), Service default/a: items[0].spec.ports[0].port: "),
        "{error}"
    );
    assert!(error.contains("\"x\""), "{error}");
}

#[tokio::test]
async fn a_file_that_does_not_parse_keeps_its_unreadable_objects() {
    let mut scene = Scene::start(&[("a.yaml", &documents(&[service("a", 1), service("b", 1)]))]).await;
    // Half of the second document is there.
    scene.write("a.yaml", &format!("{}---\nkind: Service\nmetadata: {{name: ", service("a", 2)));
    assert_eq!(scene.events(1).await, ["Service + a:2"]);
    let error = scene.error(|error| error.contains("document 2")).await;
    assert!(error.contains("line"), "{error}");
    scene.write("a.yaml", &service("a", 2));
    assert_eq!(scene.events(1).await, ["Service - b"]);
}

#[tokio::test]
async fn json_that_ends_too_early_keeps_its_objects() {
    let mut scene = Scene::start(&[("n.json", NODE), ("a.yaml", &service("a", 1))]).await;
    scene.write("n.json", &NODE[..30]);
    scene.error(|error| error.contains("n.json")).await;
    scene.write("a.yaml", &service("a", 2));
    assert_eq!(scene.events(1).await, ["Service + a:2"]);
}

#[tokio::test]
async fn a_file_that_cannot_be_read_keeps_its_objects() {
    let mut scene = Scene::start(&[("a.yaml", &service("a", 1))]).await;
    fs::write(scene.path("a.yaml"), [0xff, 0xfe, 0x00]).unwrap();
    let error = scene.error(|error| !error.is_empty()).await;
    assert!(error.contains("not UTF-8"), "{error}");
    symlink("nowhere.yaml", scene.path("link")).unwrap();
    fs::rename(scene.path("link"), scene.path("a.yaml")).unwrap();
    scene.error(|error| error.contains("symbolic link")).await;
    fs::write(scene.path("good"), service("a", 2)).unwrap();
    fs::rename(scene.path("good"), scene.path("a.yaml")).unwrap();
    assert_eq!(scene.events(1).await, ["Service + a:2"]);
}

#[tokio::test]
async fn the_first_of_two_files_with_the_same_object_is_used() {
    let mut scene = Scene::start(&[("b.yaml", &service("a", 2))]).await;
    scene.write("c.yaml", &documents(&[service("a", 3), service("c", 3)]));
    assert_eq!(scene.events(1).await, ["Service + c:3"]);
    scene.write("a.yaml", &service("a", 1));
    assert_eq!(scene.events(1).await, ["Service + a:1"]);
    fs::remove_file(scene.path("a.yaml")).unwrap();
    assert_eq!(scene.events(1).await, ["Service + a:2"]);
    fs::remove_file(scene.path("b.yaml")).unwrap();
    assert_eq!(scene.events(1).await, ["Service + a:3"]);
}

#[tokio::test]
async fn a_label_for_another_proxy_removes_a_service() {
    let mut scene = Scene::start(&[("a.yaml", &service("a", 1))]).await;
    let labels = "  labels: {service.kubernetes.io/service-proxy-name: other}\n";
    scene.write("a.yaml", &service("a", 1).replace("spec:\n", &format!("{labels}spec:\n")));
    assert_eq!(scene.events(1).await, ["Service - a"]);
}

#[tokio::test]
async fn a_config_map_volume_is_followed_through_its_data_link() {
    let mut scene = Scene::start(&[]).await;
    let version = |name: &str, files: &[(&str, String)]| {
        fs::create_dir(scene.path(name)).unwrap();
        for (file, text) in files {
            fs::write(scene.path(name).join(file), text).unwrap();
        }
    };
    version("..1", &[("a.yaml", service("a", 1)), ("b.yaml", service("b", 1))]);
    version("..2", &[("a.yaml", service("a", 2)), ("b.yaml", service("b", 1))]);
    symlink("..1", scene.path("..data")).unwrap();
    symlink("..data/a.yaml", scene.path("a.yaml")).unwrap();
    symlink("..data/b.yaml", scene.path("b.yaml")).unwrap();
    assert_eq!(scene.events(2).await, ["Service + a:1", "Service + b:1"]);
    symlink("..2", scene.path("..data_tmp")).unwrap();
    fs::rename(scene.path("..data_tmp"), scene.path("..data")).unwrap();
    fs::remove_dir_all(scene.path("..1")).unwrap();
    assert_eq!(scene.events(1).await, ["Service + a:2"]);
}

#[tokio::test]
async fn a_missing_directory_is_named_in_the_error() {
    let (tx, _rx) = mpsc::channel(1);
    let error = ManifestSource::new("/nonexistent/manifests").run(tx).await.unwrap_err();
    assert_eq!(error.to_string(), "cannot read manifests directory /nonexistent/manifests");
}

#[tokio::test]
async fn a_directory_that_vanishes_keeps_its_objects_until_it_is_back() {
    let mut scene = Scene::start(&[("a.yaml", &service("a", 1)), ("b.yaml", &service("b", 1))]).await;
    let dir = scene.path("");
    fs::rename(&dir, scene.root.path().join("elsewhere")).unwrap();
    scene.error(|error| error.contains("manifests")).await;
    fs::create_dir(&dir).unwrap();
    scene.write("a.yaml", &service("a", 2));
    assert_eq!(scene.events(2).await, ["Service + a:2", "Service - b"]);
    scene.error(str::is_empty).await;
    scene.write("a.yaml", &service("a", 3));
    assert_eq!(scene.events(1).await, ["Service + a:3"]);
}

#[tokio::test]
async fn a_directory_replaced_by_another_is_followed() {
    let mut scene = Scene::start(&[("a.yaml", &service("a", 1))]).await;
    let dir = scene.path("");
    let other = scene.root.path().join("other");
    fs::create_dir(&other).unwrap();
    fs::write(other.join("a.yaml"), service("a", 2)).unwrap();
    fs::rename(&dir, scene.root.path().join("old")).unwrap();
    fs::rename(&other, &dir).unwrap();
    assert_eq!(scene.events(1).await, ["Service + a:2"]);
    scene.write("a.yaml", &service("a", 3));
    assert_eq!(scene.events(1).await, ["Service + a:3"]);
}

#[tokio::test]
async fn the_source_ends_when_nobody_listens() {
    let mut scene = Scene::start(&[]).await;
    scene.events.close();
    while scene.events.recv().await.is_some() {}
    timeout(DEADLINE, &mut scene.source).await.unwrap().unwrap();
}
