//! `shunt trace`: what happens to connections and packets to Services, as it happens.
//!
//! The daemon has two sources. In the ebpf mode, programs that trace take the place of the others
//! as long as somebody traces: [`tracer`]. Where netfilter translates, rules mark the first packets
//! of connections, and the kernel reports their way: [`netfilter`]. Each subscriber gets what its
//! filter lets through, as JSON lines on the local socket.
#![forbid(unsafe_code)]

mod arguments;
mod destinations;
mod filter;
mod names;
mod netfilter;
#[cfg(not(feature = "pcap-files"))]
mod no_pcap;
mod packets;
#[cfg(feature = "pcap-files")]
mod pcap;
mod programs;
mod record;
mod served;
mod server;
mod tracer;

#[cfg(not(feature = "pcap-files"))]
pub use self::no_pcap::{CaptureError, CaptureFile};
#[cfg(feature = "pcap-files")]
pub use self::pcap::{CaptureError, CaptureFile};
pub use self::{
    arguments::{TraceArguments, TraceOutput, command},
    filter::{FilterPort, TraceFilter, VerdictFilter},
    netfilter::remove_tables,
    record::{TraceRecord, TracedEvent, TracedPacket, TracedVerdict},
    server::routes,
    tracer::{LoadPrograms, TraceError, Tracer},
};
