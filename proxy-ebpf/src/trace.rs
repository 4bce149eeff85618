//! Trace events of connections and packets, and error messages of the programs.
//!
//! Userspace sets the level before it loads the programs. To the verifier it is a constant, so it
//! removes the code of all that is off.
#![forbid(unsafe_code)]

use aya_log_ebpf::macro_support::{Level, level_enabled};
use proxy_common::{
    Protocol,
    layout::{Counter, Endpoint, Flow, FlowKey, ProgramError, TraceEvent},
};

use crate::{
    ctx::{self, SockAddr},
    maps::{self, EntryPoint},
};

/// Returns true if connections and packets with this verdict are traced.
#[inline(always)]
pub fn is_on(verdict: Counter) -> bool {
    level_enabled(if matches!(verdict, Counter::FlowsBegun) { Level::Debug } else { Level::Info })
}

/// Traces a packet of a flow.
#[inline(always)]
pub fn packet<P: EntryPoint>(verdict: Counter, link: u32, key: &FlowKey, flow: &Flow) {
    if is_on(verdict) {
        write_packet::<P>(verdict, link, key, flow);
    }
}

/// Traces a connection or datagram of a socket.
#[inline(always)]
pub fn socket<P: EntryPoint>(
    ctx: &SockAddr,
    verdict: Counter,
    service: u32,
    vip: &Endpoint,
    endpoint: &Endpoint,
) {
    if is_on(verdict) {
        // The callee needs the values on the stack. Copying them here costs stack only if tracing
        // is on.
        let (vip, endpoint) = (*vip, *endpoint);
        write_socket::<P>(ctx, verdict, service, &vip, &endpoint);
    }
}

#[inline(never)]
fn write_packet<P: EntryPoint>(verdict: Counter, link: u32, key: &FlowKey, flow: &Flow) {
    maps::write_event(|| TraceEvent::of_flow((P::PROGRAM, verdict), ctx::now_ns(), link, key, flow));
}

#[inline(never)]
fn write_socket<P: EntryPoint>(
    ctx: &SockAddr,
    verdict: Counter,
    service: u32,
    vip: &Endpoint,
    endpoint: &Endpoint,
) {
    let Some(protocol) = Protocol::of_socket(ctx.protocol()) else { return };
    let (what, place) = ((P::PROGRAM, verdict), (ctx.netns(), protocol));
    maps::write_event(|| TraceEvent::of_socket(what, ctx::now_ns(), place, service, [vip, endpoint]));
}

/// Logs an error of a program.
#[inline(always)]
pub fn error<P: EntryPoint>(error: ProgramError) {
    use ProgramError as E;
    if !level_enabled(Level::Error) {
        return;
    }
    match error {
        E::EndpointMissing => log::<P, { E::EndpointMissing as usize }>(),
        E::Affinity => log::<P, { E::Affinity as usize }>(),
        E::UdpFlows => log::<P, { E::UdpFlows as usize }>(),
        E::UdpReplies => log::<P, { E::UdpReplies as usize }>(),
        E::UdpSockets => log::<P, { E::UdpSockets as usize }>(),
        E::UdpConnections => log::<P, { E::UdpConnections as usize }>(),
        E::TcpConnections => log::<P, { E::TcpConnections as usize }>(),
        E::Flows => log::<P, { E::Flows as usize }>(),
        E::Fragments => log::<P, { E::Fragments as usize }>(),
        E::NotRewritten => log::<P, { E::NotRewritten as usize }>(),
        E::Malformed => log::<P, { E::Malformed as usize }>(),
    }
}

#[inline(never)]
fn log<P: EntryPoint, const ERROR: usize>() {
    aya_log_ebpf::error!((), target: const { P::PROGRAM.name() }, "{}", const { ProgramError::ALL[ERROR].name() });
}
