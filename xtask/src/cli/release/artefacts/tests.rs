//! Makes a whole release of small inputs.

use std::fs;
use std::path::Path;

use clap::ValueEnum as _;
use xtask::workspace;

use super::*;
use crate::cli::release::linked::Library;
use crate::cli::release::lock::Package;
use crate::cli::release::{inputs, rootfs};

/// Writes a package with every file that the image wants, and returns the inputs of a release.
fn inputs(folder: &Path, targets: &[Target]) -> Inputs {
    let part = |target: &Target| {
        let folder = folder.join(target.name());
        for path in rootfs::wanted(*target) {
            let path = if path.ends_with('/') { format!("{path}one") } else { path };
            write(&folder.join(&path), &path);
        }
        write(&folder.join("usr/share/ca-certificates/mozilla/one.crt"), "certificate");
        write(&folder.join("usr/share/doc/all/copyright"), "License: GPL-2+\n");
        let package = Package {
            name: "all".into(),
            version: "1:2.0+3".into(),
            source: "all".into(),
            archive: "debian".into(),
            path: "pool/all.deb".into(),
            sha256: "ab".into(),
        };
        let unpacked = Unpacked { package, folder, control: "Package: all\n".into() };
        let part =
            Crate { name: "serde".into(), version: "1.0.0".into(), license: "MIT".into(), checksum: None };
        let library = Library { name: "glibc".into(), version: "2.41".into(), license: "LGPL-2.1-or-later" };
        let linked = Linked { compiler: "rustc 1.95.0".into(), libraries: vec![library] };
        Part {
            target: *target,
            shunt: b"shunt".to_vec(),
            crates: vec![part],
            linked,
            packages: vec![unpacked],
        }
    };
    let settings = Settings::read().unwrap();
    Inputs {
        source: Source::example(),
        lock: Lock { release: "trixie".into(), snapshot: "s".into(), packages: [].into() },
        deploy: inputs::folder(&workspace::root().join("deploy")).unwrap(),
        changelog: format!("## [{}]\n\n- something\n", settings.version),
        pins: vec![("Cargo.lock", "cd".into())],
        parts: targets.iter().map(part).collect(),
        settings,
    }
}

fn write(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

fn made(targets: &[Target]) -> Tree {
    let folder = tempfile::tempdir().unwrap();
    make(&inputs(folder.path(), targets)).unwrap().files
}

fn text(files: &Tree, path: &str) -> String {
    let Some(Node::File { bytes, .. }) = files.get(path) else { panic!("the release has no {path}") };
    String::from_utf8(bytes.clone()).unwrap()
}

#[test]
fn release_of_the_same_inputs_in_another_folder_has_the_same_bytes() {
    let targets = Target::value_variants();
    assert!(made(targets) == made(targets));
}

#[test]
fn checksums_are_of_all_other_files() {
    let files = made(Target::value_variants());
    let listed = text(&files, CHECKSUMS);
    let names: Vec<&str> = listed.lines().filter_map(|line| line.split("  ").nth(1)).collect();
    let is_file = |node: &Node| matches!(node, Node::File { .. });
    let all = files.iter().filter(|(path, node)| is_file(node) && *path != CHECKSUMS);
    assert_eq!(names, all.map(|(path, _)| path).collect::<Vec<_>>());
    for name in ["shunt-amd64", "shunt-arm64", "kubernetes/daemonset.yaml", "RELEASE_NOTES.md"] {
        assert!(names.contains(&name), "{listed}");
    }
}

#[test]
fn release_has_the_manifests_of_direct_server_return_unchanged() {
    let files = made(&[Target::Amd64]);
    for name in ["components/dsr/kustomization.yaml", "components/dsr/rbac.yaml"] {
        let written = fs::read_to_string(workspace::root().join("deploy").join(name)).unwrap();
        assert_eq!(text(&files, name), written, "{name}");
    }
}

/// The setting in Cargo.toml is the only place of the name: everything in `deploy` must follow it.
#[test]
fn everything_in_deploy_has_the_image_and_the_repository_of_cargo_toml() {
    let files = made(&[Target::Amd64]);
    let settings = Settings::read().unwrap();
    let daemon_set = text(&files, "kubernetes/daemonset.yaml");
    assert!(daemon_set.contains(&format!("image: {}@sha256:", settings.reference())), "{daemon_set}");
    for (path, node) in inputs::folder(&workspace::root().join("deploy")).unwrap().iter() {
        let Node::File { bytes, .. } = node else { continue };
        let text = String::from_utf8_lossy(bytes);
        let links = text.lines().filter_map(|line| line.split("runbook_url: ").nth(1));
        for link in links {
            assert!(link.starts_with(&settings.repository), "deploy/{path}: {link}");
        }
        if path.ends_with("kustomization.yaml") {
            // kustomize ignores an image that no manifest has.
            let overlay: Value = serde_yaml_ng::from_slice(bytes).unwrap();
            let images = overlay["images"].as_array().into_iter().flatten();
            images.for_each(|image| assert_eq!(image["name"], settings.image.as_str(), "deploy/{path}"));
        }
    }
}

#[test]
fn bill_of_materials_has_the_crates_and_the_packages() {
    let files = made(&[Target::Arm64]);
    let version = Settings::read().unwrap().version;
    let bill = text(&files, &format!("shunt-{version}-arm64.spdx.json"));
    let bill: Value = serde_json::from_str(&bill).unwrap();
    let packages = bill["packages"].as_array().unwrap();
    let named = |name: &str| packages.iter().find(|package| package["name"] == name).unwrap();
    assert_eq!(named("serde")["licenseDeclared"], "MIT");
    assert_eq!(named("all")["licenseComments"], "Debian's copyright file names: GPL-2+");
    assert_eq!(named("glibc")["versionInfo"], "2.41");
    let identifiers: Vec<&Value> = packages.iter().map(|package| &package["SPDXID"]).collect();
    for relation in bill["relationships"].as_array().unwrap() {
        assert!(identifiers.contains(&&relation["relatedSpdxElement"]), "{relation}");
    }
}
