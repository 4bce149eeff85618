//! Framing.

pub(crate) const TESTS: &[(&str, fn())] = &[];
