//! The release notes: a section of the changelog.

use anyhow::{Context as _, Result, ensure};

use super::settings::Settings;

/// Fails if the changelog does not fit a release of this version: it has no section of the version,
/// or has changes that belong to no version.
pub(crate) fn check(changelog: &str, version: &str) -> Result<()> {
    ensure!(
        section(changelog, "Unreleased").is_none(),
        "CHANGELOG.md has entries under [Unreleased], so the notes of {version} would lack them: \
         move them to the section [{version}], or raise the version in Cargo.toml and give the section its name"
    );
    section(changelog, version).map(drop).with_context(|| missing(version))
}

fn missing(version: &str) -> String {
    format!("CHANGELOG.md has no section [{version}] with text")
}

/// Returns the notes: the section of the version. Links to files of the repository lead to the
/// repository.
pub(crate) fn notes(changelog: &str, settings: &Settings, digest: &str) -> Result<String> {
    let version = &settings.version;
    let section = section(changelog, version).with_context(|| missing(version))?;
    let base = format!("]({}/blob/v{version}", settings.repository);
    let linked = ["docs", "deploy", "tests"]
        .iter()
        .fold(section, |text, folder| text.replace(&format!("]({folder}/"), &format!("{base}/{folder}/")));
    Ok(format!("# shunt {version}\n\nImage: `{}@{digest}`\n\n{linked}\n", settings.reference()))
}

/// Returns the text of a section, if it has any.
fn section(changelog: &str, name: &str) -> Option<String> {
    let start = changelog.lines().position(|line| line.starts_with(&format!("## [{name}]")))?;
    let lines: Vec<&str> =
        changelog.lines().skip(start + 1).take_while(|line| !line.starts_with("## ")).collect();
    Some(lines.join("\n").trim().to_owned()).filter(|text| !text.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_are_the_section_of_the_version() {
        let changelog = "# Changelog\n\n## [Unreleased]\n\n- new\n\n## [1.2.3] - 2026-11-25\n\n\
                         - [maps](docs/maps.md)\n\n## [1.2.2]\n\n- old\n";
        let notes = notes(changelog, &Settings::example(), "sha256:abc").unwrap();
        assert_eq!(
            notes,
            "# shunt 1.2.3\n\nImage: `registry.example/shunt:1.2.3@sha256:abc`\n\n\
             - [maps](https://git.example/shunt/blob/v1.2.3/docs/maps.md)\n"
        );
    }

    #[test]
    fn changelog_without_a_section_of_the_version_is_an_error() {
        let changelog = "## [Unreleased]\n\n## [0.1.0]\n- old";
        assert!(notes(changelog, &Settings::example(), "d").is_err());
        let error = check(changelog, "1.2.3").unwrap_err().to_string();
        assert_eq!(error, "CHANGELOG.md has no section [1.2.3] with text");
        assert!(check(changelog, "0.1.0").is_ok());
    }

    #[test]
    fn unreleased_changes_are_an_error_that_says_what_to_do() {
        let changelog = "## [Unreleased]\n\n### Added\n\n- new\n\n## [1.2.3]\n\n- old\n";
        let error = check(changelog, "1.2.3").unwrap_err().to_string();
        assert!(error.contains("under [Unreleased]") && error.contains("[1.2.3]"), "{error}");
        assert!(check(&changelog.replace("### Added\n\n- new\n", ""), "1.2.3").is_ok());
    }

    #[test]
    fn changelog_of_the_repository_has_the_version_of_cargo_toml() {
        let changelog = std::fs::read_to_string(xtask::workspace::root().join("CHANGELOG.md")).unwrap();
        let version = Settings::read().unwrap().version;
        assert!(notes(&changelog, &Settings { version, ..Settings::example() }, "d").is_ok());
    }
}
