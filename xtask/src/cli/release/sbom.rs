//! The bill of materials of an image (SPDX 2.3): shunt with the crates that are in it, and Debian's
//! packages.

use std::collections::BTreeSet;
use std::fs;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use super::crates::Crate;
use super::digest;
use super::linked::Library;
use super::packages::Unpacked;
use super::settings::Settings;
use super::source::Source;
use super::target::Target;

const UNKNOWN: &str = "NOASSERTION";
const IMAGE: &str = "SPDXRef-image";
const PROGRAM: &str = "SPDXRef-shunt";

/// What the image of an architecture is made of.
pub(crate) struct Materials<'a> {
    /// The architecture.
    pub(crate) target: Target,
    /// The binary.
    pub(crate) shunt: &'a [u8],
    /// The crates in the binary.
    pub(crate) crates: &'a [Crate],
    /// The libraries that are linked into it beside them.
    pub(crate) libraries: &'a [Library],
    /// The packages beside it.
    pub(crate) packages: &'a [Unpacked],
    /// The release of Debian.
    pub(crate) release: &'a str,
}

/// Returns the document.
pub(crate) fn document(materials: &Materials<'_>, settings: &Settings, source: &Source) -> Result<Value> {
    let (version, target) = (&settings.version, materials.target.name());
    let mut packages = vec![image(materials, settings), program(materials, settings, source)];
    let mut relations =
        vec![relation("SPDXRef-DOCUMENT", "DESCRIBES", IMAGE), relation(IMAGE, "CONTAINS", PROGRAM)];
    for part in materials.crates {
        let package = of_crate(part);
        relations.push(relation(PROGRAM, "DEPENDS_ON", id_of(&package)));
        packages.push(package);
    }
    for part in materials.libraries {
        let package = of_library(part);
        relations.push(relation(PROGRAM, "STATIC_LINK", id_of(&package)));
        packages.push(package);
    }
    for part in materials.packages {
        let package = of_debian(part, target, materials.release)?;
        relations.push(relation(IMAGE, "CONTAINS", id_of(&package)));
        packages.push(package);
    }
    Ok(json!({
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": format!("shunt-{version}-{target}"),
        // It must be unique, so it depends on the binary.
        "documentNamespace":
            format!("{}/spdx/shunt-{version}-{target}-{}", settings.repository, digest::sha256(materials.shunt)),
        "creationInfo": {"created": source.date, "creators": ["Tool: cargo-xtask-release"]},
        "packages": packages,
        "relationships": relations,
    }))
}

fn image(materials: &Materials<'_>, settings: &Settings) -> Value {
    json!({
        "SPDXID": IMAGE,
        "name": settings.image,
        "versionInfo": settings.version,
        "primaryPackagePurpose": "CONTAINER",
        "downloadLocation": UNKNOWN,
        "filesAnalyzed": false,
        "licenseConcluded": UNKNOWN,
        "licenseDeclared": UNKNOWN,
        "copyrightText": UNKNOWN,
        "comment": format!("The image of linux/{}.", materials.target.name()),
    })
}

fn program(materials: &Materials<'_>, settings: &Settings, source: &Source) -> Value {
    json!({
        "SPDXID": PROGRAM,
        "name": "shunt",
        "versionInfo": settings.version,
        "primaryPackagePurpose": "APPLICATION",
        "packageFileName": format!("shunt-{}", materials.target.name()),
        "downloadLocation": format!("git+{}.git@{}", settings.repository, source.commit),
        "filesAnalyzed": false,
        "licenseConcluded": UNKNOWN,
        "licenseDeclared": settings.license,
        "copyrightText": UNKNOWN,
        "checksums": [checksum(&digest::sha256(materials.shunt))],
    })
}

fn of_crate(part: &Crate) -> Value {
    let id = id("crate", &[&part.name, &part.version]);
    let mut package = library(&id, &part.name, &part.version, &expression(&part.license));
    // Crates of the workspace are not in a registry.
    if let Some(sha256) = &part.checksum {
        package["checksums"] = json!([checksum(sha256)]);
        package["externalRefs"] =
            json!([purl(&format!("pkg:cargo/{}@{}", part.name, encode(&part.version)))]);
    }
    package
}

fn of_library(part: &Library) -> Value {
    library(&id("library", &[&part.name]), &part.name, &part.version, part.license)
}

/// Describes something that is compiled or linked into the binary.
fn library(id: &str, name: &str, version: &str, license: &str) -> Value {
    json!({
        "SPDXID": id,
        "name": name,
        "versionInfo": version,
        "primaryPackagePurpose": "LIBRARY",
        "downloadLocation": UNKNOWN,
        "filesAnalyzed": false,
        "licenseConcluded": UNKNOWN,
        "licenseDeclared": license,
        "copyrightText": UNKNOWN,
    })
}

