//! Checks that docs/commands.md says for every command of the pages how it is run, or why not.

use anyhow::Result;

use super::{Page, pages};
use crate::cli::checks::{self, Check, Sources};

/// The page with the table.
pub(super) const TABLE: &str = "docs/commands.md";
/// What may take the place of a check: the start of a cell, with a reason behind it.
const REASONS: [&str; 2] = ["not possible here: ", "by hand: "];

/// A row of the table.
struct Row<'a> {
    /// A command, in which `*` stands for any text.
    pattern: &'a str,
    how: &'a str,
    checks: Vec<Check>,
}

/// Returns a line for each command that has no row, and for each row that has no command or names
/// no reason and no check that exists.
pub(super) fn check(pages: &[Page]) -> Result<Vec<String>> {
    let table = pages.iter().find(|page| page.path == TABLE).map_or("", |page| &page.text);
    problems(table, pages, &Sources::read()?)
}

fn problems(table: &str, pages: &[Page], sources: &Sources) -> Result<Vec<String>> {
    let rows: Vec<Row> = table.lines().filter_map(Row::read).collect();
    let mut problems = Vec::new();
    let mut used = vec![false; rows.len()];
    for page in pages {
        for command in pages::commands_of(page) {
            match rows.iter().position(|row| matches(row.pattern, &command)) {
                Some(row) => used[row] = true,
                None => problems.push(format!("  {}: {TABLE} has no row for {command}", page.path)),
            }
        }
    }
    for (row, is_used) in rows.iter().zip(used) {
        if !is_used {
            problems.push(format!("  {TABLE}: no page has a command for the row {}", row.pattern));
        }
        problems.extend(row.problems(sources)?);
    }
    Ok(problems)
}

impl<'a> Row<'a> {
    /// Reads a row: a pattern in a code span, and how its commands are run.
    fn read(line: &'a str) -> Option<Self> {
        let (pattern, how) = line.strip_prefix("| `")?.strip_suffix(" |")?.split_once("` | ")?;
        Some(Self { pattern, how, checks: checks::named(how) })
    }

    fn problems(&self, sources: &Sources) -> Result<Vec<String>> {
        let Self { pattern, how, checks } = self;
        if checks.is_empty() && !REASONS.iter().any(|reason| how.contains(reason)) {
            return Ok(vec![format!("  {TABLE}: {pattern}: {how:?} names neither a check nor a reason")]);
        }
        let mut problems = Vec::new();
        for check in checks {
            if !sources.have(check)? {
                problems.push(format!("  {TABLE}: {pattern}: there is no {} {}", check.kind, check.name));
            }
        }
        Ok(problems)
    }
}

/// Returns true if a command is what a pattern describes.
fn matches(pattern: &str, command: &str) -> bool {
    let Some((start, rest)) = pattern.split_once('*') else { return pattern == command };
    let Some(mut command) = command.strip_prefix(start) else { return false };
    let (middle, end) = rest.rsplit_once('*').unwrap_or(("", rest));
    for part in middle.split('*') {
        let Some(at) = command.find(part) else { return false };
        command = &command[at + part.len()..];
    }
    command.ends_with(end)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(table: &str, commands: &str) -> Vec<String> {
        let page = Page { path: "README.md".into(), text: format!("```sh\n{commands}\n```\n") };
        problems(table, &[page], &Sources::example()).unwrap()
    }

    const DEMO: &str = "| `cargo xtask demo` | step `demo` |\n";

    #[test]
    fn star_stands_for_any_text() {
        for (pattern, command) in [
            ("az *", "az aks show"),
            ("sed * | kubectl *", "sed 's/a/b/' x | kubectl apply"),
            ("a*b*c", "abc"),
        ] {
            assert!(matches(pattern, command), "{pattern}");
        }
        for (pattern, command) in [("az *", "aws x"), ("az", "az x"), ("a*b*b", "ab"), ("a*b", "abc")] {
            assert!(!matches(pattern, command), "{pattern}");
        }
    }

    #[test]
    fn command_with_a_row_is_right() {
        assert_eq!(found(DEMO, "cargo xtask demo"), [""; 0]);
        let cloud = "| `az *` | not possible here: no account at Azure |\n";
        assert_eq!(found(cloud, "az aks show"), [""; 0]);
    }

    #[test]
    fn command_without_a_row_is_named() {
        assert_eq!(
            found(DEMO, "cargo xtask demo\nls deploy"),
            ["  README.md: docs/commands.md has no row for ls deploy"]
        );
    }

    #[test]
    fn row_whose_command_is_gone_is_named() {
        assert_eq!(
            found(&format!("{DEMO}| `ls *` | step `docs` |\n"), "cargo xtask demo"),
            ["  docs/commands.md: no page has a command for the row ls *"]
        );
        let hidden = "| `cargo *` | step `docs` |\n";
        assert_eq!(found(&format!("{hidden}{DEMO}"), "cargo xtask demo").len(), 1, "the first row counts");
    }

    #[test]
    fn row_with_a_check_that_does_not_exist_is_named() {
        assert_eq!(
            found("| `ls` | steps `demo`, `dmeo` |\n", "ls"),
            ["  docs/commands.md: ls: there is no step dmeo"]
        );
    }

    #[test]
    fn row_without_a_check_and_a_reason_is_named() {
        assert_eq!(
            found("| `ls` | somehow |\n", "ls"),
            ["  docs/commands.md: ls: \"somehow\" names neither a check nor a reason"]
        );
    }
}
