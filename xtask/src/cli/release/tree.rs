//! A file tree in memory, and the archive of it. The same tree gives the same bytes: entries are
//! sorted, belong to root, and have the same time.

use std::collections::BTreeMap;
use std::io::Write as _;

use anyhow::{Context as _, Result};
use flate2::{Compression, GzBuilder};
use tar::{Builder, EntryType, Header};

/// The modification time of all entries, in seconds since 1970. Two releases with the same packages
/// then have the same layer.
const TIME: u64 = 0;

/// What is at a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Node {
    /// A folder with its mode.
    Folder(u32),
    /// A file.
    File {
        /// Its mode.
        mode: u32,
        /// Its content.
        bytes: Vec<u8>,
    },
    /// A symbolic link with its target.
    Link(String),
}

/// Nodes by their paths, which are relative to the root. Folders come before what is in them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Tree(BTreeMap<String, Node>);

impl Tree {
    /// Inserts a node, and the folders that it is in.
    pub(crate) fn insert(&mut self, path: &str, node: Node) {
        for (end, _) in path.match_indices('/') {
            self.0.entry(path[..end].to_owned()).or_insert(Node::Folder(0o755));
        }
        self.0.insert(path.to_owned(), node);
    }

    /// Inserts a file that everyone may read.
    pub(crate) fn file(&mut self, path: &str, bytes: impl Into<Vec<u8>>) {
        self.insert(path, Node::File { mode: 0o644, bytes: bytes.into() });
    }

    /// Inserts a program.
    pub(crate) fn program(&mut self, path: &str, bytes: Vec<u8>) {
        self.insert(path, Node::File { mode: 0o755, bytes });
    }

    /// Inserts a symbolic link.
    pub(crate) fn link(&mut self, path: &str, target: &str) {
        self.insert(path, Node::Link(target.to_owned()));
    }

    /// Returns the node at a path.
    pub(crate) fn get(&self, path: &str) -> Option<&Node> {
        self.0.get(path)
    }

    /// Returns all nodes, sorted by their paths.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &Node)> {
        self.0.iter().map(|(path, node)| (path.as_str(), node))
    }

    /// Returns the archive (tar).
    pub(crate) fn tar(&self) -> Result<Vec<u8>> {
        let mut archive = Builder::new(Vec::new());
        for (path, node) in &self.0 {
            append(&mut archive, path, node).with_context(|| format!("cannot archive {path}"))?;
        }
        archive.into_inner().context("cannot write an archive")
    }
}

fn append(archive: &mut Builder<Vec<u8>>, path: &str, node: &Node) -> std::io::Result<()> {
    let mut header = Header::new_gnu();
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(TIME);
    match node {
        Node::Folder(mode) => {
            header.set_entry_type(EntryType::Directory);
            header.set_mode(*mode);
            header.set_size(0);
            archive.append_data(&mut header, format!("{path}/"), std::io::empty())
        }
        Node::File { mode, bytes } => {
            header.set_mode(*mode);
            header.set_size(bytes.len() as u64);
            archive.append_data(&mut header, path, bytes.as_slice())
        }
        Node::Link(target) => {
            header.set_entry_type(EntryType::Symlink);
            header.set_mode(0o777);
            header.set_size(0);
            archive.append_link(&mut header, path, target)
        }
    }
}

/// Compresses bytes. The header has no time and no name, so the same bytes give the same result.
pub(crate) fn gzip(bytes: &[u8]) -> Result<Vec<u8>> {
    let mut encoder = GzBuilder::new().write(Vec::new(), Compression::best());
    encoder.write_all(bytes).and_then(|()| encoder.finish()).context("cannot compress")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(order: [&str; 2]) -> Tree {
        let mut tree = Tree::default();
        for path in order {
            tree.file(path, path);
        }
        tree.link("usr/bin/sh", "busybox");
        tree
    }

    #[test]
    fn archive_does_not_depend_on_the_order_of_insertion() {
        let (one, other) = (tree(["etc/passwd", "usr/bin/nft"]), tree(["usr/bin/nft", "etc/passwd"]));
        assert_eq!(one.tar().unwrap(), other.tar().unwrap());
        assert_eq!(gzip(&one.tar().unwrap()).unwrap(), gzip(&other.tar().unwrap()).unwrap());
    }

    #[test]
    fn entries_belong_to_root_and_folders_come_first() {
        let bytes = tree(["etc/passwd", "usr/bin/nft"]).tar().unwrap();
        let mut archive = tar::Archive::new(bytes.as_slice());
        let entries: Vec<_> = archive.entries().unwrap().map(Result::unwrap).collect();
        let paths: Vec<String> = entries.iter().map(|e| e.path().unwrap().display().to_string()).collect();
        assert_eq!(paths, ["etc/", "etc/passwd", "usr/", "usr/bin/", "usr/bin/nft", "usr/bin/sh"]);
        for entry in &entries {
            let header = entry.header();
            assert_eq!((header.uid().unwrap(), header.gid().unwrap(), header.mtime().unwrap()), (0, 0, 0));
        }
    }
}
