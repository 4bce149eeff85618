//! Tests with small programs and BTF, byte by byte, with one fault each.

use aya_obj::{copy_instructions, generated::bpf_insn};

use super::{Frame, btf::Btf, check_parameters, short, stack::Functions};

const EXIT: [u8; 8] = [0x95, 0, 0, 0, 0, 0, 0, 0];

/// `r<to> = r10`.
const fn frame_pointer(to: u8) -> [u8; 8] {
    [0xbf, to | 0xa0, 0, 0, 0, 0, 0, 0]
}

/// `r<to> = r<from>`.
const fn copy(to: u8, from: u8) -> [u8; 8] {
    [0xbf, to | from << 4, 0, 0, 0, 0, 0, 0]
}

/// `r<to> += by`.
fn add(to: u8, by: i32) -> [u8; 8] {
    instruction(0x07, to, 0, 0, by)
}

/// `*(u64 *)(r<base> + offset) = r<from>`.
fn store(base: u8, offset: i16, from: u8) -> [u8; 8] {
    instruction(0x7b, base, from, offset, 0)
}

/// `r<to> = *(u64 *)(r<base> + offset)`.
fn load(to: u8, base: u8, offset: i16) -> [u8; 8] {
    instruction(0x79, to, base, offset, 0)
}

/// Calls the function that starts `further` instructions after the next one.
fn call(further: i32) -> [u8; 8] {
    instruction(0x85, 0, 1, 0, further)
}

fn helper(number: i32) -> [u8; 8] {
    instruction(0x85, 0, 0, 0, number)
}

/// `if r1 == 0 goto` `further` instructions after the next one.
fn jump(further: i16) -> [u8; 8] {
    instruction(0x15, 1, 0, further, 0)
}

fn instruction(code: u8, to: u8, from: u8, offset: i16, imm: i32) -> [u8; 8] {
    let mut bytes = [code, to | from << 4, 0, 0, 0, 0, 0, 0];
    bytes[2..4].copy_from_slice(&offset.to_le_bytes());
    bytes[4..].copy_from_slice(&imm.to_le_bytes());
    bytes
}

fn instructions(bytes: &[[u8; 8]]) -> Vec<bpf_insn> {
    copy_instructions(&bytes.concat()).unwrap()
}

/// Returns the frame sizes of the deepest chain, or the error.
fn deepest(bytes: &[[u8; 8]], starts: &[(usize, &str)]) -> Result<Vec<u32>, String> {
    let frames = Functions::of(&instructions(bytes), starts).and_then(|functions| functions.deepest());
    let frames = frames.map_err(|error| format!("{error:#}"))?;
    Ok(frames.iter().map(|Frame { bytes, .. }| *bytes).collect())
}

#[test]
fn frame_is_as_deep_as_its_deepest_access_rounded_up() {
    for (depth, bytes) in [(-8, 32), (-32, 32), (-40, 64), (-512, 512)] {
        assert_eq!(deepest(&[store(10, depth, 1), EXIT], &[(0, "entry")]), Ok(vec![bytes]), "{depth}");
        assert_eq!(deepest(&[load(0, 10, depth), EXIT], &[(0, "entry")]), Ok(vec![bytes]), "{depth}");
        let lent = [frame_pointer(2), add(2, depth.into()), helper(1), EXIT];
        assert_eq!(deepest(&lent, &[(0, "entry")]), Ok(vec![bytes]), "{depth}");
    }
    assert_eq!(deepest(&[EXIT], &[(0, "entry")]), Ok(vec![32]), "an empty frame counts too");
}

#[test]
fn access_below_a_copied_address_counts() {
    let copied = [frame_pointer(6), add(6, -16), copy(7, 6), helper(5), load(0, 7, -48), EXIT];
    assert_eq!(deepest(&copied, &[(0, "entry")]), Ok(vec![64]));
    let overwritten = [frame_pointer(1), add(1, -16), helper(5), add(1, -600), EXIT];
    assert_eq!(deepest(&overwritten, &[(0, "entry")]), Ok(vec![32]), "a call leaves nothing in r1");
}

#[test]
fn unknown_arithmetic_is_refused_on_frame_addresses_only() {
    let add_register = |to, from| instruction(0x0f, to, from, 0, 0);
    let subtract = |to, by| instruction(0x17, to, 0, 0, by);
    let subtract_register = |to, from| instruction(0x1f, to, from, 0, 0);
    for lost in [add_register(6, 7), add_register(7, 6), subtract(6, 16), subtract_register(6, 7)] {
        let error = deepest(&[frame_pointer(6), lost, EXIT], &[(0, "entry")]).unwrap_err();
        assert_eq!(
            error,
            "cannot compute the stack of entry: instruction 1 does arithmetic on a frame address that cannot be followed"
        );
        assert_eq!(deepest(&[lost, EXIT], &[(0, "entry")]), Ok(vec![32]), "numbers");
    }
}

#[test]
fn deeper_of_two_paths_counts() {
    let paths = [jump(2), frame_pointer(6), add(6, -100), load(0, 6, -8), EXIT];
    assert_eq!(deepest(&paths, &[(0, "entry")]), Ok(vec![128]));
    let endless = [frame_pointer(6), add(6, -8), jump(-2), load(0, 6, 0), EXIT];
    assert!(deepest(&endless, &[(0, "entry")]).unwrap_err().contains("the limit is 512"));
}

