//! The provenance of a release: an in-toto statement with the SLSA predicate, without a signature.
//! It has no time and nothing else of the machine but its compilers, so that it can be made again.

use serde_json::{Value, json};

use super::linked::Linked;
use super::lock::Lock;
use super::sbom;
use super::settings::Settings;
use super::source::Source;
use super::target::Target;

/// What the release was made of and with.
pub(crate) struct Build<'a> {
    /// The settings.
    pub(crate) settings: &'a Settings,
    /// The commit.
    pub(crate) source: &'a Source,
    /// The architectures, with their compilers and what those link.
    pub(crate) targets: &'a [(Target, Linked)],
    /// Debian's packages.
    pub(crate) lock: &'a Lock,
    /// Files that pin dependencies, with their digests.
    pub(crate) pins: &'a [(&'static str, String)],
}

/// Returns the statement about files, each with its digest.
pub(crate) fn statement(build: &Build<'_>, files: &[(String, String)]) -> Value {
    let subject = files.iter().map(|(name, sha256)| json!({"name": name, "digest": {"sha256": sha256}}));
    let repository = &build.settings.repository;
    json!({
        "_type": "https://in-toto.io/Statement/v1",
        "subject": subject.collect::<Vec<_>>(),
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": format!("{repository}/blob/main/docs/release.md#provenance"),
                "externalParameters": {
                    "version": build.settings.version,
                    "targets": build.targets.iter().map(|(target, _)| target.name()).collect::<Vec<_>>(),
                    "uncommittedChanges": build.source.is_changed,
                },
                "internalParameters": {"toolchains": toolchains(build)},
                "resolvedDependencies": dependencies(build),
            },
            "runDetails": {"builder": {"id": format!("{repository}/blob/{}/xtask", build.source.commit)}},
        },
    })
}

fn toolchains(build: &Build<'_>) -> Value {
    let toolchains = build.targets.iter().map(|(target, linked)| {
        let libraries =
            linked.libraries.iter().map(|library| format!("{} {}", library.name, library.version));
        let libraries: Vec<String> = libraries.collect();
        (target.name().to_owned(), json!({"compiler": linked.compiler, "libraries": libraries}))
    });
    Value::Object(toolchains.collect())
}

fn dependencies(build: &Build<'_>) -> Vec<Value> {
    let Build { settings, source, lock, .. } = build;
    let commit = json!({
        "uri": format!("git+{}@{}", settings.repository, source.commit),
        "digest": {"gitCommit": source.commit},
    });
    let pins = build.pins.iter().map(|(name, sha256)| json!({"name": name, "digest": {"sha256": sha256}}));
    let packages = build.targets.iter().flat_map(|(target, _)| {
        let packages = lock.packages.get(target.name()).into_iter().flatten();
        packages.map(|package| {
            let uri = sbom::debian_purl(&package.name, &package.version, target.name(), &lock.release);
            json!({"uri": uri, "digest": {"sha256": package.sha256}})
        })
    });
    [commit].into_iter().chain(pins).chain(packages).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statement_names_the_files_the_commit_and_what_pins_dependencies() {
        let lock = Lock { release: "trixie".into(), snapshot: "s".into(), packages: [].into() };
        let (settings, source) = (Settings::example(), Source::example());
        let build = Build {
            settings: &settings,
            source: &source,
            targets: &[(Target::Amd64, Linked { compiler: "rustc 1.95.0".into(), libraries: vec![] })],
            lock: &lock,
            pins: &[("Cargo.lock", "ab".into())],
        };
        let statement = statement(&build, &[("shunt-amd64".into(), "cd".into())]);
        assert_eq!(statement["subject"][0]["digest"]["sha256"], "cd");
        let made_of = &statement["predicate"]["buildDefinition"]["resolvedDependencies"];
        assert_eq!(made_of[0]["digest"]["gitCommit"], source.commit.as_str());
        let toolchains = &statement["predicate"]["buildDefinition"]["internalParameters"]["toolchains"];
        assert_eq!(toolchains["amd64"]["compiler"], "rustc 1.95.0");
        assert_eq!(made_of[1], json!({"name": "Cargo.lock", "digest": {"sha256": "ab"}}));
    }
}
