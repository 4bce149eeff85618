//! Checks what pages name: commands in blocks that are marked `sh`, and paths of the repository.

use std::fs;

use clap::Parser as _;
use xtask::run::Run;
use xtask::workspace;

use super::Page;
use crate::cli::Cli;

/// Programs of others that pages may run.
const PROGRAMS: [&str; 28] = [
    "aws",
    "az",
    "bpftool",
    "cosign",
    "curl",
    "docker",
    "find",
    "helm",
    "ipset",
    "iptables-save",
    "ipvsadm",
    "kind",
    "kubeadm",
    "kubectl",
    "llvm-objdump",
    "ls",
    "minisign",
    "nft",
    "object",
    "openssl",
    "sed",
    "sha256sum",
    "skopeo",
    "sysctl",
    "systemctl",
    "talosctl",
    "tar",
    "tc",
];

/// The folders whose paths are checked.
const FOLDERS: [&str; 7] =
    ["proxy-common/", "proxy-ebpf/", "proxy-userspace/", "tests/", "xtask/", "deploy/", "docs/"];

/// Checks the syntax of commands, and the names and flags of everything that belongs to shunt.
/// Returns the number of commands, and a line for each that is wrong.
pub(super) fn check_commands(pages: &[Page]) -> (usize, Vec<String>) {
    let (mut count, mut wrong) = (0, Vec::new());
    for page in pages {
        for block in blocks(&page.text) {
            if let Err(error) = Run::new("bash").args(["-n", "-c", &block]).read() {
                wrong.push(format!("  {}: bash does not read {block:?}: {error:#}", page.path));
            }
        }
        for command in commands_of(page) {
            count += 1;
            if let Err(problem) = judge(&command) {
                wrong.push(format!("  {}: {command}: {problem}", page.path));
            }
        }
    }
    (count, wrong)
}

