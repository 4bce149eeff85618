//! Real files in real directories, written the ways people and programs write them.

use std::{
    fs,
    io::Write as _,
    os::unix::fs::{PermissionsExt as _, symlink},
    time::Duration,
};

use proptest::prelude::*;
use tempfile::TempDir;
use tokio::{sync::mpsc, task::JoinHandle, time::timeout};

use super::{dirty::FileNews, *};
use crate::model::NamespacedName;

/// No wait in these tests is longer.
const DEADLINE: Duration = Duration::from_secs(20);

/// A directory, a source that follows it, and what the source has said.
struct Scene {
    /// Holds the directory that is followed, `manifests`.
    root: TempDir,
    events: mpsc::Receiver<WatchEvent>,
    status: watch::Receiver<WatchStatus>,
    source: JoinHandle<()>,
    log: Vec<String>,
}

impl Scene {
    /// A source that follows a directory with these files and has told what is in them.
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
        let mut scene = Self {
            root,
            events,
            status,
            source,
            log: Vec::new(),
        };
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

    /// Takes this many events and returns them in short.
    async fn events(&mut self, number: usize) -> Vec<String> {
        for _ in 0..number {
            let event = timeout(DEADLINE, self.events.recv()).await;
            let event = event
                .unwrap_or_else(|_| panic!("no event; so far {:?}", self.log))
                .unwrap();
            self.log.push(brief(&event));
        }
        self.log.split_off(self.log.len() - number)
    }

    async fn error(&mut self, holds: impl Fn(&str) -> bool) -> String {
        let told = |status: &WatchStatus| holds(status.services.last_error.as_deref().unwrap_or_default());
        let status = timeout(DEADLINE, self.status.wait_for(told))
            .await
            .unwrap()
            .unwrap();
        status.services.last_error.clone().unwrap_or_default()
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
            Delta::Replace(list) => format!(
                "{kind} = {}",
                list.iter().map(object).collect::<Vec<_>>().join(" ")
            ),
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
    }
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
async fn each_kind_is_told_once_even_if_there_is_none() {
    let mut scene = Scene::start(&[]).await;
    scene.write("a.yaml", &service("a", 80));
    assert_eq!(scene.events(1).await, ["Service + a:80"]);
}

#[tokio::test]
async fn yaml_json_and_lists_are_read_and_other_kinds_and_files_ignored() {
    let list = format!(
        "kind: List\napiVersion: v1\nitems:\n- {}- {{apiVersion: v1, kind: Pod, metadata: {{name: p}}}}\n",
        service("l", 3).replace('\n', "\n  ").trim_end_matches(' ')
    );
    let typed = r#"{"kind": "NodeList", "apiVersion": "v1", "items": [{"metadata": {"name": "m"}}]}"#;
    let knative = "apiVersion: serving.knative.dev/v1\nkind: Service\nmetadata: {name: k}\ndata: {1: one}\n";
    let mixed = documents(&[
        "# nothing here\n".to_owned(),
        service("a", 1),
        knative.to_owned(),
        service("b", 2),
    ]);
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
    directory.load(Instant::now()).unwrap();
    let events = initial_events(&mut directory);
    let texts: Vec<String> = events.iter().map(brief).collect();
    assert_eq!(
        texts,
        ["Node = m n", "EndpointSlice = s", "Service = a:1 b:2 l:3"]
    );
}

#[tokio::test]
async fn only_what_changed_is_told_endpoints_first_and_removals_last() {
    let before = documents(&[service("a", 1), service("b", 2), service("c", 3)]);
    let mut scene = Scene::start(&[("x.yaml", &before)]).await;
    let after = documents(&[
        service("d", 4),
        service("b", 2),
        service("c", 33),
        SLICE.to_owned(),
    ]);
    scene.write("x.yaml", &after);
    let events = scene.events(4).await;
    assert_eq!(
        events,
        [
            "EndpointSlice + s",
            "Service + c:33",
            "Service + d:4",
            "Service - a"
        ]
    );
    fs::remove_file(scene.path("x.yaml")).unwrap();
    assert_eq!(
        scene.events(4).await,
        ["Service - b", "Service - c", "Service - d", "EndpointSlice - s"]
    );
}

#[tokio::test]
async fn a_file_replaced_by_renaming_is_one_change() {
    let mut scene = Scene::start(&[("a.yaml", &service("a", 1))]).await;
    fs::write(scene.path(".a.tmp"), service("a", 2)).unwrap();
    fs::rename(scene.path(".a.tmp"), scene.path("a.yaml")).unwrap();
    assert_eq!(scene.events(1).await, ["Service + a:2"]);
}

/// A directory whose time and news are made by the test.
struct Slow {
    root: TempDir,
    directory: Directory,
    now: Instant,
}

impl Slow {
    fn start(text: &str) -> Self {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("a.yaml"), text).unwrap();
        let mut directory = Directory::new(root.path().to_owned());
        let now = Instant::now();
        directory.load(now).unwrap();
        directory.changes();
        Self { root, directory, now }
    }

