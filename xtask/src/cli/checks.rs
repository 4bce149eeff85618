//! The checks that documents name: steps, tests, scenarios, cases and kernels.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use xtask::workspace;

use super::test::is_step;

/// The kinds of checks: their words in documents.
const KINDS: [&str; 11] = [
    "bench",
    "test",
    "tests",
    "case",
    "cases",
    "scenario",
    "scenarios",
    "step",
    "steps",
    "kernel",
    "kernels",
];

/// The folders whose sources have tests.
const FOLDERS: [&str; 6] = [
    "proxy-common/src",
    "proxy-userspace/src",
    "proxy-userspace/tests",
    "tests/src",
    "tests/tests",
    "xtask/src",
];

/// A check as a document names it: "step `demo`".
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Check {
    /// The word of its kind, in the singular.
    pub(crate) kind: String,
    pub(crate) name: String,
}

/// Returns the checks that a text names. Code spans that are commands of cargo are none.
pub(crate) fn named(text: &str) -> Vec<Check> {
    let (mut kind, mut checks) = (String::new(), Vec::new());
    for (number, part) in text.split('`').enumerate() {
        if number % 2 == 1 && !part.starts_with("cargo ") {
            checks.push(Check { kind: kind.clone(), name: part.to_owned() });
        } else if let Some(word) = part.split_whitespace().rfind(|word| KINDS.contains(word)) {
            word.trim_end_matches('s').clone_into(&mut kind);
        }
    }
    checks
}

/// The sources in which checks are looked up.
pub(crate) struct Sources(String);

impl Sources {
    /// Reads the sources of all tests.
    pub(crate) fn read() -> Result<Self> {
        let text = FOLDERS.iter().map(|folder| read_below(&workspace::root().join(folder)));
        text.collect::<Result<String>>().map(Self)
    }

    #[cfg(test)]
    pub(crate) fn example() -> Self {
        Self("fn other() {}".to_owned())
    }

    /// Returns true if there is such a check. A kind that is not known is an error.
    pub(crate) fn have(&self, check: &Check) -> Result<bool> {
        let name = &check.name;
        Ok(match check.kind.as_str() {
            // The targets of the benchmark are compared where they are.
            "bench" => true,
            "test" => self.0.contains(&format!("fn {name}(")),
            "case" => workspace::root().join(format!("tests/cases/{name}.yaml")).is_file(),
            "scenario" => {
                let (program, name) = name.split_once(": ").context("a scenario has a program")?;
                read(&format!("tests/src/bin/{program}/main.rs"))?.contains(&format!("(\"{name}\","))
            }
            "step" => is_step(name),
            "kernel" => read("xtask/src/cli/vm/kernel.rs")?.contains(&format!("\"{name}\"")),
            other => bail!("{other:?} is no kind of check"),
        })
    }
}

fn read(path: &str) -> Result<String> {
    fs::read_to_string(workspace::root().join(path)).with_context(|| path.to_owned())
}

/// Returns the text of all sources below a folder.
fn read_below(folder: &Path) -> Result<String> {
    let mut text = String::new();
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.is_dir() {
            text += &read_below(&path)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            text += &fs::read_to_string(&path)?;
        }
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(kind: &str, name: &str) -> Check {
        Check { kind: kind.into(), name: name.into() }
    }

    #[test]
    fn checks_are_code_spans_after_the_word_of_their_kind() {
        assert_eq!(
            named("steps `a`, `b c`; scenario `daemon: top`, with `cargo xtask test`"),
            [check("step", "a"), check("step", "b c"), check("scenario", "daemon: top")]
        );
        assert_eq!(named("no check"), []);
    }

    #[test]
    fn names_that_do_not_exist_are_found() -> Result<()> {
        let sources = Sources::example();
        for (kind, name) in
            [("test", "no_test"), ("case", "no-case"), ("scenario", "daemon: none"), ("step", "none")]
        {
            assert!(!sources.have(&check(kind, name))?, "{kind}");
        }
        assert!(sources.have(&check("test", "other"))?);
        assert!(sources.have(&check("lemma", "x")).is_err());
        Ok(())
    }
}
