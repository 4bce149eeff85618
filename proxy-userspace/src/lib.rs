//! shunt's userspace: from watched objects to a programmed kernel, one stage a module.
//!
//! `watch` → `model` → `sync` → `dataplane` → `kernel`; each stage knows only those before it, and `health`,
//! `metrics` and `probe` only read.

pub mod causes;
pub mod config;
pub mod dataplane;
pub mod health;
pub mod kernel;
pub mod metrics;
pub mod model;
pub mod net;
pub mod node;
pub mod probe;
pub mod sync;
pub mod watch;
