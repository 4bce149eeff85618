//! Configuration files and command lines.
//!
//! If the first line of an input begins with `--`, its words are the flags. The rest is the file.

use proxy_userspace::config::{Config, Environment, Flags};

use crate::scratch;

pub(crate) fn run(input: &[u8]) {
    let Ok(text) = str::from_utf8(input) else { return };
    let (flags, file) = match text.split_once('\n') {
        Some((flags, file)) if flags.starts_with("--") => (flags, file),
        _ => ("", text),
    };
    let Some(config) = load(flags, file) else { return };
    // The written file means the same as what it was written from.
    let written = config.effective.document().to_string();
    let again = load("", &written).expect("a written file is valid");
    assert_eq!(again.effective.document().to_string(), written);
}

/// Loads a configuration. `None` if it is invalid.
fn load(flags: &str, file: &str) -> Option<Config> {
    let path = scratch::file_with(file.as_bytes()).display().to_string();
    let words = ["shunt", "--config", &path].into_iter().chain(flags.split_ascii_whitespace());
    // The host's name is not empty on any node.
    let environment = Environment { host_name: "node1".into(), ..Environment::default() };
    Config::load(&Flags::parse(words).ok()?, &environment).ok()
}
