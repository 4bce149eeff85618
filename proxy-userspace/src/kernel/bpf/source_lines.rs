//! Removes the source lines from an object, which few processes need.

use object::{Object as _, ObjectSection as _};

/// Where the header of `.BTF.ext` has the length of the lines (`struct btf_ext_header`).
const LINES_LENGTH: usize = 20;

/// Returns the object without the source lines of its instructions. Nothing else changes.
///
/// aya 0.14 copies all lines of a section for each function in it. The programs share 275 functions
/// with 18,000 lines, so the copies take 80 MiB until the programs are loaded.
pub(super) fn without_source_lines(object: &[u8]) -> Vec<u8> {
    let mut bytes = object.to_vec();
    if let Some(length) = lines_length(object).and_then(|at| bytes.get_mut(at..at + size_of::<u32>())) {
        length.fill(0);
    }
    bytes
}

/// Returns the position of the length of the lines. An object that cannot be parsed has none: aya
/// says what is wrong with it.
fn lines_length(object: &[u8]) -> Option<usize> {
    let section = object::File::parse(object).ok()?.section_by_name(".BTF.ext")?.file_range()?;
    Some(usize::try_from(section.0).ok()? + LINES_LENGTH)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dataplane::ebpf::OBJECT;

    #[test]
    fn only_the_length_of_the_lines_changes() {
        let stripped = without_source_lines(OBJECT);
        let changed: Vec<usize> = (0..OBJECT.len()).filter(|at| OBJECT[*at] != stripped[*at]).collect();
        let length = lines_length(OBJECT).expect("the object has lines");
        assert!(!changed.is_empty() && changed.iter().all(|at| (length..length + 4).contains(at)));
        let value = u32::from_le_bytes(OBJECT[length..length + 4].try_into().expect("four bytes"));
        assert!(value > 10_000, "{value} bytes of lines");
    }

    #[test]
    fn what_is_no_object_stays() {
        for bytes in [&b""[..], b"no ELF", &OBJECT[..100]] {
            assert_eq!(without_source_lines(bytes), bytes);
        }
    }
}
