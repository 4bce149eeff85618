//! Frames that pass the link programs' code, with maps in memory.
//!
//! The first byte of an input chooses the node and its Services. Then come steps: a byte with hook,
//! mark and checksum state, two bytes with the length of the frame, and the frame.

use std::sync::LazyLock;

use proptest::{
    strategy::{Strategy as _, ValueTree as _},
    test_runner::TestRunner,
};
use proxy_common::{
    link::Outcome,
    testing::{
        Addresses, ChecksumState, ConfigMaps, FrameRunner as _, Hook, InputFrame, MemoryMaps, StateMaps,
        generate, has_correct_checksums,
    },
};

/// Nodes with different Services, of both families in turn.
const NODES: usize = 32;
/// A step that cannot be a frame: this much time passes.
const WAIT_SECONDS: u64 = 25;
/// The longest sequence, so that an input stays quick.
const MAX_STEPS: usize = 32;

static CONFIGS: LazyLock<Vec<ConfigMaps>> = LazyLock::new(|| {
    let mut runner = TestRunner::deterministic();
    let families = Addresses::BOTH.into_iter().cycle().take(NODES);
    let config = |ip| generate::config(ip).new_tree(&mut runner).expect("no filters").current();
    families.map(config).collect()
});

pub(crate) fn run(input: &[u8]) {
    let Some((node, mut rest)) = input.split_first() else { return };
    let config = CONFIGS[usize::from(*node) % NODES].clone();
    let mut memory = MemoryMaps { config, ..MemoryMaps::default() };
    for _ in 0..MAX_STEPS {
        let Some((&[control, low, high], after)) = rest.split_first_chunk() else { return };
        let length = usize::from(u16::from_le_bytes([low, high]));
        let frame;
        (frame, rest) = after.split_at(length.min(after.len()));
        if control & 0x80 == 0 {
            pass(&mut memory, control, frame);
        } else {
            let state = memory.state();
            if let Some(aged) = StateMaps::aged(state, WAIT_SECONDS) {
                memory.set_state(&aged);
            }
        }
    }
}

/// Passes a frame. Its length stays, correct checksums stay correct, and a node without Services
/// leaves it alone.
fn pass(memory: &mut MemoryMaps, control: u8, frame: &[u8]) {
    let hook = if control & 1 == 0 { Hook::Ingress } else { Hook::Egress };
    let checksum = if control & 2 == 0 { ChecksumState::None } else { ChecksumState::Complete };
    let mark = u32::from(control >> 2 & 3) << 14;
    let input = InputFrame { mark, checksum, ..InputFrame::new(frame.to_vec()) };
    let result = memory.run(hook, &input).expect("memory runs every frame");
    assert_eq!(result.bytes.len(), frame.len());
    if has_correct_checksums(frame) == Some(true) && result.outcome == Outcome::Proceed {
        assert_eq!(has_correct_checksums(&result.bytes), Some(true), "{result:?}");
    }
    let alone = MemoryMaps::default().run(hook, &input).expect("memory runs every frame");
    assert_eq!((alone.outcome, &*alone.bytes), (Outcome::Proceed, frame));
}
