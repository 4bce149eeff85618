//! Reads the functions in an object's BTF: their names and numbers of parameters.
//!
//! The format is in the kernel's Documentation/bpf/btf.rst.

use std::collections::HashMap;

use anyhow::{Context as _, Result, bail};

const MAGIC: u16 = 0xeb9f;
const FUNC: u32 = 12;
const FUNC_PROTO: u32 = 13;
/// The size in bytes of the part that all types have.
const COMMON: usize = 12;

/// The functions of an object, and the strings with their names.
#[derive(Debug)]
pub(super) struct Btf<'a> {
    strings: &'a [u8],
    /// By type number of a function: offset of its name, and type number of its prototype.
    functions: HashMap<u32, (usize, u32)>,
    /// By type number of a prototype: its number of parameters.
    prototypes: HashMap<u32, usize>,
}

impl<'a> Btf<'a> {
    /// Reads a little-endian `.BTF` section.
    pub(super) fn parse(bytes: &'a [u8]) -> Result<Self> {
        let half = |at| bytes.get(at..at + 2).and_then(|half| half.try_into().ok()).map(u16::from_le_bytes);
        if half(0) != Some(MAGIC) {
            bail!("it does not start with {MAGIC:#x}");
        }
        let [header, types, types_length, strings, strings_length] =
            [4, 8, 12, 16, 20].map(|at| word(bytes, at));
        let header = header?;
        let part = |offset: Result<usize>, length: Result<usize>| {
            let begin = header.saturating_add(offset?);
            bytes.get(begin..begin.saturating_add(length?)).context("a part is cut off")
        };
        let (types, strings) = (part(types, types_length)?, part(strings, strings_length)?);
        let mut btf = Self { strings, functions: HashMap::new(), prototypes: HashMap::new() };
        btf.read_types(types)?;
        Ok(btf)
    }

    fn read_types(&mut self, types: &[u8]) -> Result<()> {
        let (mut at, mut number) = (0, 0);
        while at < types.len() {
            number += 1;
            let info = u32::try_from(word(types, at + 4)?)?;
            let (kind, members) = (info >> 24 & 0x1f, (info & 0xffff) as usize);
            match kind {
                FUNC => {
                    let prototype = u32::try_from(word(types, at + 8)?)?;
                    self.functions.insert(number, (word(types, at)?, prototype));
                }
                FUNC_PROTO => {
                    self.prototypes.insert(number, members);
                }
                _ => {}
            }
            at += COMMON + added(kind, members)?;
        }
        Ok(())
    }

    /// Returns a function's name.
    pub(super) fn name(&self, function: u32) -> Result<&'a str> {
        let (name, _) =
            self.functions.get(&function).with_context(|| format!("type {function} is no function"))?;
        self.string(*name)
    }

    /// Returns all functions with their numbers of parameters, sorted by name.
    pub(super) fn functions(&self) -> Result<Vec<(&'a str, usize)>> {
        let mut functions = self
            .functions
            .values()
            .map(|(name, prototype)| {
                let name = self.string(*name)?;
                let parameters = self.prototypes.get(prototype);
                Ok((name, *parameters.with_context(|| format!("function {name} has no type"))?))
            })
            .collect::<Result<Vec<_>>>()?;
        functions.sort_unstable();
        Ok(functions)
    }

    fn string(&self, at: usize) -> Result<&'a str> {
        let rest = self.strings.get(at..).context("a name is outside the strings")?;
        let end = rest.iter().position(|&byte| byte == 0).context("the last string has no end")?;
        str::from_utf8(&rest[..end]).context("a name is not UTF-8")
    }
}

fn word(bytes: &[u8], at: usize) -> Result<usize> {
    let word = bytes.get(at..at + 4).context("it ends too early")?;
    Ok(u32::from_le_bytes(word.try_into()?) as usize)
}

/// Returns the size in bytes of the part that a kind of type adds.
fn added(kind: u32, members: usize) -> Result<usize> {
    Ok(match kind {
        // Int, variable, declaration tag.
        1 | 14 | 17 => 4,
        // Array.
        3 => 12,
        // Struct, union, section, enum of 64 bits.
        4 | 5 | 15 | 19 => 12 * members,
        // Enum, prototype.
        6 | FUNC_PROTO => 8 * members,
        // Pointer, forward, typedef, qualifiers, function, float, type tag.
        2 | 7..=FUNC | 16 | 18 => 0,
        _ => bail!("it has a type of unknown kind {kind}"),
    })
}
