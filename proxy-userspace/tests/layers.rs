//! Checks the layers of the crate: which other modules, crates and words the sources of each module
//! may use.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

/// A module, the modules that it may use, and the words that its code must not contain.
struct Layer {
    name: &'static str,
    uses: &'static [&'static str],
    forbidden: &'static [&'static str],
}

const fn layer(
    name: &'static str,
    uses: &'static [&'static str],
    forbidden: &'static [&'static str],
) -> Layer {
    Layer { name, uses, forbidden }
}

/// Only `watch` uses the Kubernetes API's client and types.
const KUBE: &[&str] = &["kube::", "k8s_openapi"];

const LAYERS: &[Layer] = &[
    layer("assembly", &["config", "dataplane", "kernel"], KUBE),
    // For tests only.
    layer("captured_log", &[], KUBE),
    layer("causes", &[], KUBE),
    // `inspect` has the verbs of the command line.
    layer(
        "config",
        &["causes", "doctor", "duration", "inspect", "kernel", "mode", "model", "net", "node", "top", "yaml"],
        KUBE,
    ),
    // The model has decided everything about Kubernetes.
    layer(
        "dataplane",
        &["causes", "kernel", "mode", "model", "net", "parallel"],
        &["kube::", "k8s_openapi", "EndpointSlice", "WatchEvent", "tokio"],
    ),
    layer("duration", &[], KUBE),
    // Asks the daemon and the kernel, and judges what it got.
    layer(
        "doctor",
        &["causes", "dataplane", "health", "inspect", "kernel", "link_path", "net", "output_file", "probe"],
        KUBE,
    ),
    // Pure, as the model.
    layer("explain", &["dataplane", "mode", "model", "net"], KUBE),
    layer("health", &["dataplane", "kernel", "metrics", "model", "node"], KUBE),
    layer(
        "inspect",
        &[
            "causes",
            "dataplane",
            "explain",
            "health",
            "kernel",
            "metrics",
            "mode",
            "model",
            "sync",
            "trace",
            "yaml",
        ],
        KUBE,
    ),
    // Has only the interfaces of the kernel, not Services or modes.
    layer(
        "kernel",
        &["net", "process_group"],
        &["kube::", "k8s_openapi", "Service", "Snapshot", "kube-ipvs0"],
    ),
    // Judges what the kernel reports about others. Knows nothing of shunt's own rules.
    layer("link_path", &["kernel", "net"], KUBE),
    layer("metrics", &["dataplane", "kernel", "model"], KUBE),
    layer("mode", &[], KUBE),
    // Pure: objects in, Snapshot out.
    layer(
        "model",
        &["net", "parallel"],
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
    // Plain types, for layers that must not use each other.
    layer("net", &[], KUBE),
    layer("node", &["kernel", "model"], KUBE),
    layer("output_file", &[], KUBE),
    layer("parallel", &[], KUBE),
    layer("probe", &["kernel", "mode"], KUBE),
    // For layers that start processes and must not use each other.
    layer("process_group", &[], KUBE),
    layer("sync", &["causes", "dataplane", "health", "metrics", "model", "net", "node"], KUBE),
    // Asks the daemon and the kernel; draws on the terminal.
    layer("top", &["duration", "health", "inspect", "kernel", "mode"], KUBE),
    // Asks the sync loop, and exchanges the programs.
    layer(
        "trace",
        &["causes", "dataplane", "duration", "explain", "kernel", "model", "net", "output_file", "sync"],
        KUBE,
    ),
    // Shows what `inspect` reads.
    layer("ui", &["explain", "health", "inspect", "model", "node", "sync"], KUBE),
    layer("watch", &["captured_log", "causes", "model", "net", "node", "process_group", "yaml"], &[]),
    layer("yaml", &[], KUBE),
];

/// The modules of the command, which may use all layers.
const COMMAND: [&str; 3] = ["lib", "main", "run"];

/// Returns the path and code of each source of a module.
fn sources(path: &Path) -> Vec<(PathBuf, String)> {
    if path.is_dir() {
        let entries = fs::read_dir(path).expect("readable");
        return entries.flat_map(|entry| sources(&entry.expect("readable").path())).collect();
    }
    let text = fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    vec![(path.to_owned(), code(&text))]
}

/// Removes comments, and the tests at the end.
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

/// Returns the modules in `crate::name` and `crate::{name::…, name}`.
fn used_modules(code: &str) -> BTreeSet<String> {
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

/// Returns the items of a list up to its closing brace. Does not split nested lists.
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
fn each_layer_uses_only_allowed_layers() {
    for (module, path) in modules().filter(|(module, _)| !COMMAND.contains(&module.as_str())) {
        let layer = LAYERS.iter().find(|layer| layer.name == module);
        let layer = layer
            .unwrap_or_else(|| panic!("add the module {module} to LAYERS, with the layers that it may use"));
        for (path, code) in sources(&path) {
            let not_allowed: Vec<_> = used_modules(&code)
                .into_iter()
                .filter(|name| *name != module && !layer.uses.contains(&&**name))
                .collect();
            assert!(not_allowed.is_empty(), "{} uses {not_allowed:?}", path.display());
        }
    }
}

#[test]
fn no_layer_contains_a_forbidden_word() {
    for (module, path) in modules() {
        let forbidden =
            LAYERS.iter().find(|layer| layer.name == module).map_or(KUBE, |layer| layer.forbidden);
        for (path, code) in sources(&path) {
            for word in forbidden {
                let found = code.lines().find(|line| line.contains(word));
                assert!(found.is_none(), "{}: {word}: {}", path.display(), found.unwrap_or_default().trim());
            }
        }
    }
}

#[test]
fn names_in_lists_are_found() {
    let code =
        "use crate::{\n    kernel::{KernelError, bpf},\n    model::Dirty,\n};\nlet x = crate::sync::f();";
    assert_eq!(used_modules(code).into_iter().collect::<Vec<_>>(), ["kernel", "model", "sync"]);
}
