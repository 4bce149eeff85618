//! The dispatcher program: one function for each component program, which replaces it, and a
//! function that calls them in turn.
//!
//! It is made at run time. A compiled one would be in shunt's own object, with its maps and
//! constants, and libxdp wants a dispatcher with exactly one map.

use std::{
    io,
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd, RawFd},
};

use super::{
    super::super::{
        instructions::{instruction, load_constant, op},
        syscall::{self, FunctionStart, Functions},
    },
    config::{ACTIONS, Config, HAS_FRAGS, MAX_COMPONENTS, NO_PROGRAM},
};

/// The name by which libxdp knows dispatchers (lib/libxdp/libxdp.c, `check_dispatcher_version`).
pub(super) const NAME: &str = "xdp_dispatcher";
const CONSTANTS: &str = "xdp_disp.rodata";

const XDP_PASS: i32 = 2;

/// Instructions before the first call, of a call, after the last one, and of a function.
const START: usize = 1;
const CALL: usize = 9;
const END: usize = 2;
const FUNCTION: usize = 4;

/// The types, by their number: `int`, `struct xdp_md`, a pointer to that, the type of all
/// functions, and the functions.
const INT: u32 = 1;
const CONTEXT: u32 = 2;
const POINTER: u32 = 3;
const PROTOTYPE: u32 = 4;
const DISPATCHER: u32 = 5;
/// The length of the header in front of them.
const HEADER: u32 = 24;

/// Returns the type of the function that a component program replaces.
pub(super) fn function(component: usize) -> u32 {
    DISPATCHER + 1 + u32::try_from(component).unwrap_or(u32::MAX - DISPATCHER - 1)
}

/// Returns the name of that function.
pub(super) fn function_name(component: usize) -> String {
    format!("prog{component}")
}

/// Loads a dispatcher. It takes frames in several pieces if all component programs do, and the
/// kernel knows such programs (5.18).
pub(super) fn load(config: &Config) -> io::Result<OwnedFd> {
    if config.has_frags()
        && let Ok(loaded) = load_with(config, true)
    {
        return Ok(loaded);
    }
    load_with(config, false)
}

fn load_with(config: &Config, takes_frags: bool) -> io::Result<OwnedFd> {
    let types = syscall::load_types(&types())?;
    let constants = syscall::create_constants(CONSTANTS, &config.bytes(takes_frags))?;
    let components = config.calls.len();
    let functions = Functions { types: types.as_fd(), starts: &starts(components) };
    let flags = if takes_frags { HAS_FRAGS } else { 0 };
    syscall::load_xdp_functions(NAME, &code(components, constants.as_raw_fd()), functions, flags)
}

/// Returns the instructions. `constants` is the descriptor of a map with the constants.
fn code(components: usize, constants: RawFd) -> Vec<u64> {
    let plain = |operation, registers, constant| instruction(operation, registers, 0, constant);
    // Register 6 is the context.
    let mut code = vec![plain(op::MOVE, [6, 1], 0)];
    for component in 0..components {
        code.push(plain(op::MOVE, [1, 6], 0));
        let next = code.len() + 1;
        let distance = i32::try_from(function_start(components, component) - next).unwrap_or(i32::MAX);
        code.push(plain(op::CALL, [0, op::FUNCTION], distance));
        let actions = u64::try_from(ACTIONS + 4 * component).unwrap_or(0);
        let map = u64::from(constants.cast_unsigned());
        code.extend(load_constant(1, op::MAP_VALUE, actions << 32 | map));
        code.extend([
            instruction(op::LOAD_U32, [1, 1], 0, 0),
            plain(op::MOVE_CONSTANT_32, [2, 0], 1),
            plain(op::SHIFT_LEFT_32, [2, 0], 0),
            instruction(op::JUMP_IF_SET, [1, 2], 1, 0),
            plain(op::EXIT, [0, 0], 0),
        ]);
    }
    code.extend([plain(op::MOVE_CONSTANT, [0, 0], XDP_PASS), plain(op::EXIT, [0, 0], 0)]);
    for _ in 0..components {
        // Changes nothing. A program that may move the end of the frame can only replace a function
        // that may do it, too (81f6d0530ba0).
        code.push(plain(op::MOVE_CONSTANT, [2, 0], 0));
        code.push(plain(op::CALL, [0, 0], op::XDP_ADJUST_TAIL));
        code.push(plain(op::MOVE_CONSTANT, [0, 0], NO_PROGRAM.into()));
        code.push(plain(op::EXIT, [0, 0], 0));
    }
    code
}

const fn function_start(components: usize, component: usize) -> usize {
    START + CALL * components + END + FUNCTION * component
}

