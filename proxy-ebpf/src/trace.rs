//! What programs tell of single connections and packets, where that was asked for: else the verifier drops all of this.
//!
//! A record has numbers and addresses only, in the order that `proxy_common::trace` explains; userspace makes words of them. So all
//! records have one size, and the verifier one thing to look at.
#![forbid(unsafe_code)]

use core::net::Ipv6Addr;

use aya_log_ebpf::{
    debug, error as log_error, info,
    macro_support::{Level, level_enabled},
};
use proxy_common::{
    layout::{Counter, Endpoint, Program, ProgramError},
    trace::{Codes, TraceEvent},
};

/// Tells of a connection or packet.
#[inline(always)]
pub fn event(program: Program, event: &TraceEvent<'_>) {
    let TraceEvent { what, proto, service, source, vip, endpoint } = *event;
    let Codes(codes) = Codes::new(program, what as u32, proto);
    if !is_on(what) {
        return;
    }
    if what == Counter::FlowsBegun {
        translated(codes, service, source, vip, endpoint);
    } else {
        turned_away(codes, service, source, vip);
    }
}

/// Whether it is asked for that this is told of. The verifier knows.
#[inline(always)]
pub fn is_on(what: Counter) -> bool {
    level_enabled(if what == Counter::FlowsBegun { Level::Debug } else { Level::Info })
}

/// Tells of something that went wrong in a program.
#[inline(always)]
pub fn error(program: Program, error: ProgramError) {
    if level_enabled(Level::Error) {
        failed(Codes::new(program, error as u32, 0).0);
    }
}

const fn ip(endpoint: &Endpoint) -> Ipv6Addr {
    Ipv6Addr::from_octets(endpoint.addr.octets)
}

#[inline(never)]
fn translated(codes: u32, service: u32, source: &Endpoint, vip: &Endpoint, endpoint: &Endpoint) {
    debug!(
        (),
        target: "t",
        "{} {} {:i} {} {:i} {} {:i} {}",
        codes,
        service,
        ip(source),
        source.port,
        ip(vip),
        vip.port,
        ip(endpoint),
        endpoint.port
    );
}

#[inline(never)]
fn turned_away(codes: u32, service: u32, source: &Endpoint, vip: &Endpoint) {
    info!(
        (),
        target: "t",
        "{} {} {:i} {} {:i} {}",
        codes,
        service,
        ip(source),
        source.port,
        ip(vip),
        vip.port
    );
}

#[inline(never)]
fn failed(codes: u32) {
    log_error!((), target: "t", "{}", codes);
}