    fn path(&self) -> PathBuf {
        self.root.path().join("a.yaml")
    }

    fn write(&mut self, text: &str) -> Vec<String> {
        fs::write(self.path(), text).unwrap();
        self.news(true, Some(false))
    }

    /// What follows from news of the file.
    fn news(&mut self, read: bool, writing: Option<bool>) -> Vec<String> {
        self.directory
            .file_news("a.yaml".as_ref(), FileNews { read, writing }, self.now);
        self.changes()
    }

    /// What follows from time passing.
    fn after(&mut self, milliseconds: u64) -> Vec<String> {
        self.now += Duration::from_millis(milliseconds);
        self.directory.check(self.now);
        self.changes()
    }

    fn changes(&mut self) -> Vec<String> {
        events(self.directory.changes()).iter().map(brief).collect()
    }
}

const NOTHING: [String; 0] = [];

#[test]
fn an_editor_that_moves_the_old_file_away_first_deletes_nothing() {
    let mut slow = Slow::start(&service("a", 1));
    fs::rename(slow.path(), slow.root.path().join("a.yaml~")).unwrap();
    assert_eq!(slow.news(true, Some(false)), NOTHING);
    assert_eq!(slow.after(10), NOTHING);
    assert_eq!(slow.write(&service("a", 2)), ["Service + a:2"]);
    assert_eq!(slow.after(1000), NOTHING);
}

#[test]
fn a_file_that_stays_away_takes_its_objects_along() {
    let mut slow = Slow::start(&service("a", 1));
    fs::remove_file(slow.path()).unwrap();
    assert_eq!(slow.news(true, Some(false)), NOTHING);
    assert_eq!(slow.after(20), ["Service - a"]);
    assert_eq!(slow.directory.next_check(), None);
}

#[test]
fn a_file_written_in_place_is_not_believed_while_it_is_written() {
    let both = documents(&[service("a", 1), service("b", 1)]);
    let mut slow = Slow::start(&both);
    // Truncated and begun, when something else makes us look.
    fs::write(slow.path(), service("a", 2)).unwrap();
    assert_eq!(slow.news(false, Some(true)), NOTHING);
    assert_eq!(slow.news(true, None), NOTHING);
    assert_eq!(slow.after(500), NOTHING);
    assert_eq!(
        slow.write(&both.replace("port: 1", "port: 2")),
        ["Service + a:2", "Service + b:2"]
    );
    assert_eq!(slow.after(5000), NOTHING);
}

#[test]
fn half_a_file_is_no_error_while_it_is_written() {
    let mut slow = Slow::start(&service("a", 1));
    fs::write(slow.path(), "kind: Service\nmetadata: {name: ").unwrap();
    slow.news(false, Some(true));
    slow.news(true, None);
    assert_eq!(slow.after(500), NOTHING);
    assert_eq!(slow.directory.errors().count(), 0);
    // Its writer is done, or asleep.
    slow.news(true, Some(false));
    slow.after(10);
    assert_eq!(slow.directory.errors().count(), 1);
    assert_eq!(slow.changes(), NOTHING);
}

#[test]
fn a_script_that_empties_and_then_appends_deletes_nothing() {
    let mut slow = Slow::start(&service("a", 1));
    assert_eq!(slow.write(""), NOTHING);
    assert_eq!(slow.after(400), NOTHING);
    assert_eq!(slow.write(&service("a", 2)), ["Service + a:2"]);
    assert_eq!(slow.after(5000), NOTHING);
    assert_eq!(slow.write("# none left\n"), NOTHING);
    assert_eq!(slow.after(5), ["Service - a"]);
}

