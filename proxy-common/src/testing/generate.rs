//! Frames that nobody thought of.
