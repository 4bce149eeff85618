//! Checks that the files and folders of the repository that pages name exist.

use xtask::workspace;

use super::Page;

/// The folders whose paths are checked.
const FOLDERS: [&str; 7] =
    ["proxy-common/", "proxy-ebpf/", "proxy-userspace/", "tests/", "xtask/", "deploy/", "docs/"];

/// Returns the number of paths in code spans, and a line for each that does not exist. The
/// changelog tells of the past, so it is left out.
pub(super) fn check(pages: &[Page]) -> (usize, Vec<String>) {
    let (mut count, mut missing) = (0, Vec::new());
    for page in pages.iter().filter(|page| page.path != "CHANGELOG.md") {
        for path in paths(&page.text) {
            count += 1;
            if !workspace::root().join(path).exists() {
                missing.push(format!("  {}: there is no {path} in the repository", page.path));
            }
        }
    }
    (count, missing)
}

/// Returns the code spans that are paths of the repository.
fn paths(text: &str) -> impl Iterator<Item = &str> {
    text.lines().flat_map(|line| line.split('`').skip(1).step_by(2)).filter(|span| {
        FOLDERS.iter().any(|folder| span.starts_with(folder)) && !span.contains(['*', ' ', '{', '<'])
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_code_spans_that_are_paths_count() {
        let text = "See `proxy-common/src` and `cargo test`, not docs/x or `tests/*.rs`.";
        assert_eq!(paths(text).collect::<Vec<_>>(), ["proxy-common/src"]);
    }

    #[test]
    fn a_path_that_does_not_exist_is_named() {
        let page =
            Page { path: "docs/a.md".into(), text: "`xtask/src/main.rs`, `xtask/src/nothing.rs`".into() };
        let (count, missing) = check(&[page]);
        assert_eq!(count, 2);
        assert_eq!(missing, ["  docs/a.md: there is no xtask/src/nothing.rs in the repository"]);
    }
}
