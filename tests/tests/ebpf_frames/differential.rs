//! The decisions on the host and the programs in the kernel agree on any frame: on what becomes of it, byte by byte, and on what is
//! noted of it.

use std::time::{Duration, Instant};

use proptest::{
    prelude::*,
    test_runner::{FileFailurePersistence, TestCaseResult, TestRunner},
};
use proxy_common::{
    layout::{Direction, Flow, ProgramError},
    testing::{
        Bed as _, Memory, Noted, World,
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
    let mut runner = TestRunner::new(config);
    let agreed = runner.run(&generate::case(), |(world, steps)| agree(&world, &steps));
    if let Err(error) = agreed {
        panic!("{error}");
    }
}

/// Below a second nothing depends on the time.
const SOON: Duration = Duration::from_millis(900);

fn agree(world: &World, steps: &[Step]) -> TestCaseResult {
    // What was begun on a busy machine, and took too long for the clocks to be taken for one, is begun again.
    for _ in 0..10 {
        let agreed = compare(world, steps);
        if !matches!(agreed, Ok(None)) {
            return agreed.map(drop);
        }
    }
    Err(TestCaseError::reject("a few packets take more than a second"))
}

/// None if it took too long to tell.
fn compare(world: &World, steps: &[Step]) -> Result<Option<()>, TestCaseError> {
    let mut kernel = Kernel::lock();
    let mut memory = Memory { random_step: 0, ..Memory::default() };
    kernel.set_noted(&Noted::default());
    kernel.configure(world);
    memory.configure(world);
    let begun = now();
    for step in steps {
        match step {
            Step::Configure(world) => {
                kernel.configure(world);
                memory.configure(world);
            }
            Step::Wait(seconds) => {
                // A machine that just came up cannot look back.
                if let Some(noted) = kernel.noted().aged(*seconds) {
                    kernel.set_noted(&noted);
                    let noted = memory.noted().aged(*seconds).expect("its clock began days ago");
                    memory.set_noted(&noted);
                }
            }
            Step::Pass(hook, given) => {
                let Some(came) = kernel.run(*hook, given) else { continue };
                let said = chance(&kernel.noted(), &memory.noted());
                memory.random.set(said);
                let wanted = memory.run(*hook, given).expect("memory takes everything");
                if begun.elapsed() > SOON {
                    return Ok(None);
                }
                prop_assert_eq!(came, wanted, "at {:?}", hook);
                let [in_kernel, on_host] = [kernel.noted(), memory.noted()].map(comparable);
                prop_assert_eq!(in_kernel, on_host, "after {:?}", given);
            }
        }
    }
    Ok(Some(()))
}

/// What they have to agree on: not on times, nor on whether a segment that is cut short may have been for a Service, of which the
/// kernel's bitmap remembers more.
fn comparable(noted: Noted) -> Noted {
    let mut noted = noted.timeless();
    noted.errors[ProgramError::Malformed as usize] = 0;
    noted
}

/// What chance must have said in the kernel: the client port of the flow that is new there, or was placed anew, if that was
/// changed.
fn chance(in_kernel: &Noted, on_host: &Noted) -> u32 {
    let ends = |flow: &Flow| (flow.source, flow.destination);
    let new = in_kernel.flows.iter().find(|(key, flow)| {
        key.direction == Direction::Original as u8 && on_host.flows.get(key).map(ends) != Some(ends(flow))
    });
    let [low, high] = new.map_or(0, |(_, flow)| flow.source.port).to_ne_bytes();
    u32::from_ne_bytes([low, high, 0, 0])
}

#[expect(clippy::disallowed_methods, reason = "whether the two clocks can be taken for one is measured")]
fn now() -> Instant {
    Instant::now()
}
