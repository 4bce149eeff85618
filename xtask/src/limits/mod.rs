//! Checks a compiled object against limits of the kernel's verifier, before any kernel loads it.
//!
//! Verifiers differ between kernels, and the kernel that refuses is usually not the one at hand.

mod btf;
mod stack;

use std::fmt;

use anyhow::{Context as _, Result, bail};
use aya_obj::Object;
use object::{Object as _, ObjectSection as _};

pub use self::stack::STACK;
use self::{btf::Btf, stack::Functions};

/// The maximum number of parameters: arguments are passed in five registers. Kernel 7.2 expects a
/// sixth on the stack, even if the compiler dropped a parameter that the function's type still
/// names.
const PARAMETERS: usize = 5;

/// The use of the kernel's limits by a program.
#[derive(Debug)]
pub struct Program {
    /// Its name.
    pub name: String,
    /// Its number of instructions, including those of all functions that it calls.
    pub instructions: usize,
    /// The chain of calls with the deepest stack, the program's own frame first.
    pub deepest: Vec<Frame>,
}

/// The stack frame of a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// The function's name, without type parameters.
    pub function: String,
    /// Size in bytes, as the verifier counts it.
    pub bytes: u32,
}

impl Program {
    /// Returns the size in bytes of its deepest stack.
    pub fn stack(&self) -> u32 {
        self.deepest.iter().map(|frame| frame.bytes).sum()
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, instructions, deepest } = self;
        write!(f, "{name}: {instructions} instructions, stack {} of {STACK} bytes:", self.stack())?;
        for (n, Frame { function, bytes }) in deepest.iter().enumerate() {
            let sign = if n == 0 { "" } else { " +" };
            write!(f, "{sign} {function} {bytes}")?;
        }
        Ok(())
    }
}

/// Checks an object. Returns its programs sorted by name.
pub fn check(object: &[u8]) -> Result<Vec<Program>> {
    let btf = section(object, ".BTF")?;
    let btf = Btf::parse(&btf).context("cannot read the object's BTF")?;
    check_parameters(&btf)?;
    let mut linked = Object::parse(object).context("cannot read the object")?;
    let text = linked.functions.keys().map(|(section, _)| *section).collect();
    linked.relocate_calls(&text).context("cannot link the programs")?;
    let mut programs = Vec::new();
    for (name, program) in &linked.programs {
        let function = &linked.functions[&program.function_key()];
        let starts: Vec<(usize, &str)> = function
            .func_info
            .func_info
            .iter()
            .map(|info| Ok((info.insn_off as usize, short(btf.name(info.type_id)?))))
            .collect::<Result<_>>()?;
        let deepest = Functions::of(&function.instructions, &starts)
            .and_then(|functions| functions.deepest())
            .with_context(|| format!("the kernel would refuse program {name}"))?;
        programs.push(Program { name: name.clone(), instructions: function.instructions.len(), deepest });
    }
    programs.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(programs)
}

fn section(object: &[u8], name: &str) -> Result<Vec<u8>> {
    let file = object::File::parse(object).context("cannot read the object")?;
    let section = file.section_by_name(name).with_context(|| format!("the object has no section {name}"))?;
    Ok(section.data().with_context(|| format!("cannot read section {name}"))?.to_vec())
}

fn check_parameters(btf: &Btf) -> Result<()> {
    for (name, parameters) in btf.functions()? {
        if parameters > PARAMETERS {
            bail!(
                "function {} has {parameters} parameters, and the kernel takes {PARAMETERS} at most: put some into a struct, or \
                 inline it ({name})",
                short(name)
            );
        }
    }
    Ok(())
}

/// Returns a function's name without its type parameters. The linker writes `_3C_` for `<`.
fn short(name: &str) -> &str {
    name.split("_3C_").next().unwrap_or(name)
}

#[cfg(test)]
mod tests;
