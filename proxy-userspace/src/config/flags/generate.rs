//! `shunt completion` and `shunt man`: what other programs need to know of the command line.

use std::{
    ffi::OsString,
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
};

use clap::{Arg, ArgMatches, Command, builder::PossibleValuesParser, value_parser};
use clap_complete::Shell;
use clap_mangen::Man;

/// The shells that get completions. Kubernetes' own commands support them, too.
const SHELLS: [(&str, Shell); 3] = [("bash", Shell::Bash), ("zsh", Shell::Zsh), ("fish", Shell::Fish)];

/// What is generated from the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Generated {
    /// The completions of a shell.
    Completion(Shell),
    /// The man pages, in this directory.
    Man(PathBuf),
}

impl Generated {
    pub(super) fn commands() -> [Command; 2] {
        let completion = Command::new("completion")
            .about("Print the completions of a shell")
            .after_help(
                "For this shell only: source <(shunt completion bash)\nFor all: shunt completion bash > \
                 /etc/bash_completion.d/shunt",
            )
            .arg(
                Arg::new("shell")
                    .required(true)
                    .value_name("SHELL")
                    .value_parser(PossibleValuesParser::new(SHELLS.map(|(name, _)| name)))
                    .help("The shell"),
            );
        let man = Command::new("man")
            .about("Write the man pages into a directory")
            .after_help("For all users: shunt man /usr/local/share/man/man8")
            .arg(
                Arg::new("directory")
                    .required(true)
                    .value_name("DIRECTORY")
                    .value_parser(value_parser!(PathBuf))
                    .help("The directory, which is created if it does not exist"),
            );
        [completion, man]
    }

    pub(super) fn read(matches: &ArgMatches) -> Option<Self> {
        match matches.subcommand()? {
            ("completion", completion) => {
                let wanted = completion.get_one::<String>("shell")?;
                let (_, shell) = SHELLS.into_iter().find(|(name, _)| name == wanted)?;
                Some(Self::Completion(shell))
            }
            ("man", man) => Some(Self::Man(man.get_one::<PathBuf>("directory")?.clone())),
            _ => None,
        }
    }

    /// Writes completions to `to`, or the man pages into their directory.
    pub fn write(&self, to: &mut dyn Write) -> io::Result<()> {
        let mut command = super::command();
        match self {
            Self::Completion(shell) => {
                // clap_complete panics if the output fails, as with `| head`.
                let mut text = Vec::new();
                clap_complete::generate(*shell, &mut command, "shunt", &mut text);
                to.write_all(&text)
            }
            Self::Man(directory) => write_man(command, directory),
        }
    }
}

/// Writes `shunt.8`, and one page for each subcommand. All need root, so they are in section 8.
fn write_man(command: Command, directory: &Path) -> io::Result<()> {
    fs::create_dir_all(directory).map_err(|error| named(&error, directory))?;
    let mut command = command.disable_help_subcommand(true);
    command.build();
    let subcommands: Vec<Command> = command.get_subcommands().cloned().collect();
    for command in std::iter::once(command).chain(subcommands) {
        let name = command.get_display_name().unwrap_or_else(|| command.get_name()).to_owned();
        let mut page = Vec::new();
        Man::new(command).section("8").render(&mut page)?;
        let path = directory.join(OsString::from(format!("{name}.8")));
        fs::write(&path, page).map_err(|error| named(&error, &path))?;
    }
    Ok(())
}

fn named(error: &io::Error, path: &Path) -> io::Error {
    io::Error::new(error.kind(), format!("cannot write {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Flags;

    fn generated(words: &[&str]) -> Generated {
        let flags = Flags::parse(std::iter::once(&"shunt").chain(words)).expect("valid");
        flags.generated.expect("a subcommand that generates")
    }

    #[test]
    fn completions_of_each_shell_know_flags_and_subcommands() {
        for (shell, _) in SHELLS {
            let mut text = Vec::new();
            generated(&["completion", shell]).write(&mut text).expect("memory");
            let text = String::from_utf8(text).expect("text");
            for word in ["proxy-mode", "explain", "left-out"] {
                assert!(text.contains(word), "{shell}: {word}");
            }
        }
    }

    #[test]
    fn other_shells_are_refused_with_those_that_are_known() {
        let error = Flags::parse(["shunt", "completion", "tcsh"]).expect_err("not supported");
        assert!(error.to_string().contains("[possible values: bash, zsh, fish]"), "{error}");
    }

    #[test]
    fn each_subcommand_has_a_man_page() {
        let directory = tempfile::tempdir().expect("a directory");
        let below = directory.path().join("man8");
        generated(&["man", below.to_str().expect("text")]).write(&mut io::sink()).expect("written");
        for (page, word) in [
            ("shunt", "cluster\\-cidr"),
            ("shunt-get", "RESOURCE"),
            ("shunt-explain", "FROM"),
            ("shunt-probe", "output"),
        ] {
            let text = fs::read_to_string(below.join(format!("{page}.8"))).expect(page);
            assert!(text.contains(word), "{page}: {text}");
        }
    }

    #[test]
    fn an_error_names_the_page_that_cannot_be_written() {
        let error = generated(&["man", "/proc/none"]).write(&mut io::sink()).expect_err("read only");
        assert!(error.to_string().starts_with("cannot write /proc/none: "), "{error}");
    }
}
