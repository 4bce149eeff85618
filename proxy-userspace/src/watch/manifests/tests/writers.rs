//! Files changed by editors and scripts, with the clock in the test's hands.

use std::{
    fs,
    fs::File,
    os::unix::fs::symlink,
    time::{Duration, SystemTime},
};

use tempfile::TempDir;

use super::{super::*, all, brief, documents, service};
use crate::captured_log::logged;

/// A directory with one file, `a.yaml`. The test says what time it is and which changes inotify
/// reports.
struct Bench {
    root: TempDir,
    directory: Directory,
    now: Instant,
}

impl Bench {
    fn start(text: &str) -> Self {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("a.yaml"), text).unwrap();
        let mut directory = Directory::new(root.path().to_owned());
        let now = Instant::now();
        directory.update(all(), now).unwrap();
        directory.list();
        Self { root, directory, now }
    }

    fn path(&self) -> PathBuf {
        self.root.path().join("a.yaml")
    }

    /// Writes and closes the file.
    fn write(&mut self, text: &str) -> Vec<String> {
        fs::write(self.path(), text).unwrap();
        self.reported(&["a.yaml"])
    }

    /// What inotify's report of these files changes.
    fn reported(&mut self, names: &[&str]) -> Vec<String> {
        let files = names.iter().copied().map(Into::into).collect();
        self.update(Changes { files, ..Changes::default() })
    }

    /// What a scan changes.
    fn scan(&mut self) -> Vec<String> {
        self.update(all())
    }

    /// What changes after some time.
    fn after(&mut self, milliseconds: u64) -> Vec<String> {
        self.now += Duration::from_millis(milliseconds);
        self.update(Changes::default())
    }

    fn update(&mut self, changes: Changes) -> Vec<String> {
        self.directory.update(changes, self.now).unwrap();
        self.directory.take_changes().iter().map(brief).collect()
    }

    /// Makes the file's last write look this old.
    fn age(&self, age: Duration) {
        File::options().write(true).open(self.path()).unwrap().set_modified(SystemTime::now() - age).unwrap();
    }
}

const NOTHING: [String; 0] = [];

#[test]
fn an_editor_that_moves_the_old_file_away_first_deletes_nothing() {
    let mut bench = Bench::start(&service("a", 1));
    fs::rename(bench.path(), bench.root.path().join("a.yaml~")).unwrap();
    assert_eq!(bench.reported(&["a.yaml"]), NOTHING);
    assert_eq!(bench.after(400), NOTHING);
    assert_eq!(bench.write(&service("a", 2)), ["Service + a:2"]);
    assert_eq!(bench.after(1000), NOTHING);
}

#[test]
fn a_file_that_stays_away_loses_its_objects() {
    let mut bench = Bench::start(&service("a", 1));
    fs::remove_file(bench.path()).unwrap();
    assert_eq!(bench.reported(&["a.yaml"]), NOTHING);
    assert_eq!(bench.after(500), ["Service - a"]);
}

#[test]
fn copies_of_a_manifest_are_reported_but_renames_are_not() {
    for (from, to) in [("a.yaml", "b.yaml"), ("b.yaml", "a.yaml")] {
        let mut bench = Bench::start(&service("a", 1));
        let path = |name: &str| bench.root.path().join(name);
        let (from_path, to_path, copy) = (path(from), path(to), path("c.yaml"));
        if from != "a.yaml" {
            fs::rename(&to_path, &from_path).unwrap();
            bench.reported(&[from, to]);
            bench.after(500);
        }
        fs::rename(from_path, &to_path).unwrap();
        let log = logged(|| assert_eq!(bench.reported(&[from, to]), NOTHING));
        assert_eq!(log, "");
        assert_eq!(logged(|| assert_eq!(bench.after(500), NOTHING)), "");
        fs::copy(to_path, copy).unwrap();
        let log = logged(|| assert_eq!(bench.reported(&["c.yaml"]), NOTHING));
        assert!(log.contains(&format!("{to}, c.yaml")) && log.contains("Service default/a"), "{log}");
    }
}

#[test]
fn a_file_is_not_read_while_it_is_written_in_place() {
    let both = documents(&[service("a", 1), service("b", 1)]);
    let mut bench = Bench::start(&both);
    // Truncated, and the first document written.
    fs::write(bench.path(), service("a", 2)).unwrap();
    assert_eq!(bench.scan(), NOTHING);
    assert_eq!(bench.after(500), NOTHING);
    let changed = both.replace("port: 1", "port: 2");
    assert_eq!(bench.write(&changed), ["Service + a:2", "Service + b:2"]);
    assert_eq!(bench.after(5000), NOTHING);
}

#[test]
fn half_a_file_is_an_error_once_its_writer_closed_it() {
    let mut bench = Bench::start(&service("a", 1));
    fs::write(bench.path(), "kind: Service\nmetadata: {name: ").unwrap();
    assert_eq!(bench.scan(), NOTHING);
    assert_eq!(bench.directory.errors().count(), 0);
    assert_eq!(bench.reported(&["a.yaml"]), NOTHING);
    assert_eq!(bench.directory.errors().count(), 1);
}

#[test]
fn a_script_that_truncates_and_then_appends_deletes_nothing() {
    let mut bench = Bench::start(&service("a", 1));
    assert_eq!(bench.write(""), NOTHING);
    assert_eq!(bench.after(400), NOTHING);
    assert_eq!(bench.write(&service("a", 2)), ["Service + a:2"]);
    assert_eq!(bench.after(5000), NOTHING);
    assert_eq!(bench.write("# none left\n"), ["Service - a"]);
}

