//! Link programs in this kernel: attachment, foreign programs, restart and cleanup.

mod attach;
mod bench;
mod beside;
mod calls;
mod daemon;
mod dispatcher;
mod handover;
mod look;
mod maglev_tables;
mod marks;
mod xdp_refused;
