//! What is believed when, with the clock in the test's hands.

use std::{fs, time::Duration};

use tempfile::TempDir;

use super::{
    super::{dirty::FileNews, *},
    brief, documents, service,
};

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
        self.directory.file_news("a.yaml".as_ref(), FileNews { read, writing }, self.now);
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
fn a_renamed_file_is_no_second_manifest_of_its_objects_but_a_copy_is() {
    let mut slow = Slow::start(&service("a", 1));
    let (renamed, copy) = (slow.root.path().join("b.yaml"), slow.root.path().join("c.yaml"));
    let read = |slow: &mut Slow, name: &str| {
        slow.directory.file_news(name.as_ref(), FileNews { read: true, writing: Some(false) }, slow.now);
    };
    fs::rename(slow.path(), &renamed).unwrap();
    read(&mut slow, "b.yaml");
    read(&mut slow, "a.yaml");
    assert_eq!(slow.changes(), NOTHING);
    assert_eq!(slow.directory.shared().count(), 0);
    assert_eq!(slow.after(20), NOTHING);
    assert_eq!(slow.directory.shared().count(), 0);
    fs::copy(&renamed, &copy).unwrap();
    read(&mut slow, "c.yaml");
    assert_eq!(slow.changes(), NOTHING);
    assert_eq!(slow.directory.shared().collect::<Vec<_>>(), ["Service default/a"]);
    fs::remove_file(copy).unwrap();
    read(&mut slow, "c.yaml");
    slow.after(20);
    assert_eq!(slow.directory.shared().count(), 0);
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
    assert_eq!(slow.write(&both.replace("port: 1", "port: 2")), ["Service + a:2", "Service + b:2"]);
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

#[test]
fn nothing_is_believed_while_a_file_is_written_until_its_writer_falls_asleep() {
    let mut slow = Slow::start(&service("a", 1));
    // The first digit of 8080.
    fs::write(slow.path(), service("a", 8)).unwrap();
    assert_eq!(slow.news(true, Some(true)), NOTHING);
    assert_eq!(slow.news(true, None), NOTHING);
    assert_eq!(slow.after(999), NOTHING);
    fs::write(slow.path(), service("a", 8080)).unwrap();
    assert_eq!(slow.news(false, Some(true)), NOTHING);
    assert_eq!(slow.after(999), NOTHING);
    assert_eq!(slow.after(1), ["Service + a:8080"]);
    assert_eq!(slow.directory.next_check(), None);
}

#[test]
fn a_directory_made_anew_has_a_second_to_be_filled() {
    let mut slow = Slow::start(&service("a", 1));
    fs::remove_file(slow.path()).unwrap();
    slow.directory.made_anew(slow.now);
    slow.directory.scan(slow.now).unwrap();
    assert_eq!(slow.after(900), NOTHING);
    assert_eq!(slow.write(&service("a", 2)), ["Service + a:2"]);
}
