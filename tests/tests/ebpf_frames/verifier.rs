//! What the programs cost the verifier, which is most of the time that a start takes.

use crate::kernel::Kernel;

pub(crate) const TESTS: &[(&str, fn())] =
    &[("verifier::each_program_is_checked_in_few_instructions", each_program_is_checked_in_few_instructions)];

/// The kernel refuses a program of 1,000,000 instructions, counted each time that the verifier
/// follows one. The largest, `shunt_in_eth`, has 377,000.
const MOST: u32 = 400_000;

/// Kernels before 5.16 do not tell the number.
fn each_program_is_checked_in_few_instructions() {
    for (name, instructions) in Kernel::lock().verified_instructions() {
        println!("{name}: {instructions}");
        assert!(instructions < MOST, "{name}: {instructions}, and {MOST} is the limit of this test");
    }
}
