//! `cargo xtask docs`: builds the pages as a book, and checks their links, paths and commands.

mod commands;
mod links;
mod pages;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use xtask::run::Run;
use xtask::{search, workspace};

use super::progress::Progress;
use super::steps;

/// The release of mdBook that is built, if none in PATH has the same major and minor version.
const MDBOOK: &str = "0.5.4";
const INSTALL: Duration = Duration::from_mins(15);

/// Pages outside `docs`, with the license that they link.
const OTHERS: [&str; 9] = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "CODE_OF_CONDUCT.md",
    "LICENSE",
    "SECURITY.md",
    "SPECIFICATION.md",
    "deploy/README.md",
    "tests/README.md",
];

/// The folders of pages.
const FOLDERS: [&str; 2] = ["docs", "docs/guides"];

/// The figures of the benchmark with their curves, and pictures.
const PICTURES: [&str; 3] = ["docs/curves", "docs/dashboards", "docs/images"];

/// A page: its path in the repository, and its text.
struct Page {
    path: String,
    text: String,
}

/// Builds the book into `target/book`, then checks it. Returns an error that lists everything that
/// is wrong.
pub(crate) fn run() -> Result<()> {
    let pages = read_pages()?;
    let book = build(&pages)?;
    let (links, mut problems) = links::check(&book)?;
    let (commands, wrong) = pages::check_commands(&pages);
    let (paths, missing) = pages::check_paths(&pages);
    problems.extend([wrong, missing, commands::check(&pages)?].concat());
    ensure!(problems.is_empty(), "the documents are wrong:\n{}", problems.join("\n"));
    println!("{} pages: {links} links, {commands} commands and {paths} paths are right", pages.len());
    println!("{}", book.join("index.html").display());
    Ok(())
}

/// Reads the pages of the folders and the other pages.
fn read_pages() -> Result<Vec<Page>> {
    let mut paths = Vec::from(OTHERS.map(String::from));
    for folder in FOLDERS {
        let entries = workspace::root().join(folder);
        let entries = fs::read_dir(&entries).with_context(|| format!("cannot read {}", entries.display()))?;
        let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
        let is_page = |name: &String| Path::new(name).extension().is_some_and(|extension| extension == "md");
        paths.extend(names.filter(is_page).map(|name| format!("{folder}/{name}")));
    }
    paths.sort();
    let read = |path: String| {
        let file = workspace::root().join(&path);
        let text = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        Ok(Page { path, text })
    };
    paths.into_iter().map(read).collect()
}

/// Builds the book and returns its folder. mdBook copies every file beside the pages, so the pages
/// are copied first.
fn build(pages: &[Page]) -> Result<PathBuf> {
    let (source, book) = (workspace::target().join("book-source"), workspace::target().join("book"));
    for folder in [&source, &book] {
        if folder.exists() {
            fs::remove_dir_all(folder).with_context(|| format!("cannot remove {}", folder.display()))?;
        }
    }
    for page in pages {
        let (path, text) = match &*page.path {
            "docs/SUMMARY.md" => (source.join("SUMMARY.md"), from_root(&page.text)),
            path => (source.join(path), page.text.clone()),
        };
        let folder = path.parent().unwrap_or(&source);
        fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    for folder in PICTURES {
        for path in fs::read_dir(workspace::root().join(folder)).into_iter().flatten().flatten() {
            copy(&path.path(), &source.join(folder))?;
        }
    }
    copy(&workspace::root().join("docs/book.toml"), &source)?;
    Run::new(mdbook()?).arg("build").arg(&source).arg("--dest-dir").arg(&book).read()?;
    Ok(book)
}

/// Copies a file into a folder, which is created if necessary.
fn copy(file: &Path, folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    fs::copy(file, folder.join(file.file_name().unwrap_or_default()))
        .with_context(|| format!("cannot copy {}", file.display()))?;
    Ok(())
}

/// Rewrites the links of the summary, which are relative to `docs`, to links from the repository's
/// root.
fn from_root(summary: &str) -> String {
    summary.replace("](../", "](<root>/").replace("](", "](docs/").replace("](docs/<root>/", "](")
}

/// Finds mdBook, or builds it into `target/tools`.
fn mdbook() -> Result<PathBuf> {
    let root = workspace::tools().join(format!("mdbook-{MDBOOK}"));
    let own = root.join("bin/mdbook");
    let series = MDBOOK.rsplit_once('.').map_or(MDBOOK, |(series, _)| series);
    let is_usable = |program: &PathBuf| {
        let version = Run::new(program).arg("--version").read().unwrap_or_default();
        version.trim().trim_start_matches("mdbook v").starts_with(series)
    };
    let candidates = [own.clone()].into_iter().chain(search::programs("mdbook"));
    if let Some(found) = candidates.filter(|path| search::is_executable(path)).find(is_usable) {
        return Ok(found);
    }
    let install = steps::install("mdbook", MDBOOK, "search", &root, INSTALL);
    Progress::run(&format!("cargo install mdbook {MDBOOK}"), install).map(|()| own)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_of_the_summary_start_at_the_root() {
        assert_eq!(
            from_root("- [Maps](maps.md)\n- [Read](../README.md)"),
            "- [Maps](docs/maps.md)\n- [Read](README.md)"
        );
    }
}