#[test]
fn a_rewritten_file_that_takes_objects_away_is_believed_within_milliseconds() {
    let mut slow = Slow::start(&documents(&[service("a", 1), service("b", 1)]));
    assert_eq!(slow.write(&service("b", 1)), NOTHING);
    assert_eq!(slow.after(5), ["Service - a"]);
}

#[tokio::test]
async fn a_file_that_stays_empty_holds_nothing() {
    let mut scene = Scene::start(&[("a.yaml", &service("a", 1))]).await;
    scene.write("a.yaml", "");
    assert_eq!(scene.events(1).await, ["Service - a"]);
}

#[tokio::test]
async fn a_file_that_is_kept_open_is_read_when_its_writer_pauses() {
    let mut scene = Scene::start(&[]).await;
    let mut file = fs::File::create(scene.path("a.yaml")).unwrap();
    file.write_all(service("a", 1).as_bytes()).unwrap();
    assert_eq!(scene.events(1).await, ["Service + a:1"]);
    drop(file);
}

#[tokio::test]
async fn an_invalid_document_is_named_and_keeps_its_object_while_the_others_apply() {
    let mut scene = Scene::start(&[("a.yaml", &documents(&[service("a", 1), service("b", 1)]))]).await;
    let broken = service("a", 2).replace("port: 2", "port: 70000");
    scene.write("a.yaml", &documents(&[broken, service("b", 2)]));
    assert_eq!(scene.events(1).await, ["Service + b:2"]);
    let error = scene.error(|error| !error.is_empty()).await;
    let expected = "a.yaml: document 1 (from line 1), Service default/a: spec.ports[0].port: 70000 is not a port number, 1 to 65535";
    assert!(error.ends_with(expected), "{error}");
    scene.write("a.yaml", &documents(&[service("a", 3), service("b", 2)]));
    assert_eq!(scene.events(1).await, ["Service + a:3"]);
    scene.error(str::is_empty).await;
}

