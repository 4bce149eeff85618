//! Builds what a release consists of.

pub(crate) mod binaries;
mod compiler;
mod target;

pub(crate) use self::target::Target;
