//! What programs tell of single connections and packets, where that was asked for: else the verifier drops all of this.
//!
//! A record has numbers and addresses only, in the order that `proxy_common::told` explains; userspace makes words of them. So all
//! records have one size, and the verifier one thing to look at.
#![forbid(unsafe_code)]

use core::net::Ipv6Addr;

use aya_log_ebpf::{
    debug, error, info,
    macro_support::{Level, level_enabled},
};
use proxy_common::{
    layout::{Counter, Endpoint, Program, ProgramError},
    told::{Codes, Told},
};

/// Tells of a connection or packet.
#[inline(always)]
pub fn tell(program: Program, told: &Told<'_>) {
    let Told { what, proto, service, source, dialled, endpoint } = *told;
    let Codes(codes) = Codes::new(program, what as u32, proto);
    if !tells(what) {
        return;
    }
    if what == Counter::FlowsBegun {
        translated(codes, service, source, dialled, endpoint);
    } else {
        turned_away(codes, service, source, dialled);
    }
}

/// Whether it is asked for that this is told of. The verifier knows.
#[inline(always)]
pub fn tells(what: Counter) -> bool {
    level_enabled(if what == Counter::FlowsBegun { Level::Debug } else { Level::Info })
}

/// Tells of something that went wrong in a program.
#[inline(always)]
pub fn tell_error(program: Program, error: ProgramError) {
    if level_enabled(Level::Error) {
        failed(Codes::new(program, error as u32, 0).0);
    }
}

const fn ip(endpoint: &Endpoint) -> Ipv6Addr {
    Ipv6Addr::from_octets(endpoint.addr.octets)
}

#[inline(never)]
fn translated(codes: u32, service: u32, source: &Endpoint, dialled: &Endpoint, endpoint: &Endpoint) {
    debug!(
        (),
        target: "t",
        "{} {} {:i} {} {:i} {} {:i} {}",
        codes,
        service,
        ip(source),
        source.port,
        ip(dialled),
        dialled.port,
        ip(endpoint),
        endpoint.port
    );
}

#[inline(never)]
fn turned_away(codes: u32, service: u32, source: &Endpoint, dialled: &Endpoint) {
    info!(
        (),
        target: "t",
        "{} {} {:i} {} {:i} {}",
        codes,
        service,
        ip(source),
        source.port,
        ip(dialled),
        dialled.port
    );
}

#[inline(never)]
fn failed(codes: u32) {
    error!((), target: "t", "{}", codes);
}