#[test]
fn deepest_chain_of_calls_counts_not_the_sum() {
    let program = [
        &[store(10, -64, 1), call(2), call(4), EXIT][..],
        &[store(10, -96, 1), call(3), EXIT],
        &[store(10, -160, 1), EXIT],
        &[store(10, -32, 1), EXIT],
    ]
    .concat();
    let starts = [(0, "entry"), (4, "a"), (7, "b"), (9, "c")];
    assert_eq!(deepest(&program, &starts), Ok(vec![64, 160]));
}

#[test]
fn chain_over_the_limit_is_refused_with_its_frames() {
    let program = [store(10, -256, 1), call(1), EXIT, store(10, -257, 1), EXIT];
    let error = deepest(&program, &[(0, "entry"), (3, "callee")]).unwrap_err();
    assert_eq!(error, "it needs 544 bytes of stack, and the limit is 512: entry 256 + callee 288");
    let program = [store(10, -256, 1), call(1), EXIT, store(10, -256, 1), EXIT];
    assert_eq!(deepest(&program, &[(0, "entry"), (3, "callee")]), Ok(vec![256, 256]));
}

#[test]
fn function_passed_to_a_helper_counts_as_called() {
    let lend = instruction(0x18, 2, 4, 0, 4);
    let program = [lend, [0; 8], helper(181), store(10, -8, 1), EXIT, store(10, -100, 1), EXIT];
    assert_eq!(deepest(&program, &[(0, "entry"), (5, "callback")]), Ok(vec![32, 128]));
}

#[test]
fn recursive_function_is_refused() {
    let error = deepest(&[call(1), EXIT, call(-1), EXIT], &[(0, "entry"), (2, "again")]).unwrap_err();
    assert_eq!(error, "again calls itself: entry 32 + again 32");
}

#[test]
fn too_many_levels_of_calls_are_refused() {
    let levels = |count: usize| {
        let bytes: Vec<[u8; 8]> = (1..count).flat_map(|_| [call(1), EXIT]).chain([EXIT]).collect();
        let starts: Vec<(usize, &str)> = (0..count).map(|n| (2 * n, "f")).collect();
        deepest(&bytes, &starts)
    };
    assert_eq!(levels(8), Ok(vec![32; 8]));
    assert!(levels(9).unwrap_err().ends_with("calls are 9 deep, and the limit is 8"));
}

#[test]
fn tail_call_limits_the_stack_above_it() {
    let program = |depth| [store(10, depth, 1), call(1), EXIT, helper(12), EXIT];
    let starts = [(0, "entry"), (3, "tail")];
    assert_eq!(deepest(&program(-224), &starts), Ok(vec![224, 32]));
    let error = deepest(&program(-256), &starts).unwrap_err();
    assert!(error.contains("tail makes a tail call below frames of 256 bytes"), "{error}");
    assert_eq!(deepest(&[store(10, -512, 1), helper(12), EXIT], &[(0, "entry")]), Ok(vec![512]));
}

/// Returns BTF with a function of `parameters` parameters, after a type of each other size.
fn btf(parameters: u32) -> Vec<u8> {
    let strings = b"\0send_3C_Eth_3E_\0";
    let int = [0, 1 << 24, 4, 32];
    let array = [0, 3 << 24, 0, 1, 1, 2];
    let structure = [0, 4 << 24 | 1, 4, 0, 1, 0];
    let prototype = [0, 13 << 24 | parameters, 1];
    let function = [1, 12 << 24, 4];
    let types =
        [&int[..], &array, &structure, &prototype, &vec![0; 2 * parameters as usize], &function].concat();
    let length = u32::try_from(types.len() * 4).unwrap();
    let header = [24, 0, length, length, u32::try_from(strings.len()).unwrap()];
    let words = header.iter().chain(&types).flat_map(|word| word.to_le_bytes());
    [0x9f, 0xeb, 1, 0].into_iter().chain(words).chain(strings.iter().copied()).collect()
}

#[test]
fn function_with_six_parameters_is_refused_by_name() {
    check_parameters(&Btf::parse(&btf(5)).unwrap()).unwrap();
    let error = check_parameters(&Btf::parse(&btf(6)).unwrap()).unwrap_err().to_string();
    assert!(error.starts_with("function send has 6 parameters, and the kernel takes 5 at most"), "{error}");
}

#[test]
fn truncated_btf_is_an_error() {
    let whole = btf(5);
    assert_eq!(Btf::parse(&whole).unwrap().name(5).unwrap(), "send_3C_Eth_3E_");
    for length in 0..whole.len() {
        assert!(Btf::parse(&whole[..length]).is_err(), "{length} bytes of it");
    }
}

#[test]
fn function_name_is_shown_without_type_parameters() {
    assert_eq!(short("transport_3C_shunt_ebpf_3A__3A_ctx"), "transport");
    assert_eq!(short("shunt_in_eth"), "shunt_in_eth");
}
