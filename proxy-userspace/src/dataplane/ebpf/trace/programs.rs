//! Programs that trace: copies of the programs of this process, with the same maps. While somebody
//! traces they are attached in place of the others, which have no code for it.

use std::mem;

use proxy_common::layout::{CapturedPacket, LostRecord, TraceEvent};

use super::{
    super::{Ebpf, EbpfError, EbpfSettings, OBJECT, maps, plan::state::State},
    Log,
};
use crate::kernel::{
    KernelError,
    bpf::{self, LostRecords, Object, PinDir, Recording, RingReader},
};

/// The link programs, all of which are loaded before any is attached.
const LINK_PROGRAMS: [&str; 4] = ["shunt_out_eth", "shunt_in_eth", "shunt_out_ip", "shunt_in_ip"];

/// Loaded programs that trace.
#[derive(Debug)]
pub struct TracingPrograms(Object);

impl TracingPrograms {
    /// Loads the programs, with `packets` those that capture packets. It takes as long as a start:
    /// tenths of a second.
    pub fn load(settings: &EbpfSettings, packets: bool) -> Result<(Self, TraceRecords), EbpfError> {
        let pins = PinDir::existing(&settings.pin_dir)?.ok_or_else(|| {
            KernelError::path("open", &settings.pin_dir)(std::io::ErrorKind::NotFound.into())
        })?;
        let (sizes, cpus) = (settings.map_sizes, bpf::cpus()?);
        let specs = maps::specs(&sizes, cpus);
        pins.holds(&specs).map_err(|difference| {
            KernelError::call("use the maps of", "this shunt")(std::io::Error::other(difference))
        })?;
        let recording = Recording::Trace { packets };
        let mut object = Object::load(OBJECT, &specs, &settings.constants(), recording, pins.path())?;
        for name in LINK_PROGRAMS {
            object.link_program(name)?;
        }
        let records = TraceRecords {
            events: RingReader::new(&mut object, "trace_events")?,
            packets: RingReader::new(&mut object, "captured_packets")?,
            lost: LostRecords::new(&mut object)?,
            log: Log::new(&mut object, settings.log)?,
        };
        Ok((Self(object), records))
    }
}

/// Reads what programs that trace write.
pub struct TraceRecords {
    events: RingReader<TraceEvent>,
    packets: RingReader<CapturedPacket>,
    lost: LostRecords,
    /// `None` if nothing is logged.
    log: Option<Log>,
}

impl TraceRecords {
    /// Reads at most `most` of the events that programs have written, in their order on each CPU.
    /// Logs them as the programs of this process would have them logged.
    pub fn events(&mut self, most: usize) -> Vec<TraceEvent> {
        let events = self.events.read_some(most);
        if let Some(log) = &mut self.log {
            log.write(&events);
        }
        events
    }

    /// Reads at most `most` of the captured packets.
    pub fn packets(&mut self, most: usize) -> Vec<CapturedPacket> {
        self.packets.read_some(most)
    }

    /// Returns how many events and packets were lost so far, because nobody read fast enough.
    pub fn lost(&self) -> Result<u64, EbpfError> {
        Ok(self.lost.read(LostRecord::Event)? + self.lost.read(LostRecord::Packet)?)
    }
}

impl Ebpf {
    /// Exchanges the programs for those that trace, or for its own ones again (`None`). The next
    /// plan for the node attaches them. Returns false if nothing changes: no programs trace, or new
    /// maps are built beside those in use.
    pub(in super::super) fn exchange(&mut self, state: &mut State, tracing: Option<TracingPrograms>) -> bool {
        if !self.attached || self.is_staged {
            return false;
        }
        let was_tracing = self.own_object.is_some();
        if let Some(own) = self.own_object.take() {
            self.object = own;
        }
        match tracing {
            Some(TracingPrograms(tracing)) => {
                self.own_object = Some(mem::replace(&mut self.object, tracing));
            }
            None if !was_tracing => return false,
            None => {}
        }
        self.attached = false;
        state.outdate_programs();
        true
    }
}
