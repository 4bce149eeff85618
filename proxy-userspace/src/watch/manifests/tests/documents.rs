//! Decodes good and damaged files.

use std::{collections::BTreeMap, fs, io::Cursor, path::Path, sync::Arc, time::Duration};

use proptest::prelude::*;

use super::{
    super::{documents::Contents, file::Text, *},
    NODE, SLICE, all, documents, service,
};
use crate::model::{Delta, NamespacedName, SharedValues};

pub(super) fn read(text: &str, is_json: bool) -> Contents {
    let path = PathBuf::from(if is_json { "a.json" } else { "a.yaml" });
    let text = Text::new(Cursor::new(text)).unwrap();
    super::super::documents::read(&path, text, &BTreeMap::new(), &mut SharedValues::default())
}

proptest! {
    #[test]
    fn no_text_makes_the_reader_panic(text in "[ -~\n\t\u{80}-\u{ff}]{0,200}", json in any::<bool>()) {
        read(&text, json);
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
        read(&text, json);
    }

    #[test]
    fn changed_files_lead_to_the_objects_of_a_fresh_read(
        steps in proptest::collection::vec((0..3_usize, proptest::collection::vec((0..4_usize, 1..3_u16), 0..3)), 1..8),
    ) {
        let root = tempfile::tempdir().unwrap();
        let mut directory = Directory::new(root.path().to_owned());
        let mut services_sent = BTreeMap::new();
        let mut now = Instant::now();
        for (file, services) in steps {
            let texts: Vec<String> = services.iter().map(|(name, port)| service(&format!("s{name}"), *port)).collect();
            let name = format!("{file}.yaml");
            fs::write(root.path().join(&name), documents(&texts)).unwrap();
            let files = [name.into()].into();
            directory.update(Changes { files, ..Changes::default() }, now).unwrap();
            now += Duration::from_secs(5);
            directory.update(Changes::default(), now).unwrap();
            for event in directory.take_changes() {
                let WatchEvent::Services(delta) = event else { panic!("{event:?}") };
                delta.apply_to(&mut services_sent, |service| service.name.clone());
            }
        }
        let mut fresh = Directory::new(root.path().to_owned());
        fresh.update(all(), now).unwrap();
        let sent = WatchEvent::Services(Delta::Replace(services_sent.into_values().collect()));
        prop_assert_eq!(Some(sent), fresh.list().pop());
    }
}

#[test]
fn numeric_keys_become_text_and_merge_keys_are_applied() {
    let text = "base: &base {name: a, labels: {0: zero, true: yes}}\napiVersion: v1\nkind: Service\n\
                metadata: {<<: *base}\nspec: {ports: [{port: 80}]}\n";
    let contents = read(text, false);
    assert_eq!(contents.errors, []);
    let names: Vec<String> = contents.objects.keys().map(ToString::to_string).collect();
    assert_eq!(names, ["Service default/a"]);
}

/// Returns the names of the Services in JSON, and the errors.
fn json_services(text: &str) -> (Vec<String>, Vec<String>) {
    let contents = read(text, true);
    let names = contents.objects.keys().map(|key| key.name.name.to_string()).collect();
    (names, contents.errors.into_iter().map(|(_, error)| error).collect())
}

fn json_service(name: &str) -> String {
    format!(
        r#"{{"apiVersion": "v1", "kind": "Service", "metadata": {{"namespace": "d", "name": "{name}"}}}}"#
    )
}

#[test]
fn json_values_may_be_separated_by_markers() {
    let [a, b] = ["a", "b"].map(json_service);
    for text in [
        format!("{a}\n---\n{b}\n"),
        format!("---\n{a}\n---\r\n---\n{b}\n---\n"),
        format!("{a}{b}"),
        format!("{a}\n--- {b}"),
    ] {
        assert_eq!(json_services(&text), (vec!["a".into(), "b".into()], vec![]), "{text}");
    }
}

#[test]
fn a_damaged_json_value_does_not_affect_those_behind_the_next_marker() {
    let [a, b] = ["a", "b"].map(json_service);
    for damaged in ["{", "{\"a\": ", "{\"a\": -", "}", "{\"a\": 1,\n- }", "----", "\"--", "- 1"] {
        let (names, errors) = json_services(&format!("{a}\n---\n{damaged}\n---\n{b}\n"));
        assert_eq!(names, ["a", "b"], "{damaged}");
        assert_eq!(errors.len(), 1, "{damaged}: {errors:?}");
        assert!(errors[0].starts_with("document 2 (from line 3)"), "{damaged}: {errors:?}");
    }
    let (names, errors) = json_services(&format!("{a}\n{{\n{b}"));
    assert_eq!((names, errors.len()), (vec!["a".to_owned()], 1));
}

#[test]
fn an_object_that_did_not_change_is_shared_with_the_last_read() {
    let last = read(&documents(&[service("a", 1), service("b", 1)]), false);
    let text = Text::new(Cursor::new(documents(&[service("a", 2), service("b", 1)]))).unwrap();
    let new =
        super::super::documents::read(Path::new("a.yaml"), text, &last.objects, &mut SharedValues::default());
    let is_shared = |(key, object)| Arc::ptr_eq(object, &last.objects[key]);
    assert_eq!(new.objects.iter().map(is_shared).collect::<Vec<_>>(), [false, true]);
}

#[test]
fn objects_of_the_same_name_in_two_namespaces_are_two() {
    let text =
        documents(&[service("a", 1), service("a", 2).replace("  name: a", "  name: a\n  namespace: other")]);
    let contents = read(&text, false);
    let names: Vec<&NamespacedName> = contents.objects.keys().map(|key| &key.name).collect();
    assert_eq!(names, [&NamespacedName::new("default", "a"), &NamespacedName::new("other", "a")]);
    assert!(contents.errors.is_empty());
}

#[test]
fn an_object_twice_in_a_file_is_reported_and_used_once() {
    let contents = read(&documents(&[service("a", 1), service("a", 2)]), false);
    assert_eq!(contents.objects.len(), 1);
    let expected = "document 2 (from line 9), Service default/a: metadata.name: \"a\" is already in this file; the first one is used";
    assert_eq!(contents.errors[0].1, expected);
}

#[test]
fn an_unknown_version_or_a_missing_name_is_an_error() {
    let old = SLICE.replace("/v1", "/v1beta1");
    let nameless = "apiVersion: v1\nkind: Service\n".to_owned();
    let contents =
        read(&documents(&[old, nameless, "metadata: {name: x}\n".to_owned(), "- 1\n".to_owned()]), false);
    let errors: Vec<String> = contents.errors.into_iter().map(|(_, error)| error).collect();
    assert_eq!(
        errors,
        [
            "document 1 (from line 1), EndpointSlice default/s: apiVersion: \"discovery.k8s.io/v1beta1\" is not a known version of EndpointSlice; v1 is",
            "document 2 (from line 5): metadata.name: missing; every object needs a name",
            "document 3 (from line 8): kind: missing; an object needs one, Service for example",
            "document 4 (from line 10): kind: missing; an object needs one, Service for example",
        ]
    );
}