fn starts(components: usize) -> Vec<FunctionStart> {
    let start = |component| FunctionStart {
        instruction: u32::try_from(function_start(components, component)).unwrap_or(u32::MAX),
        function: function(component),
    };
    let first = FunctionStart { instruction: 0, function: DISPATCHER };
    [first].into_iter().chain((0..components).map(start)).collect()
}

/// Returns the types in the format BTF (the kernel's Documentation/bpf/btf.rst). The functions are
/// global: the kernel replaces no others.
fn types() -> Vec<u8> {
    const VERSION: u8 = 1;
    /// `BTF_INT_SIGNED`, and the number of bits.
    const SIGNED: u32 = 1 << 24 | 32;
    const GLOBAL: u32 = 1;
    let kind = |kind: u32, details: u32| kind << 24 | details;
    let mut strings = Strings(vec![0]);
    let mut words = vec![strings.add("int"), kind(1, 0), 4, SIGNED];
    // The kernel knows the context by its name, and needs no members.
    words.extend([strings.add("xdp_md"), kind(4, 0), 24]);
    words.extend([0, kind(2, 0), CONTEXT]);
    words.extend([0, kind(13, 1), INT, strings.add("ctx"), POINTER]);
    let functions = (0..MAX_COMPONENTS).map(function_name);
    for name in [NAME.to_owned()].into_iter().chain(functions) {
        words.extend([strings.add(&name), kind(12, GLOBAL), PROTOTYPE]);
    }
    let [types, names] = [words.len() * 4, strings.0.len()].map(|length| u32::try_from(length).unwrap_or(0));
    let mut bytes = 0xeb9f_u16.to_ne_bytes().to_vec();
    bytes.extend([VERSION, 0]);
    bytes.extend([HEADER, 0, types, types, names].into_iter().chain(words).flat_map(u32::to_ne_bytes));
    bytes.extend(strings.0);
    bytes
}

/// The names of types, each with a zero behind it.
struct Strings(Vec<u8>);

impl Strings {
    /// Returns the offset of the name.
    fn add(&mut self, name: &str) -> u32 {
        let offset = u32::try_from(self.0.len()).unwrap_or(0);
        self.0.extend(name.bytes().chain([0]));
        offset
    }
}

#[cfg(test)]
mod tests {
    use super::{super::config::Call, *};
    use crate::kernel::bpf::test_run::test_run_xdp;

    #[test]
    fn functions_begin_where_the_dispatcher_calls_them() {
        for components in 1..=MAX_COMPONENTS {
            let code = code(components, 3);
            let calls = code.iter().enumerate().filter(|(_, word)| **word & 0xffff == 0x1085);
            let called: Vec<usize> = calls.map(|(at, word)| at + 1 + (*word >> 32) as usize).collect();
            let begin = |start: &FunctionStart| start.instruction as usize;
            assert_eq!(called, starts(components).iter().skip(1).map(begin).collect::<Vec<_>>());
            assert_eq!(code.len(), function_start(components, components));
        }
    }

    #[test]
    fn types_of_functions_have_their_names() {
        let bytes = types();
        let words: Vec<u32> = bytes.as_chunks().0.iter().map(|word| u32::from_ne_bytes(*word)).collect();
        let (header, types) = (HEADER as usize / 4, words[3] as usize / 4);
        let names = &bytes[header * 4 + types * 4..];
        let name = |offset: u32| names[offset as usize..].split(|byte| *byte == 0).next();
        let functions = words[header..header + types].rchunks_exact(3).take(1 + MAX_COMPONENTS);
        let found: Vec<&[u8]> = functions.filter_map(|function| name(function[0])).collect();
        let expected = (0..MAX_COMPONENTS).rev().map(function_name).chain([NAME.to_owned()]);
        assert!(found.into_iter().eq(expected.map(String::into_bytes)));
    }

    #[test]
    fn dispatcher_without_programs_in_its_functions_passes_a_frame() {
        for components in [0, 1, 2, MAX_COMPONENTS] {
            for version in [2, 3] {
                let call = Call { actions: 1 << NO_PROGRAM, priority: 50, flags: 0 };
                let config = Config { version, calls: vec![call; components] };
                let program = load(&config).expect("as root");
                let mut frame = vec![0; 64];
                assert_eq!(test_run_xdp(program.as_fd(), &mut frame).expect("run"), 2);
            }
        }
    }

    #[test]
    fn action_that_is_not_in_the_list_ends_the_run() {
        let call = |actions| Call { actions, priority: 50, flags: 0 };
        let config = Config { version: 2, calls: vec![call(1 << NO_PROGRAM), call(1 << 2)] };
        let program = load(&config).expect("as root");
        let code = test_run_xdp(program.as_fd(), &mut vec![0; 64]).expect("run");
        assert_eq!(code, u32::from(NO_PROGRAM));
    }
}
