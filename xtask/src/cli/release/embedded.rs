//! The eBPF object in a program of shunt, which is the same for every architecture.

use std::ops::Range;

use anyhow::{Context as _, Result, bail};

use super::digest;
use super::target::Target;

/// The first bytes of a 64-bit little-endian ELF file.
const MAGIC: &[u8] = b"\x7fELF\x02\x01\x01";
/// The machine of eBPF, `EM_BPF`.
const BPF: u64 = 247;
/// Fields of the ELF header.
const MACHINE: Range<usize> = 18..20;
const SECTIONS: Range<usize> = 40..48;
const SECTION_SIZE: Range<usize> = 58..60;
const SECTION_COUNT: Range<usize> = 60..62;

/// Fails if the programs do not all have the same eBPF object.
pub(crate) fn ensure_same(programs: &[(Target, &[u8])]) -> Result<()> {
    let mut first: Option<(Target, String)> = None;
    for (target, program) in programs {
        let object = object(program).with_context(|| format!("shunt for {}", target.name()))?;
        let digest = digest::sha256(object);
        let (other, expected) = first.get_or_insert_with(|| (*target, digest.clone()));
        if digest != *expected {
            let (name, other) = (target.name(), other.name());
            bail!("the eBPF object in shunt for {name} ({digest}) is not that of {other} ({expected})");
        }
    }
    Ok(())
}

/// Returns the eBPF object in a program. Its table of sections is its end.
fn object(program: &[u8]) -> Result<&[u8]> {
    let starts = program.windows(MAGIC.len()).enumerate().filter(|(_, bytes)| *bytes == MAGIC);
    let files = starts.filter_map(|(start, _)| program.get(start..));
    let mut objects = files.filter(|file| field(file, MACHINE) == Some(BPF));
    let file = objects.next().context("it has no eBPF object")?;
    let size = || {
        let table = field(file, SECTION_SIZE)?.checked_mul(field(file, SECTION_COUNT)?)?;
        usize::try_from(field(file, SECTIONS)?.checked_add(table)?).ok()
    };
    size().and_then(|size| file.get(..size)).context("its eBPF object is damaged")
}

/// Returns a little-endian number.
fn field(file: &[u8], bytes: Range<usize>) -> Option<u64> {
    Some(file.get(bytes)?.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a program with two ELF files, of which the second is for eBPF and has one section.
    fn program(content: u8) -> Vec<u8> {
        let mut object = vec![0; 64];
        object[..MAGIC.len()].copy_from_slice(MAGIC);
        object[MACHINE.start] = 247;
        (object[SECTIONS.start], object[SECTION_SIZE.start], object[SECTION_COUNT.start]) = (66, 64, 1);
        object.extend([content; 66]);
        [MAGIC, &[0; 60], &object, b"the rest of the program"].concat()
    }

    #[test]
    fn object_ends_with_its_table_of_sections() {
        let program = program(7);
        let found = object(&program).unwrap();
        assert_eq!((found.len(), found.last()), (130, Some(&7)));
    }

    #[test]
    fn programs_with_another_object_are_named() {
        let (one, other) = (program(1), program(2));
        assert!(ensure_same(&[(Target::Amd64, &one), (Target::Arm64, &one)]).is_ok());
        let error = ensure_same(&[(Target::Amd64, &one), (Target::Arm64, &other)]).unwrap_err().to_string();
        assert!(error.contains("shunt for arm64") && error.contains("that of amd64"), "{error}");
    }

    #[test]
    fn program_without_an_object_is_an_error() {
        let error = format!("{:#}", ensure_same(&[(Target::Amd64, b"\x7fELF\x02\x01\x01")]).unwrap_err());
        assert_eq!(error, "shunt for amd64: it has no eBPF object");
        let mut damaged = program(1);
        damaged.truncate(150);
        assert!(object(&damaged).is_err());
    }
}