#[test]
fn an_object_that_a_rewritten_file_lacks_is_removed_at_once() {
    let mut bench = Bench::start(&documents(&[service("a", 1), service("b", 1)]));
    assert_eq!(bench.write(&service("b", 1)), ["Service - a"]);
}

#[test]
fn a_file_kept_open_is_read_when_its_writer_pauses() {
    let mut bench = Bench::start(&service("a", 1));
    // The first digit of 8080.
    fs::write(bench.path(), service("a", 8)).unwrap();
    assert_eq!(bench.scan(), NOTHING);
    fs::write(bench.path(), service("a", 8080)).unwrap();
    bench.age(Duration::from_secs(1));
    assert_eq!(bench.scan(), ["Service + a:8080"]);
}

#[test]
fn a_slow_writer_removes_no_object_before_it_is_done() {
    let both = documents(&[service("a", 1), service("b", 1)]);
    let mut bench = Bench::start(&both);
    // Truncated, and nothing written for a while.
    fs::write(bench.path(), "").unwrap();
    bench.age(Duration::from_secs(12));
    assert_eq!(bench.scan(), NOTHING);
    assert_eq!(bench.after(1000), NOTHING);
    // The first document is written.
    fs::write(bench.path(), service("a", 2)).unwrap();
    bench.age(Duration::from_secs(12));
    assert_eq!(bench.scan(), ["Service + a:2"]);
    assert_eq!(bench.scan(), NOTHING);
    assert_eq!(bench.after(10_000), NOTHING);
    // The writer closes the file, which still lacks an object.
    assert_eq!(bench.reported(&["a.yaml"]), ["Service - b"]);
}

#[test]
fn a_file_that_nobody_writes_for_long_is_complete() {
    let both = documents(&[service("a", 1), service("b", 1)]);
    for (text, removed) in [(service("a", 1), &["Service - b"][..]), (String::new(), &[])] {
        let mut bench = Bench::start(&both);
        fs::write(bench.path(), &text).unwrap();
        bench.age(Duration::from_secs(5));
        assert_eq!(bench.scan(), NOTHING);
        bench.age(Duration::from_secs(31));
        assert_eq!(bench.scan(), removed);
        let later = bench.after(500);
        assert_eq!(later.len(), if text.is_empty() { 2 } else { 0 }, "{later:?}");
    }
}

#[test]
fn a_link_to_another_file_is_complete_and_its_file_is_written_slowly() {
    let both = documents(&[service("a", 1), service("b", 1)]);
    let mut bench = Bench::start("");
    let target = |name: &str| bench.root.path().join(name);
    let (old, new, link) = (target("old"), target("new"), target("link"));
    fs::write(&old, &both).unwrap();
    symlink(&old, &link).unwrap();
    fs::rename(&link, bench.path()).unwrap();
    assert_eq!(bench.reported(&["a.yaml"]), ["Service + a:1", "Service + b:1"]);
    // Inotify reports nothing of what happens to the file behind the link.
    fs::write(&old, service("b", 2)).unwrap();
    bench.age(Duration::from_secs(12));
    assert_eq!(bench.scan(), ["Service + b:2"]);
    fs::write(&new, service("c", 1)).unwrap();
    symlink(&new, &link).unwrap();
    fs::rename(&link, bench.path()).unwrap();
    assert_eq!(bench.scan(), ["Service + c:1", "Service - a", "Service - b"]);
}

#[test]
fn another_file_at_the_place_to_which_a_link_leads_is_written_slowly() {
    let both = documents(&[service("a", 1), service("b", 1)]);
    let mut bench = Bench::start("");
    let (target, link) = (bench.root.path().join("target"), bench.root.path().join("link"));
    fs::write(&target, &both).unwrap();
    symlink(&target, &link).unwrap();
    fs::rename(&link, bench.path()).unwrap();
    assert_eq!(bench.reported(&["a.yaml"]), ["Service + a:1", "Service + b:1"]);
    // Nobody reports when the writer of the new file is done.
    let other = bench.root.path().join("other");
    fs::write(&other, service("a", 2)).unwrap();
    fs::rename(&other, &target).unwrap();
    assert_eq!(bench.scan(), ["Service + a:2"]);
    fs::remove_file(&target).unwrap();
    assert_eq!(bench.scan(), NOTHING);
    fs::write(&target, service("a", 3)).unwrap();
    assert_eq!(bench.scan(), ["Service + a:3"], "the writer has not come to the second object");
    bench.age(Duration::from_secs(40));
    assert_eq!(bench.scan(), ["Service - b"]);
}

#[test]
fn an_empty_file_that_is_written_again_slowly_removes_no_object() {
    let both = documents(&[service("a", 1), service("b", 1)]);
    let mut bench = Bench::start(&both);
    assert_eq!(bench.write(""), NOTHING);
    // Another process appends, and has not closed the file when the objects are to be removed.
    fs::write(bench.path(), service("a", 1)).unwrap();
    assert_eq!(bench.after(500), NOTHING);
    assert_eq!(bench.write(&both), NOTHING);
    assert_eq!(bench.after(5000), NOTHING);
    assert_eq!(bench.write(&service("b", 1)), ["Service - a"]);
}

#[test]
fn a_replaced_directory_has_half_a_second_to_be_filled() {
    let mut bench = Bench::start(&service("a", 1));
    fs::remove_file(bench.path()).unwrap();
    assert_eq!(bench.update(all()), NOTHING);
    assert_eq!(bench.after(400), NOTHING);
    assert_eq!(bench.write(&service("a", 2)), ["Service + a:2"]);
}
