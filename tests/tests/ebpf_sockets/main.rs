//! The socket programs in this kernel, with real sockets on loopback.

mod bench;
mod changes;
mod counts;
mod flows;
mod lifecycle;
mod map_check;
mod prefilter;
mod services;
mod trace;
mod udp;
