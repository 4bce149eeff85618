//! The release notes: a section of the changelog.

use anyhow::{Context as _, Result};

use super::settings::Settings;

/// Returns the notes: the section of the version, or what is unreleased. Links to files of the
/// repository lead to the repository.
pub(crate) fn notes(changelog: &str, settings: &Settings, digest: &str) -> Result<String> {
    let version = &settings.version;
    let section = [version.as_str(), "Unreleased"].iter().find_map(|name| section(changelog, name));
    let section = section.with_context(|| {
        format!("CHANGELOG.md has neither a section [{version}] with text nor one that is [Unreleased]")
    })?;
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
    fn unreleased_changes_are_the_notes_of_a_version_without_a_section() {
        let notes = notes("## [Unreleased]\n\n- new\n", &Settings::example(), "d").unwrap();
        assert!(notes.ends_with("- new\n"), "{notes}");
    }

    #[test]
    fn changelog_without_a_section_is_an_error() {
        assert!(notes("## [Unreleased]\n\n## [0.1.0]\n- old", &Settings::example(), "d").is_err());
    }
}
