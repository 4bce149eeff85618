//! The rules of the iptables mode as text, without a kernel: compared with upstream's, and traced
//! with the packets of the cases.

mod flows;
mod recorded;
mod scene;
mod size;
mod trace;
