//! Reads from an object file what is needed without loading it.

use object::{File, Object as _, ObjectSection as _, ObjectSymbol as _, SymbolKind};

/// The section of the constants, and the name of their map.
pub(super) const CONSTANTS: &str = ".rodata";

/// The section of functions that are no programs.
const FUNCTIONS: &str = ".text";

/// A program of an object file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DeclaredProgram {
    pub(super) name: String,
    /// It is attached to a cgroup. The others are attached to links.
    pub(super) is_of_cgroup: bool,
}

/// Returns the programs. An object that cannot be parsed has none: aya says what is wrong with it.
pub(super) fn programs(object: &[u8]) -> Vec<DeclaredProgram> {
    let Ok(file) = File::parse(object) else { return Vec::new() };
    let functions = file.symbols().filter(|symbol| symbol.kind() == SymbolKind::Text);
    let program = functions.filter_map(|symbol| {
        let section = file.section_by_index(symbol.section_index()?).ok()?;
        let section = section.name().ok().filter(|section| *section != FUNCTIONS)?;
        let is_of_cgroup = section.starts_with("cgroup");
        Some(DeclaredProgram { name: symbol.name().ok()?.to_owned(), is_of_cgroup })
    });
    program.collect()
}

/// Returns the position of a constant in the value of the map of constants.
pub(super) fn position_of_constant(object: &[u8], name: &str) -> Option<usize> {
    let file = File::parse(object).ok()?;
    let symbol = file.symbols().find(|symbol| symbol.name() == Ok(name))?;
    let section = file.section_by_index(symbol.section_index()?).ok()?;
    (section.name() == Ok(CONSTANTS)).then(|| usize::try_from(symbol.address()).ok())?
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dataplane::ebpf::OBJECT;

    #[test]
    fn programs_are_those_that_aya_finds() {
        let parsed = aya_obj::Object::parse(OBJECT).expect("an object");
        let mut expected: Vec<&str> = parsed.programs.keys().map(String::as_str).collect();
        expected.sort_unstable();
        let programs = programs(OBJECT);
        let mut found: Vec<&str> = programs.iter().map(|program| &*program.name).collect();
        found.sort_unstable();
        assert_eq!(found, expected);
        let of_cgroup =
            |name: &str| programs.iter().find(|program| program.name == name).map(|it| it.is_of_cgroup);
        assert_eq!((of_cgroup("shunt_connect4"), of_cgroup("shunt_in_eth")), (Some(true), Some(false)));
    }

    #[test]
    fn map_of_constants_has_the_hash() {
        let position = position_of_constant(OBJECT, super::super::reuse::HASH);
        assert!(position.is_some(), "without it, a start could use programs of another build");
    }

    #[test]
    fn what_is_no_object_has_nothing() {
        for bytes in [&b""[..], b"no ELF", &OBJECT[..100]] {
            assert_eq!((programs(bytes), position_of_constant(bytes, "OBJECT_HASH")), (Vec::new(), None));
        }
    }
}