/// Returns the number of paths in code spans, and a line for each that does not exist. The
/// changelog describes the past, so it is left out.
pub(super) fn check_paths(pages: &[Page]) -> (usize, Vec<String>) {
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

/// Returns the commands of a page: those of blocks, and those of cargo in tables.
pub(super) fn commands_of(page: &Page) -> Vec<String> {
    let of_blocks = blocks(&page.text);
    let of_blocks = of_blocks.iter().flat_map(|block| commands(block));
    let rows = page.text.lines().filter(|line| line.starts_with('|') && page.path != super::commands::TABLE);
    let cells = rows.flat_map(|row| row.split('`').skip(1).step_by(2));
    of_blocks.chain(cells.filter(|cell| cell.starts_with("cargo ")).map(str::to_owned)).collect()
}

/// Returns the text of each block that is marked `sh`.
fn blocks(text: &str) -> Vec<String> {
    let mut blocks = Vec::new();
    let mut open: Option<String> = None;
    for line in text.lines() {
        match &mut open {
            None if line.trim_start() == "```sh" => open = Some(String::new()),
            Some(_) if line.trim_start() == "```" => blocks.extend(open.take()),
            Some(block) => block.extend([line, "\n"]),
            None => {}
        }
    }
    blocks
}

/// Returns the commands of a block, without comments, with continued lines joined.
fn commands(block: &str) -> Vec<String> {
    let joined = block.replace("\\\n", " ");
    let lines = joined.lines().map(|line| line.split(" #").next().unwrap_or_default().trim());
    lines.filter(|line| !line.is_empty() && !line.starts_with('#')).map(str::to_owned).collect()
}

/// Checks one command. The error says what is wrong with it.
fn judge(command: &str) -> Result<(), String> {
    let words: Vec<&str> = command.split_whitespace().collect();
    let is_name = |c: char| c.is_ascii_uppercase() || c == '_' || c.is_ascii_digit();
    let is_variable = |word: &&str| word.split_once('=').is_some_and(|(name, _)| name.chars().all(is_name));
    let start = words.iter().position(|word| !is_variable(word)).unwrap_or(0);
    match &words[start..] {
        ["cargo", "xtask", rest @ ..] => xtask(rest),
        ["cargo", rest @ ..] => cargo(rest),
        ["shunt" | "target/release/shunt", rest @ ..] => shunt(rest),
        [program, ..] => match program.strip_prefix("target/release/") {
            Some(name) => exists("tests/src/bin", name),
            None if PROGRAMS.contains(&program.split('=').next().unwrap_or(program)) => Ok(()),
            None => Err(format!("{program} is not among the programs that pages may run")),
        },
        [] => Ok(()),
    }
}

/// Checks the arguments of `cargo xtask` with its own parser.
fn xtask(words: &[&str]) -> Result<(), String> {
    match Cli::try_parse_from(["cargo xtask"].iter().chain(words)) {
        Err(error) if error.use_stderr() => Err(error.to_string()),
        _ => Ok(()),
    }
}

/// Checks that the package and the test target of a cargo command exist.
fn cargo(words: &[&str]) -> Result<(), String> {
    let of = |flags: &[&str]| {
        words.windows(2).filter(|pair| flags.contains(&pair[0])).map(|pair| pair[1]).collect::<Vec<_>>()
    };
    let packages = of(&["-p", "--package"]);
    for package in &packages {
        let folder = match *package {
            "shunt-tests" => "tests",
            "shunt-fuzz" => "tests/fuzz",
            package => package,
        };
        exists("", folder)?;
    }
    let folder = if packages == ["shunt-tests"] { "tests/tests" } else { "proxy-userspace/tests" };
    of(&["--test"]).into_iter().try_for_each(|target| exists(folder, target))
}

/// Checks that shunt has the flags.
fn shunt(words: &[&str]) -> Result<(), String> {
    let flags = fs::read_to_string(workspace::root().join("docs/flags.md")).unwrap_or_default();
    let has = |flag: &str| flags.contains(&format!("`{flag}`"));
    let unknown = words
        .iter()
        .map(|word| word.split('=').next().unwrap_or(word))
        .find(|word| word.starts_with("--") && !has(word) && !["--help", "--output"].contains(word));
    unknown.map_or(Ok(()), |flag| Err(format!("docs/flags.md has no {flag}")))
}

/// Checks that a file or folder of this name is in the folder, with or without `.rs`.
fn exists(folder: &str, name: &str) -> Result<(), String> {
    let folder = workspace::root().join(folder);
    let is_there = folder.join(name).exists() || folder.join(format!("{name}.rs")).exists();
    if is_there { Ok(()) } else { Err(format!("there is no {name}")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_in_blocks_marked_sh_and_in_tables() {
        let text = "```text\nno command\n```\n\n```sh\ncargo xtask test  # all\n# nothing\nls \\\n  x\n```\n\
                    | `x` | `cargo fmt` |\n`cargo run`\n";
        let page = |path: &str| Page { path: path.into(), text: text.into() };
        assert_eq!(commands_of(&page("a.md")), ["cargo xtask test", "ls    x", "cargo fmt"]);
        assert_eq!(commands_of(&page(super::super::commands::TABLE)).len(), 2, "its cells are patterns");
    }

    #[test]
    fn commands_that_exist_are_right() {
        for command in [
            "cargo xtask conformance --mode ebpf --only hairpin",
            "SHUNT_WRITE_DOCS=1 cargo test -p proxy-userspace config::tests::documents",
            "cargo test -p shunt-tests --test ebpf_frames",
            "target/release/restarts --shunt x",
            "shunt --mode ebpf --config FILE",
            "curl localhost:10249/metrics",
        ] {
            assert_eq!(judge(command), Ok(()), "{command}");
        }
    }

    #[test]
    fn commands_that_do_not_exist_are_wrong() {
        for command in [
            "cargo xtask nothing",
            "cargo xtask conformance --moed ebpf",
            "cargo test -p no-package",
            "cargo test -p shunt-tests --test nothing",
            "target/release/nothing",
            "shunt --no-such-flag",
            "rm -rf x",
        ] {
            assert!(judge(command).is_err(), "{command}");
        }
    }

    #[test]
    fn only_code_spans_that_are_paths_count() {
        let text = "See `proxy-common/src` and `cargo test`, not docs/x or `tests/*.rs`.";
        assert_eq!(paths(text).collect::<Vec<_>>(), ["proxy-common/src"]);
    }

    #[test]
    fn a_path_that_does_not_exist_is_named() {
        let page =
            Page { path: "docs/a.md".into(), text: "`xtask/src/main.rs`, `xtask/src/nothing.rs`".into() };
        let (count, missing) = check_paths(&[page]);
        assert_eq!(count, 2);
        assert_eq!(missing, ["  docs/a.md: there is no xtask/src/nothing.rs in the repository"]);
    }
}
