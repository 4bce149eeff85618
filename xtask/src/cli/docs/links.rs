//! Checks that every internal link and image of the built book leads to a file, and to an anchor in
//! it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

/// Pages that mdBook generates from others.
const GENERATED: [&str; 3] = ["print.html", "404.html", "toc.html"];

/// Returns the number of internal links, and a line for each that leads nowhere.
pub(super) fn check(book: &Path) -> Result<(usize, Vec<String>)> {
    let book = &book.canonicalize().context("cannot find the book")?;
    let mut pages = BTreeMap::new();
    read_pages(book, &mut pages)?;
    let anchors: BTreeMap<&Path, BTreeSet<&str>> =
        pages.iter().map(|(path, html)| (&**path, values(html, "id=\"").collect())).collect();
    let (mut count, mut broken) = (0, Vec::new());
    for (page, html) in &pages {
        let links = values(html, "href=\"").chain(values(html, "src=\""));
        for link in links.filter(|link| is_internal(link)) {
            count += 1;
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = if file.is_empty() { page.clone() } else { page.with_file_name(file) };
            let is_right = target.canonicalize().is_ok_and(|target| match anchors.get(&*target) {
                Some(ids) => anchor.is_empty() || ids.contains(anchor),
                None => target.is_file(),
            });
            if !is_right {
                let page = page.strip_prefix(book).unwrap_or(page);
                broken.push(format!("  {}: the link {link} leads nowhere", page.display()));
            }
        }
    }
    broken.dedup();
    Ok((count, broken))
}

/// Reads all pages below a folder, except generated ones.
fn read_pages(folder: &Path, pages: &mut BTreeMap<PathBuf, String>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            read_pages(&path, pages)?;
        } else if path.extension().is_some_and(|extension| extension == "html")
            && !GENERATED.iter().any(|name| path.ends_with(name))
        {
            let html = fs::read_to_string(&path);
            let html = html.with_context(|| format!("cannot read {}", path.display()))?;
            pages.insert(path, html);
        }
    }
    Ok(())
}

/// Returns the values of an attribute. mdBook writes double quotes.
fn values<'a>(html: &'a str, attribute: &'static str) -> impl Iterator<Item = &'a str> {
    html.split(attribute).skip(1).filter_map(|rest| rest.split('"').next())
}

fn is_internal(link: &str) -> bool {
    !link.contains("://") && !link.starts_with("mailto:") && !link.starts_with("data:") && link != "#"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broken_links_and_anchors_are_named() {
        let book = tempfile::tempdir().unwrap();
        fs::create_dir(book.path().join("docs")).unwrap();
        fs::write(book.path().join("index.html"), r#"<h1 id="top"></h1><a href="docs/a.html#x">"#).unwrap();
        let links = ["../index.html#top", "../index.html#none", "b.html", "#x", "https://example.com/"];
        let html = links.map(|link| format!("<a href=\"{link}\">")).concat() + "<img src=\"none.svg\">";
        fs::write(book.path().join("docs/a.html"), format!("<p id=\"x\">{html}")).unwrap();
        let (count, broken) = check(book.path()).unwrap();
        assert_eq!(count, 6);
        assert_eq!(
            broken,
            [
                "  docs/a.html: the link ../index.html#none leads nowhere",
                "  docs/a.html: the link b.html leads nowhere",
                "  docs/a.html: the link none.svg leads nowhere"
            ]
        );
    }
}
