//! What the words of a command line mean together: empty ones, and those that exclude each other.

use std::{ffi::OsString, mem};

use clap::{ArgMatches, Command, error::ErrorKind, parser::ValueSource};

use super::Flag;

/// Removes empty words that belong to no flag, as upstream does: templates of manifests leave them.
/// Words of a subcommand stay as they are.
pub(super) fn without_empty(words: impl Iterator<Item = OsString>, command: &Command) -> Vec<OsString> {
    // The first word is the program's name.
    let mut is_value = true;
    let mut is_of_subcommand = false;
    let mut is_kept = |word: &OsString| {
        let is_plain = !mem::replace(&mut is_value, takes_next(word, command))
            && !word.as_encoded_bytes().starts_with(b"-");
        let is_empty = is_plain && word.is_empty() && !is_of_subcommand;
        is_of_subcommand |= is_plain && !is_empty;
        !is_empty
    };
    words.filter(|word| is_kept(word)).collect()
}

/// Returns true for a flag whose value is the next word.
fn takes_next(word: &OsString, command: &Command) -> bool {
    let Some(flag) = word.to_str().and_then(|word| word.strip_prefix('-')) else { return false };
    command.get_arguments().any(|arg| {
        let names = arg.get_long_and_visible_aliases().unwrap_or_default();
        let is_named = flag.strip_prefix('-').is_some_and(|name| names.contains(&name))
            || arg.get_short().is_some_and(|short| flag == short.to_string());
        is_named && arg.get_action().takes_values() && !arg.is_require_equals_set()
    })
}

/// Returns the name or the alias with which a flag was given the last time.
pub(super) fn given_name(flag: &Flag, words: &[OsString]) -> &'static str {
    let names = words.iter().rev().filter_map(|word| word.to_str()?.strip_prefix("--"));
    let mut names = names.map(|word| word.split_once('=').map_or(word, |(name, _)| name));
    let alias = names.find_map(|word| flag.aliases.iter().chain([&flag.name]).find(|name| **name == word));
    alias.copied().unwrap_or(flag.name)
}

/// Fails if shunt would do only one of the things that the command line asks for.
///
/// # Arguments
/// - `tasks` - the flags after whose task shunt exits.
pub(super) fn check(command: &mut Command, matches: &ArgMatches, tasks: &[&str]) -> Result<(), clap::Error> {
    let given = |id: &str| matches.value_source(id) == Some(ValueSource::CommandLine);
    if let Some(subcommand) = matches.subcommand_name() {
        let ignored = matches.ids().map(clap::Id::as_str).find(|id| given(id));
        return ignored.map_or(Ok(()), |flag| {
            let message = format!(
                "--{flag} has no meaning before the subcommand {subcommand}: the flags of a subcommand follow it, see \
                 shunt {subcommand} --help"
            );
            Err(command.error(ErrorKind::ArgumentConflict, message))
        });
    }
    match tasks {
        [one, other, ..] => {
            let message = format!(
                "--{one} and --{other} exclude each other: shunt does one of these things, and exits"
            );
            Err(command.error(ErrorKind::ArgumentConflict, message))
        }
        _ => Ok(()),
    }
}
