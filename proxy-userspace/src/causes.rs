//! Errors with their causes as one line.
#![forbid(unsafe_code)]

use std::error::Error;

/// Returns an error with its causes. A cause that an error already contains is not repeated.
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
    fn a_repeated_cause_appears_once() {
        let error = KernelError::path("open", "/x")(io::Error::from_raw_os_error(libc::ENOENT));
        assert_eq!(with_causes(&error), "cannot open /x: No such file or directory (os error 2)");
    }
}
