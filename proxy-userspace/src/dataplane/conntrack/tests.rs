//! Which flows are stale.
