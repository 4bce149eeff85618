//! The code on the host and the programs in the kernel agree on random frames: on the output, byte
//! by byte, and on what they write to the maps.

use std::{
    cell::Cell,
    time::{Duration, Instant},
};

use proptest::{
    prelude::*,
    test_runner::{FileFailurePersistence, TestCaseResult, TestRunner},
};
use proxy_common::{
    layout::{Direction, Flow, ProgramError},
    testing::{
        ChecksumState, ConfigMaps, FrameResult, FrameRunner as _, MemoryMaps, StateMaps,
        generate::{self, Step},
    },
};

use crate::kernel::Kernel;

pub(crate) const TESTS: &[(&str, fn())] =
    &[("differential::host_and_kernel_agree_on_any_frame", host_and_kernel_agree_on_any_frame)];

fn host_and_kernel_agree_on_any_frame() {
    let persistence = FileFailurePersistence::Direct(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/ebpf_frames/differential.proptest-regressions"
    ));
    let config = ProptestConfig { failure_persistence: Some(Box::new(persistence)), ..Default::default() };
    let cases = config.cases;
    let mut runner = TestRunner::new(config);
    let left_out = Cell::new(0);
    let result = runner.run(&generate::case(), |(config, steps)| agree(&config, &steps, &left_out));
    if let Err(error) = result {
        panic!("{error}");
    }
    let left_out = left_out.get();
    assert!(left_out * 10 <= cases, "{left_out} of {cases} cases took too long to compare the clocks");
}

/// Nothing depends on a time below a second.
const SOON: Duration = Duration::from_millis(900);

fn agree(config: &ConfigMaps, steps: &[Step], left_out: &Cell<u32>) -> TestCaseResult {
    // If a busy machine takes so long that the two clocks differ, the case starts again.
    for _ in 0..3 {
        let result = compare(config, steps);
        if !matches!(result, Ok(None)) {
            return result.map(drop);
        }
    }
    left_out.set(left_out.get() + 1);
    Ok(())
}

/// Returns `None` if the case took too long to compare the clocks.
fn compare(config: &ConfigMaps, steps: &[Step]) -> Result<Option<()>, TestCaseError> {
    let mut kernel = Kernel::lock();
    let mut memory = MemoryMaps { random_step: 0, ..MemoryMaps::default() };
    kernel.set_state(&StateMaps::default());
    kernel.configure(config);
    memory.configure(config);
    let start = now();
    for step in steps {
        match step {
            Step::Configure(config) => {
                kernel.configure(config);
                memory.configure(config);
            }
            Step::Wait(seconds) => {
                // Entries cannot be older than the uptime of the kernel.
                if let Some(state) = kernel.state().aged(*seconds) {
                    kernel.set_state(&state);
                    let state = memory.state().aged(*seconds).expect("the clock is days old");
                    memory.set_state(&state);
                }
            }
            Step::Pass(hook, input) => {
                // The kernel forgets the sum of an answer, and then reports that the sum is wrong.
                let refuses = memory.config.node.refusing != 0;
                if refuses && input.checksum == ChecksumState::Complete {
                    continue;
                }
                let Some(output) = kernel.run(*hook, input) else { continue };
                let random = random_number(&kernel.state(), &memory.state());
                memory.random.set(random);
                let expected = memory.run(*hook, input).expect("memory runs every frame");
                if start.elapsed() > SOON {
                    return Ok(None);
                }
                prop_assert_eq!(output, as_kernel_shows(expected), "at {:?}", hook);
                let [in_kernel, on_host] = [kernel.state(), memory.state()].map(comparable);
                prop_assert_eq!(in_kernel, on_host, "after {:?}", input);
            }
        }
    }
    Ok(Some(()))
}

/// Returns a result without what the kernel does not show of an answer.
fn as_kernel_shows(result: FrameResult) -> FrameResult {
    let FrameResult { input, bytes, mark, outcome, .. } = result;
    FrameResult::of_kernel(&input, bytes, mark, outcome)
}

/// Returns what both have to agree on. Times differ. The prefilter of the kernel keeps more bits,
/// so the kernel counts more truncated segments as errors.
fn comparable(state: StateMaps) -> StateMaps {
    let mut state = state.without_times();
    state.errors[ProgramError::Malformed as usize] = 0;
    state
}

/// Returns the random number that the kernel used: the client port of its new flow.
fn random_number(in_kernel: &StateMaps, on_host: &StateMaps) -> u32 {
    let ends = |flow: &Flow| (flow.source, flow.destination);
    let new = in_kernel.all_flows().find(|(key, flow)| {
        key.direction == Direction::Original as u8 && on_host.flow(key).map(ends) != Some(ends(flow))
    });
    let [low, high] = new.map_or(0, |(_, flow)| flow.source.port).to_ne_bytes();
    u32::from_ne_bytes([low, high, 0, 0])
}

#[expect(clippy::disallowed_methods, reason = "the test measures whether the two clocks can differ")]
fn now() -> Instant {
    Instant::now()
}
