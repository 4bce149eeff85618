//! Messages on standard error. Nobody may read it, or its disk may be full: a command then does the
//! same without its messages.

use std::{
    fmt::Display,
    io::{Write as _, stderr},
};

/// Writes a line.
pub(crate) fn say(line: impl Display) {
    // There is no other place to report it.
    let _ = writeln!(stderr(), "{line}");
}

/// Writes a message after the program's name.
pub(crate) fn tell(message: impl Display) {
    say(format_args!("shunt: {message}"));
}
