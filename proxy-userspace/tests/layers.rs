//! The crate's layers, held to by what their sources name: each knows few others, and few reach
//! outside.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

/// A module of the crate, the others it may name, and words that no line of its code may hold.
struct Layer {
    name: &'static str,
    knows: &'static [&'static str],
    without: &'static [&'static str],
}

const fn layer(
    name: &'static str,
    knows: &'static [&'static str],
    without: &'static [&'static str],
) -> Layer {
    Layer { name, knows, without }
}

/// The API's client and its types end in watch.
const KUBE: &[&str] = &["kube::", "k8s_openapi"];

const LAYERS: &[Layer] = &[
    layer("assembly", &["config", "dataplane", "kernel"], KUBE),
    layer("causes", &[], KUBE),
    layer("config", &["causes", "kernel", "mode", "model", "node"], KUBE),
    // Everything about Kubernetes is decided already.
    layer(
        "dataplane",
        &["kernel", "mode", "model"],
        &["kube::", "k8s_openapi", "EndpointSlice", "WatchEvent", "tokio"],
    ),
    layer("health", &["kernel", "metrics", "model", "node"], KUBE),
    // Knows the kernel's interfaces only, not Services or modes.
    layer("kernel", &["net"], &["kube::", "k8s_openapi", "Service", "Snapshot", "kube-ipvs0"]),
    layer("metrics", &["dataplane", "kernel", "model"], KUBE),
    layer("mode", &[], KUBE),
    // Pure: objects in, Snapshot out.
    layer(
        "model",
        &["net"],
        &[
            "kube::",
            "k8s_openapi",
            "std::fs",
            "std::io",
            "std::env",
            "std::process",
            "std::thread",
            "tokio",
            "Instant",
            "SystemTime",
        ],
    ),
    // Plain types, for layers that must not know each other.
    layer("net", &[], KUBE),
    layer("node", &["kernel", "model"], KUBE),
    layer("probe", &["kernel", "mode"], KUBE),
    layer("sync", &["causes", "dataplane", "health", "metrics", "model", "node"], KUBE),
    layer("watch", &["causes", "model", "node"], &[]),
];

/// The command puts the layers together.
const COMMAND: [&str; 3] = ["lib", "main", "run"];

/// Every source below a module, with its path.
fn sources(path: &Path) -> Vec<(PathBuf, String)> {
    if path.is_dir() {
        let entries = fs::read_dir(path).expect("readable");
        return entries.flat_map(|entry| sources(&entry.expect("readable").path())).collect();
    }
    let text = fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    vec![(path.to_owned(), code(&text))]
}

/// The text without comments, and without the tests at its end.
fn code(text: &str) -> String {
    let program = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    program.lines().map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join("\n")
}

fn modules() -> impl Iterator<Item = (String, PathBuf)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    fs::read_dir(root).expect("readable").map(|entry| {
        let path = entry.expect("readable").path();
        (path.file_stem().expect("a name").to_string_lossy().into_owned(), path)
    })
}

/// The modules that `crate::name` and `crate::{name::…, name}` name.
fn named(code: &str) -> BTreeSet<String> {
    let head = |text: &str| -> String {
        text.trim_start().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
    };
    code.split("crate::")
        .skip(1)
        .flat_map(|rest| match rest.strip_prefix('{') {
            Some(list) => top_level(list).into_iter().map(head).collect(),
            None => vec![head(rest)],
        })
        .filter(|name| !name.is_empty())
        .collect()
}

/// The items of a list in braces, up to the brace that closes it, without looking into those of its
/// items.
fn top_level(list: &str) -> Vec<&str> {
    let (mut items, mut start, mut depth) = (Vec::new(), 0, 0);
    for (at, c) in list.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth > 0 => depth -= 1,
            ',' if depth > 0 => {}
            ',' | '}' => {
                items.push(&list[start..at]);
                start = at + 1;
                if c == '}' {
                    break;
                }
            }
            _ => {}
        }
    }
    items
}

#[test]
fn each_layer_names_only_the_layers_it_may_know() {
    for (module, path) in modules().filter(|(module, _)| !COMMAND.contains(&module.as_str())) {
        let layer = LAYERS.iter().find(|layer| layer.name == module);
        let layer = layer.unwrap_or_else(|| panic!("{module}: say above what this layer may know"));
        for (path, code) in sources(&path) {
            let unknown: Vec<_> = named(&code)
                .into_iter()
                .filter(|name| *name != module && !layer.knows.contains(&&**name))
                .collect();
            assert!(unknown.is_empty(), "{} names {unknown:?}", path.display());
        }
    }
}

#[test]
fn no_layer_uses_what_it_shall_do_without() {
    for (module, path) in modules() {
        let without = LAYERS.iter().find(|layer| layer.name == module).map_or(KUBE, |layer| layer.without);
        for (path, code) in sources(&path) {
            for word in without {
                let found = code.lines().find(|line| line.contains(word));
                assert!(found.is_none(), "{}: {word}: {}", path.display(), found.unwrap_or_default().trim());
            }
        }
    }
}

#[test]
fn names_are_found_in_lists_too() {
    let code =
        "use crate::{\n    kernel::{KernelError, bpf},\n    model::Dirty,\n};\nlet x = crate::sync::f();";
    assert_eq!(named(code).into_iter().collect::<Vec<_>>(), ["kernel", "model", "sync"]);
}