fn of_debian(part: &Unpacked, target: &str, release: &str) -> Result<Value> {
    let package = &part.package;
    let path = part.folder.join(format!("usr/share/doc/{}/copyright", package.name));
    let copyright = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let names = license_names(&String::from_utf8_lossy(&copyright));
    let mut value = json!({
        "SPDXID": id("debian", &[&package.name]),
        "name": package.name,
        "versionInfo": package.version,
        "supplier": "Organization: Debian",
        "sourceInfo": format!("built from the source package {}", package.source),
        "downloadLocation": UNKNOWN,
        "filesAnalyzed": false,
        "licenseConcluded": UNKNOWN,
        "licenseDeclared": UNKNOWN,
        "copyrightText": UNKNOWN,
        "checksums": [checksum(&package.sha256)],
        "externalRefs": [purl(&debian_purl(&package.name, &package.version, target, release))],
    });
    if !names.is_empty() {
        value["licenseComments"] = json!(format!("Debian's copyright file names: {}", names.join(", ")));
    }
    Ok(value)
}

/// Returns the package URL of a Debian package.
pub(crate) fn debian_purl(name: &str, version: &str, target: &str, release: &str) -> String {
    format!("pkg:deb/debian/{}@{}?arch={target}&distro={release}", encode(name), encode(version))
}

/// Returns Debian's names of licenses in a machine-readable copyright file. They are no SPDX
/// expressions.
fn license_names(copyright: &str) -> Vec<String> {
    let names = copyright.lines().filter_map(|line| line.strip_prefix("License:")).map(str::trim);
    let names: BTreeSet<&str> = names.filter(|name| !name.is_empty()).collect();
    names.into_iter().map(str::to_owned).collect()
}

/// Returns a license of Cargo.toml as an SPDX expression. Old crates separate alternatives by
/// slashes.
fn expression(license: &str) -> String {
    if license.is_empty() {
        return UNKNOWN.to_owned();
    }
    license.split('/').map(str::trim).collect::<Vec<_>>().join(" OR ")
}

/// Returns an identifier of the document, which has only letters, digits, `.` and `-`.
fn id(kind: &str, parts: &[&str]) -> String {
    let text = format!("SPDXRef-{kind}-{}", parts.join("-"));
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || c == '.' || c == '-';
    text.chars().map(|c| if is_allowed(c) { c } else { '-' }).collect()
}

fn id_of(package: &Value) -> &str {
    package["SPDXID"].as_str().unwrap_or_default()
}

/// Escapes the characters that have a meaning in package URLs.
fn encode(text: &str) -> String {
    text.replace('%', "%25").replace('+', "%2B").replace(':', "%3A").replace('~', "%7E")
}

fn relation(from: &str, kind: &str, to: &str) -> Value {
    json!({"spdxElementId": from, "relationshipType": kind, "relatedSpdxElement": to})
}

fn checksum(sha256: &str) -> Value {
    json!({"algorithm": "SHA256", "checksumValue": sha256})
}

fn purl(locator: &str) -> Value {
    json!({
        "referenceCategory": "PACKAGE-MANAGER",
        "referenceType": "purl",
        "referenceLocator": locator,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn licenses_are_expressions() {
        assert_eq!(expression("MIT/Apache-2.0"), "MIT OR Apache-2.0");
        assert_eq!(expression("Apache-2.0 / MIT"), "Apache-2.0 OR MIT");
        assert_eq!(
            expression("Apache-2.0 WITH LLVM-exception OR MIT"),
            "Apache-2.0 WITH LLVM-exception OR MIT"
        );
        assert_eq!(expression(""), "NOASSERTION");
    }

    #[test]
    fn names_of_licenses_come_from_the_copyright_file() {
        let text = "Files: *\nLicense: GPL-2+\n text\n\nLicense: LGPL-2.1+\n\nLicense: GPL-2+\n";
        assert_eq!(license_names(text), ["GPL-2+", "LGPL-2.1+"]);
        assert!(license_names("This package was debianized by ...").is_empty());
    }

    #[test]
    fn package_urls_escape_versions() {
        let url = debian_purl("libgmp10", "2:6.3.0+dfsg-3", "amd64", "trixie");
        assert_eq!(url, "pkg:deb/debian/libgmp10@2%3A6.3.0%2Bdfsg-3?arch=amd64&distro=trixie");
    }

    #[test]
    fn identifiers_of_two_versions_of_a_crate_differ() {
        let of = |version| id("crate", &["serde_json", version]);
        assert_eq!(of("1.0.0+a"), "SPDXRef-crate-serde-json-1.0.0-a");
        assert_ne!(of("1.0.0"), of("2.0.0"));
    }
}
