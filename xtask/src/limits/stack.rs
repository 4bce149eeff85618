//! Computes the stack of a program as the verifier counts it (`check_max_stack_depth` in
//! kernel/bpf/verifier.c).
//!
//! A frame is as deep as the deepest byte that any instruction reaches, rounded up. The frames of a
//! chain of calls add up. The verifier follows the paths that it walks; this module looks at all
//! instructions, so it may count more. It refuses arithmetic on frame addresses that it cannot
//! follow. An address that is stored in memory, or passed to a function, counts where it is formed.
//! Accesses below it after a reload, or in that function, are not seen: addresses of values are not
//! used in that way.

use anyhow::{Context as _, Result, bail};
use aya_obj::generated::bpf_insn;

use super::Frame;

/// The maximum stack of a program with all its calls, in bytes (`MAX_BPF_STACK`).
pub const STACK: u32 = 512;
/// The unit in which frames are counted, in bytes. Kernels since 6.8 use 16 if they compile
/// programs.
const ROUNDED: u32 = 32;
/// The maximum number of frames in a chain (`MAX_CALL_FRAMES`).
const FRAMES: usize = 8;
/// The maximum size in bytes of the frames above one that makes a tail call.
const BEFORE_TAIL_CALL: u32 = 256;

const CLASS: u8 = 0x07;
const LDX: u8 = 1;
const ST: u8 = 2;
const STX: u8 = 3;
const JMP: u8 = 5;
const JMP32: u8 = 6;
const ALU64: u8 = 7;
const OPERATION: u8 = 0xf0;
const BY_REGISTER: u8 = 0x08;
const ADD: u8 = 0x00;
const SUBTRACT: u8 = 0x10;
const MOVE: u8 = 0xb0;
const ALWAYS: u8 = 0x00;
const CALL: u8 = 0x80;
const EXIT: u8 = 0x90;
/// The opcode of a 64-bit load, which takes two instructions.
const LOAD_IMMEDIATE: u8 = 0x18;
/// The source register of a load or call whose immediate value is a function.
const IS_FUNCTION: u8 = 4;
const IS_LOCAL_CALL: u8 = 1;
/// The number of the helper `bpf_tail_call`.
const TAIL_CALL: i32 = 12;
const FRAME_POINTER: usize = 10;

/// The functions of a linked program. The first is its entry.
#[derive(Debug)]
pub(super) struct Functions(Vec<Function>);

#[derive(Debug)]
struct Function {
    frame: Frame,
    /// The functions that it calls, or passes to a helper, by index in the list.
    calls: Vec<usize>,
    makes_tail_call: bool,
}

impl Functions {
    /// Splits a program into functions. `starts` has the first instruction and the name of each.
    pub(super) fn of(instructions: &[bpf_insn], starts: &[(usize, &str)]) -> Result<Self> {
        let mut starts = starts.to_vec();
        starts.sort_unstable();
        let ends = starts.iter().skip(1).map(|(start, _)| *start).chain([instructions.len()]);
        let function = |((start, name), end): (&(usize, &str), usize)| {
            let body =
                instructions.get(*start..end).with_context(|| format!("{name} starts after the end"))?;
            let callee = |(at, insn): (usize, bpf_insn)| {
                let callee = target(start + at, insn.imm);
                let found = starts.iter().position(|(start, _)| Some(*start) == callee);
                found.with_context(|| {
                    format!("{name} calls an address that is no function, at instruction {}", start + at)
                })
            };
            let calls = (body.iter().copied().enumerate())
                .filter(|(_, insn)| is_local_call(*insn))
                .map(callee)
                .collect::<Result<_>>()?;
            let depth = depth(body).with_context(|| format!("cannot compute the stack of {name}"))?;
            // An empty frame counts too.
            let bytes = depth.max(1).next_multiple_of(ROUNDED);
            let frame = Frame { function: (*name).to_owned(), bytes };
            Ok(Function { frame, calls, makes_tail_call: body.iter().copied().any(is_tail_call) })
        };
        Ok(Self(starts.iter().zip(ends).map(function).collect::<Result<_>>()?))
    }

    /// Returns the chain of calls with the deepest stack. Returns an error if a kernel would refuse
    /// any chain.
    pub(super) fn deepest(&self) -> Result<Vec<Frame>> {
        let mut deepest = Vec::new();
        self.walk(0, &mut Vec::new(), &mut deepest)?;
        let bytes = self.bytes(&deepest);
        if bytes > STACK {
            bail!("it needs {bytes} bytes of stack, and the limit is {STACK}: {}", self.words(&deepest));
        }
        Ok(deepest.iter().map(|&function| self.0[function].frame.clone()).collect())
    }

    fn walk(&self, function: usize, path: &mut Vec<usize>, deepest: &mut Vec<usize>) -> Result<()> {
        let callee = &self.0[function];
        let before = self.bytes(path);
        if path.contains(&function) {
            bail!("{} calls itself: {}", callee.frame.function, self.words(path));
        }
        if callee.makes_tail_call && !path.is_empty() && before >= BEFORE_TAIL_CALL {
            bail!(
                "{} makes a tail call below frames of {before} bytes, and they must be smaller than {BEFORE_TAIL_CALL}: {}",
                callee.frame.function,
                self.words(path)
            );
        }
        path.push(function);
        if path.len() > FRAMES {
            bail!("{} calls are {} deep, and the limit is {FRAMES}", self.words(path), path.len());
        }
        if before + callee.frame.bytes > self.bytes(deepest) {
            deepest.clone_from(path);
        }
        for &next in &callee.calls {
            self.walk(next, path, deepest)?;
        }
        path.pop();
        Ok(())
    }

