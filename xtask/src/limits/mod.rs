//! Holds a compiled object to what the kernel's verifier allows, before any kernel sees it.
//!
//! The verifier's own answer differs between kernels, and those that refuse are not those at hand.

mod btf;
mod stack;

use std::fmt;

use anyhow::{Context as _, Result, bail};
use aya_obj::Object;
use object::{Object as _, ObjectSection as _};

pub use self::stack::STACK;
use self::{btf::Btf, stack::Functions};

/// Arguments go in registers, of which there are five. Kernel 7.2 looks for a sixth on the stack, also where the compiler has
/// dropped one of those that the function's type still names.
const PARAMETERS: usize = 5;

/// What a program takes of the kernel's limits.
#[derive(Debug)]
pub struct Program {
    /// Its name.
    pub name: String,
    /// Its instructions, those of all functions that it calls included.
    pub instructions: usize,
    /// The calls that take most stack together, the program's own frame first.
    pub deepest: Vec<Frame>,
}

/// A function's part of the stack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// The function's name, without the types it was made for.
    pub function: String,
    /// Bytes, as the verifier counts them.
    pub bytes: u32,
}

impl Program {
    /// The bytes of stack that it takes at most.
    pub fn stack(&self) -> u32 {
        self.deepest.iter().map(|frame| frame.bytes).sum()
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: {} instructions, stack {} of {STACK} bytes:",
            self.name,
            self.instructions,
            self.stack()
        )?;
        for (n, Frame { function, bytes }) in self.deepest.iter().enumerate() {
            let sign = if n == 0 { "" } else { " +" };
            write!(f, "{sign} {function} {bytes}")?;
        }
        Ok(())
    }
}

/// Checks an object; says what its programs take, by name.
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

/// A function's name without its type parameters, which the linker writes with `_3C_` for `<`.
fn short(name: &str) -> &str {
    name.split("_3C_").next().unwrap_or(name)
}

#[cfg(test)]
mod tests;