#[tokio::test]
async fn a_value_of_the_wrong_type_is_named_by_document_and_path() {
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
async fn a_file_that_does_not_parse_keeps_what_cannot_be_told_from_it() {
    let mut scene = Scene::start(&[("a.yaml", &documents(&[service("a", 1), service("b", 1)]))]).await;
    // Half of the second document is there.
    scene.write(
        "a.yaml",
        &format!("{}---\nkind: Service\nmetadata: {{name: ", service("a", 2)),
    );
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
    fs::remove_file(scene.path("a.yaml")).unwrap();
    symlink("nowhere.yaml", scene.path("a.yaml")).unwrap();
    scene.error(|error| error.contains("symbolic link")).await;
    // Where not even root may read, this is the file's mode.
    fs::remove_file(scene.path("a.yaml")).unwrap();
    scene.write("a.yaml", &service("a", 2));
    fs::set_permissions(scene.path("a.yaml"), fs::Permissions::from_mode(0o644)).unwrap();
    assert_eq!(scene.events(1).await, ["Service + a:2"]);
}

#[tokio::test]
async fn the_first_of_two_files_with_the_same_object_counts() {
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
async fn labels_that_name_another_proxy_take_a_service_away() {
    let mut scene = Scene::start(&[("a.yaml", &service("a", 1))]).await;
    let labels = "  labels: {service.kubernetes.io/service-proxy-name: other}\n";
    scene.write(
        "a.yaml",
        &service("a", 1).replace("spec:\n", &format!("{labels}spec:\n")),
    );
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
async fn a_directory_that_is_not_there_is_named_in_the_error() {
    let (tx, _rx) = mpsc::channel(1);
    let error = ManifestSource::new("/nonexistent/manifests")
        .run(tx)
        .await
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "cannot open manifests directory /nonexistent/manifests"
    );
}

#[tokio::test]
async fn a_directory_that_vanishes_keeps_its_objects_until_it_is_back() {
    let mut scene = Scene::start(&[("a.yaml", &service("a", 1)), ("b.yaml", &service("b", 1))]).await;
    let dir = scene.path("");
    fs::remove_dir_all(&dir).unwrap();
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

proptest! {
    #[test]
    fn no_text_makes_the_reader_panic(text in "[ -~\n\t\u{80}-\u{ff}]{0,200}", json in any::<bool>()) {
        documents::read(&text, json);
    }

    #[test]
    fn no_damage_to_a_good_file_makes_the_reader_panic(
        cuts in proptest::collection::vec((any::<proptest::sample::Index>(), any::<proptest::sample::Index>(), "[ -~\n]{0,6}"), 1..5),
        json in any::<bool>(),
    ) {
        let list = format!("kind: List\napiVersion: v1\nitems:\n- {NODE}\n");
        let mut text = if json { NODE.to_owned() } else {
            documents(&[service("a", 1), SLICE.to_owned(), list, service("b", 2)])
        };
        for (from, to, new) in cuts {
            let (from, to) = (from.index(text.len() + 1), to.index(text.len() + 1));
            text.replace_range(from.min(to)..from.max(to).min(from.min(to) + 20), &new);
        }
        documents::read(&text, json);
    }

    #[test]
    fn the_order_of_changes_to_files_does_not_matter(
        steps in proptest::collection::vec((0..3_usize, proptest::collection::vec((0..4_usize, 1..3_u16), 0..3)), 1..8),
    ) {
        let root = tempfile::tempdir().unwrap();
        let mut directory = Directory::new(root.path().to_owned());
        let mut told = std::collections::BTreeMap::new();
        let mut now = Instant::now();
        for (file, services) in steps {
            let texts: Vec<String> = services.iter().map(|(name, port)| service(&format!("s{name}"), *port)).collect();
            fs::write(root.path().join(format!("{file}.yaml")), documents(&texts)).unwrap();
            directory.scan(now, false).unwrap();
            now += Duration::from_secs(5);
            directory.check(now);
            for (key, object) in directory.changes() {
                match object {
                    Some(object) => { told.insert(key, object); }
                    None => { told.remove(&key); }
                }
            }
        }
        let mut fresh = Directory::new(root.path().to_owned());
        fresh.load(now).unwrap();
        let fresh: std::collections::BTreeMap<_, _> = fresh.objects().map(|(k, o)| (k.clone(), o.clone())).collect();
        prop_assert_eq!(told, fresh);
    }
}

#[test]
fn keys_that_are_numbers_are_text_and_merged_maps_are_merged() {
    let text = "base: &base {name: a, labels: {0: zero, true: yes}}\napiVersion: v1\nkind: Service\n\
                metadata: {<<: *base}\nspec: {ports: [{port: 80}]}\n";
    let contents = documents::read(text, false);
    assert_eq!(contents.errors, []);
    let names: Vec<String> = contents.objects.keys().map(ToString::to_string).collect();
    assert_eq!(names, ["Service default/a"]);
}

#[test]
fn namespaces_tell_objects_apart() {
    let text = documents(&[
        service("a", 1),
        service("a", 2).replace("  name: a", "  name: a\n  namespace: other"),
    ]);
    let contents = documents::read(&text, false);
    let names: Vec<&NamespacedName> = contents.objects.keys().map(|key| &key.name).collect();
    assert_eq!(
        names,
        [
            &NamespacedName::new("default", "a"),
            &NamespacedName::new("other", "a")
        ]
    );
    assert!(contents.errors.is_empty());
}

#[test]
fn an_object_that_is_twice_in_a_file_counts_once_and_is_named() {
    let contents = documents::read(&documents(&[service("a", 1), service("a", 2)]), false);
    assert_eq!(contents.objects.len(), 1);
    let expected = "document 2 (from line 9), Service default/a: metadata.name: \"a\" is there already in this file; the first is used";
    assert_eq!(contents.errors[0].to_string(), expected);
}

#[test]
fn versions_and_names_that_cannot_be_used_are_named() {
    let old = SLICE.replace("/v1", "/v1beta1");
    let nameless = "apiVersion: v1\nkind: Service\n".to_owned();
    let contents = documents::read(
        &documents(&[
            old,
            nameless,
            "metadata: {name: x}\n".to_owned(),
            "- 1\n".to_owned(),
        ]),
        false,
    );
    let errors: Vec<String> = contents.errors.iter().map(ToString::to_string).collect();
    assert_eq!(
        errors,
        [
            "document 1 (from line 1), EndpointSlice default/s: apiVersion: \"discovery.k8s.io/v1beta1\" is not a known version of EndpointSlice; v1 is",
            "document 2 (from line 5): metadata.name: missing; a Service needs a name",
            "document 3 (from line 8): kind: missing; an object needs one, Service for example",
            "document 4 (from line 10): kind: missing; an object needs one, Service for example",
        ]
    );
}