    fn bytes(&self, path: &[usize]) -> u32 {
        path.iter().map(|&function| self.0[function].frame.bytes).sum()
    }

    fn words(&self, path: &[usize]) -> String {
        let words = path.iter().map(|&function| {
            let Frame { function, bytes } = &self.0[function].frame;
            format!("{function} {bytes}")
        });
        words.collect::<Vec<_>>().join(" + ")
    }
}

const fn class(insn: bpf_insn) -> u8 {
    insn.code & CLASS
}

const fn operation(insn: bpf_insn) -> u8 {
    insn.code & OPERATION
}

fn is_call(insn: bpf_insn) -> bool {
    class(insn) == JMP && operation(insn) == CALL
}

/// Returns true if the instruction calls a function of the program, or loads its address (for
/// `bpf_loop`, which calls it).
fn is_local_call(insn: bpf_insn) -> bool {
    let source = insn.src_reg();
    is_call(insn) && source == IS_LOCAL_CALL || insn.code == LOAD_IMMEDIATE && source == IS_FUNCTION
}

fn is_tail_call(insn: bpf_insn) -> bool {
    is_call(insn) && insn.src_reg() == 0 && insn.imm == TAIL_CALL
}

/// Returns the target of a jump, relative to the next instruction.
fn target(at: usize, further: i32) -> Option<usize> {
    at.checked_add(1)?.checked_add_signed(isize::try_from(further).ok()?)
}

/// Registers that hold frame addresses: the lowest offset of all paths, in bytes from the upper end
/// of the frame (negative).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Registers([Option<i32>; FRAME_POINTER]);

impl Registers {
    fn get(&self, register: u8) -> Option<i32> {
        if usize::from(register) == FRAME_POINTER { Some(0) } else { *self.0.get(usize::from(register))? }
    }

    fn set(&mut self, register: u8, value: Option<i32>) {
        if let Some(held) = self.0.get_mut(usize::from(register)) {
            // An address that moves down in a loop is refused anyway, so it need not be followed.
            *held = value.map(|value| value.max(-2 * STACK.cast_signed()));
        }
    }

    /// Merges the registers of two paths that meet.
    fn join(mut self, other: Self) -> Self {
        for (mine, its) in self.0.iter_mut().zip(other.0) {
            *mine = match (*mine, its) {
                (Some(a), Some(b)) => Some(a.min(b)),
                (a, b) => a.or(b),
            };
        }
        self
    }

    /// Returns true if an instruction adds a value that is not followed to a frame address, or
    /// subtracts one.
    fn loses_address(&self, insn: bpf_insn) -> bool {
        let is_by_register = insn.code & BY_REGISTER != 0;
        let is_lost = match operation(insn) {
            ADD => is_by_register,
            SUBTRACT => true,
            _ => false,
        };
        let from = is_by_register.then(|| self.get(insn.src_reg())).flatten();
        class(insn) == ALU64 && is_lost && self.get(insn.dst_reg()).or(from).is_some()
    }

    /// Executes an instruction. Returns the byte of the frame that it reaches, if any.
    fn step(&mut self, insn: bpf_insn) -> Option<i32> {
        let (to, from) = (insn.dst_reg(), insn.src_reg());
        let reached = |base: Option<i32>| base.map(|base| base + i32::from(insn.off));
        match class(insn) {
            LDX => {
                let place = reached(self.get(from));
                self.set(to, None);
                place
            }
            ST | STX => reached(self.get(to)),
            ALU64 => {
                let is_by_register = insn.code & BY_REGISTER != 0;
                let value = match operation(insn) {
                    MOVE if is_by_register => self.get(from),
                    ADD if !is_by_register => self.get(to).map(|base| base.saturating_add(insn.imm)),
                    _ => None,
                };
                self.set(to, value);
                value
            }
            JMP if operation(insn) == CALL => {
                (0..=5).for_each(|register| self.set(register, None));
                None
            }
            JMP | JMP32 => None,
            // Other loads, and 32-bit arithmetic, yield no frame address.
            _ => {
                self.set(to, None);
                None
            }
        }
    }
}

/// Returns how deep a function reaches into its frame, in bytes. Every address that is formed
/// counts, whether it is used here, by a helper or by another function.
fn depth(body: &[bpf_insn]) -> Result<u32> {
    let mut depth = 0;
    let mut known: Vec<Option<Registers>> = vec![None; body.len()];
    let mut open = vec![(0, Registers::default())];
    while let Some((at, registers)) = open.pop() {
        let Some(&insn) = body.get(at) else { continue };
        let joined = known[at].map_or(registers, |known| known.join(registers));
        if known[at].replace(joined) == Some(joined) {
            continue;
        }
        if joined.loses_address(insn) {
            bail!("instruction {at} does arithmetic on a frame address that cannot be followed");
        }
        let mut after = joined;
        let reached = after.step(insn).map_or(0, |place| place.min(0).unsigned_abs());
        depth = depth.max(reached);
        open.extend(successors(at, insn).into_iter().flatten().map(|next| (next, after)));
    }
    Ok(depth)
}

/// Returns the possible next instructions.
fn successors(at: usize, insn: bpf_insn) -> [Option<usize>; 2] {
    let jump = target(at, insn.off.into());
    match (class(insn), operation(insn)) {
        (JMP, EXIT) => [None, None],
        (JMP, ALWAYS) => [jump, None],
        (JMP32, ALWAYS) => [target(at, insn.imm), None],
        (JMP, CALL) => [Some(at + 1), None],
        (JMP | JMP32, _) => [Some(at + 1), jump],
        _ if insn.code == LOAD_IMMEDIATE => [Some(at + 2), None],
        _ => [Some(at + 1), None],
    }
}
