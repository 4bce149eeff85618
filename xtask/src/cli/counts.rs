//! Reads the numbers of passed and failed tests from the output of test programs.

use std::ops::AddAssign;

/// Numbers of tests by result.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) ignored: u64,
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.ignored += other.ignored;
    }
}

/// Reads a line of `cargo test`: "test result: ok. 26 passed; 0 failed; 1 ignored; 0 measured; 0
/// filtered out; …".
pub(crate) fn test_result(line: &str) -> Option<Counts> {
    let (_outcome, counts) = line.trim().strip_prefix("test result: ")?.split_once(". ")?;
    let count = |name| counts.split("; ").find_map(|part| number(part, name)).unwrap_or(0);
    Some(Counts { passed: count("passed"), failed: count("failed"), ignored: count("ignored") })
}

/// Reads the last line of the conformance runner: "12 passed, 0 failed".
pub(crate) fn conformance_result(line: &str) -> Option<Counts> {
    let (passed, failed) = line.split_once(", ")?;
    Some(Counts { passed: number(passed, "passed")?, failed: number(failed, "failed")?, ignored: 0 })
}

/// Reads the number in a part such as "26 passed".
fn number(part: &str, name: &str) -> Option<u64> {
    part.trim().strip_suffix(name)?.trim_end().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_result_is_counted() {
        let line = "test result: FAILED. 25 passed; 2 failed; 1 ignored; 0 measured; 3 filtered out; finished in 0.26s";
        let counts = Counts { passed: 25, failed: 2, ignored: 1 };
        assert_eq!(test_result(line), Some(counts));
    }

    #[test]
    fn a_conformance_result_is_counted() {
        let counts = Counts { passed: 410, failed: 1, ignored: 0 };
        assert_eq!(conformance_result("410 passed, 1 failed\n"), Some(counts));
    }

    #[test]
    fn other_lines_count_nothing() {
        for line in [
            "",
            "test a ... ok",
            "test result",
            "case hairpin: 3 passed, 0 failed",
            "1 passed, 0 failed, and more",
        ] {
            assert_eq!((test_result(line), conformance_result(line)), (None, None), "{line}");
        }
    }

    #[test]
    fn counts_add_up() {
        let mut sum = Counts { passed: 1, failed: 2, ignored: 4 };
        sum += Counts { passed: 10, failed: 20, ignored: 40 };
        assert_eq!(sum, Counts { passed: 11, failed: 22, ignored: 44 });
    }
}
