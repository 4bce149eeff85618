//! The programs on links in this kernel: where they run, beside whom, and what a restart and a cleanup do to them.

mod attach;
mod bench;
mod beside;
mod calls;
mod daemon;
mod marks;
