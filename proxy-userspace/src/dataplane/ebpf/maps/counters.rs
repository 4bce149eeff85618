//! The counters of the programs, for metrics: packets, errors, and traffic to Services.

use std::sync::{Arc, Mutex};

use aya::maps::{MapData, PerCpuArray};
use proxy_common::layout::{Counter, Program, ProgramErrors};

use super::{prefilter::Prefilter, service_counts::ServiceCountReader};
use crate::{
    dataplane::{KernelCounts, PrefilterFill, ProgramErrorCount, ServiceCount, lock},
    kernel::{KernelError, bpf::Object},
};

/// Reads the counters. Every read adds up the values of all CPUs.
pub(crate) struct Counters {
    packets: PerCpuArray<MapData, u64>,
    errors: PerCpuArray<MapData, ProgramErrors>,
    services: ServiceCountReader,
    prefilter: Arc<Mutex<Prefilter>>,
}

impl Counters {
    pub(crate) fn open(
        object: &mut Object,
        services: ServiceCountReader,
        prefilter: Arc<Mutex<Prefilter>>,
    ) -> Result<Self, KernelError> {
        Ok(Self {
            packets: object.open_map("counters")?,
            errors: object.open_map("program_errors")?,
            services,
            prefilter,
        })
    }
}

// Every slot of an array exists. If a read fails nevertheless, zero is better than a wrong number.
impl KernelCounts for Counters {
    fn packets(&self) -> Vec<(&'static str, u64)> {
        let sum = |counter: Counter| {
            self.packets.get(&(counter as u32), 0).map_or(0, |of_cpus| of_cpus.iter().sum())
        };
        Counter::ALL.map(|counter| (counter.name(), sum(counter))).into()
    }

    fn errors(&self) -> Vec<ProgramErrorCount> {
        let of_program = |program: Program| {
            let of_cpus = self.errors.get(&(program as u32), 0).ok();
            program.errors().iter().map(move |error| {
                let of_cpus = of_cpus.iter().flat_map(|of_cpus| of_cpus.iter());
                let count = of_cpus.map(|errors| errors.counts[*error as usize]).sum();
                ProgramErrorCount { program: program.name(), reason: error.name(), count }
            })
        };
        Program::ALL.into_iter().flat_map(of_program).collect()
    }

    fn prefilter(&self) -> Option<PrefilterFill> {
        Some(lock(&self.prefilter).fill())
    }

    fn services(&self) -> Vec<ServiceCount> {
        self.services.read().unwrap_or_else(|error| {
            tracing::debug!(%error, "cannot read the counts of Services: the metrics of this scrape do not have them");
            Vec::new()
        })
    }
}
