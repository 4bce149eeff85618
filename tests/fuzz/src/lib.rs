//! The fuzz targets: one for each parser of bytes from outside.
//!
//! A target takes any bytes. It fails if a parser panics, or if a property of its result does not
//! hold. `cargo xtask fuzz` runs the targets with coverage, and `tests/corpora.rs` runs them on the
//! corpora.

mod config;
mod frames;
mod http;
mod kubeconfig;
mod manifests;
mod netlink;
mod objects;
mod rulesets;
mod scratch;

use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// A fuzz target.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// The name, which is also the name of its folder below `corpus`.
    pub name: &'static str,
    /// Parses an input, and checks the result.
    pub run: fn(&[u8]),
}

/// All targets.
pub const TARGETS: [Target; 9] = [
    Target { name: "frames", run: frames::run },
    Target { name: "netlink", run: netlink::run },
    Target { name: "objects", run: objects::run },
    Target { name: "protobuf", run: objects::run_protobuf },
    Target { name: "manifests", run: manifests::run },
    Target { name: "kubeconfig", run: kubeconfig::run },
    Target { name: "http", run: http::run },
    Target { name: "config", run: config::run },
    Target { name: "rulesets", run: rulesets::run },
];

impl Target {
    /// Returns the target with this name.
    pub fn named(name: &str) -> Option<Self> {
        TARGETS.into_iter().find(|target| target.name == name)
    }

    /// Reads the corpus, sorted by path.
    pub fn corpus(&self) -> io::Result<Vec<(PathBuf, Vec<u8>)>> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(self.name);
        let paths = fs::read_dir(folder)?.map(|entry| entry.map(|entry| entry.path()));
        let mut paths = paths.collect::<io::Result<Vec<_>>>()?;
        paths.sort();
        paths.into_iter().map(|path| fs::read(&path).map(|bytes| (path, bytes))).collect()
    }
}
