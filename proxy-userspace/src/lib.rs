//! shunt's userspace: from watched objects to a programmed kernel, one module a stage.
//!
//! The order is `watch` → `model` → `sync` → `dataplane` → `kernel`. Each stage knows only the
//! stages before it. `health`, `metrics` and `probe` only read.

pub mod assembly;
#[cfg(test)]
mod captured_log;
pub mod causes;
pub mod config;
pub mod dataplane;
pub mod doctor;
mod duration;
pub mod explain;
pub mod health;
pub mod inspect;
pub mod kernel;
pub mod link_path;
pub mod metrics;
pub mod mode;
pub mod model;
pub mod net;
pub mod node;
pub mod output_file;
mod parallel;
pub mod probe;
mod process_group;
pub mod sync;
pub mod top;
pub mod trace;
pub mod ui;
pub mod watch;
pub mod yaml;
