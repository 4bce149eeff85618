//! Errors as one line of a log.
#![forbid(unsafe_code)]

use std::error::Error;

/// An error with its causes, each once: many layers repeat the one below.
pub fn with_causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;
    use crate::kernel::KernelError;

    #[test]
    fn a_cause_that_a_layer_repeats_is_told_once() {
        let error = KernelError::path("open", "/x")(io::Error::from_raw_os_error(libc::ENOENT));
        assert_eq!(with_causes(&error), "open /x: No such file or directory (os error 2)");
    }
}
