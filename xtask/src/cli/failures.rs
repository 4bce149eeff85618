//! Picks what failed, and why, out of what test programs print, so that a long run can say it at its end.

/// The most failures that are told of one step; a fault that breaks everything needs no more.
const MOST: usize = 20;
/// The most lines that are told of one failure.
const LINES: usize = 12;

/// Failures of one step, gathered line by line.
#[derive(Debug, Default)]
pub(crate) struct Failures {
    told: Vec<Vec<String>>,
    /// Of which kind the last line was.
    within: Within,
}

/// What the next line may belong to.
#[derive(Debug, Default, Clone, Copy)]
enum Within {
    /// Nothing that is told.
    #[default]
    None,
    /// What a test of libtest's printed, which ends with the next heading.
    TestOutput,
    /// The lines below a "FAIL", which are set in.
    Indented,
}

impl Failures {
    /// Takes a line of output.
    pub(crate) fn line(&mut self, line: &str) {
        if let Some(name) = line.strip_prefix("---- ").and_then(|rest| rest.strip_suffix(" stdout ----")) {
            self.begin(name, Within::TestOutput);
        } else if line.starts_with("FAIL ") {
            self.begin(line, Within::Indented);
        } else if self.goes_on(line) {
            self.add(line);
        } else {
            self.within = Within::None;
        }
    }

    /// Each failure with its lines.
    pub(crate) fn into_told(self) -> Vec<Vec<String>> {
        self.told
    }

    fn goes_on(&self, line: &str) -> bool {
        match self.within {
            Within::None => false,
            Within::TestOutput => line != "failures:" && !line.starts_with("test result: "),
            Within::Indented => line.starts_with(' '),
        }
    }

    fn begin(&mut self, line: &str, within: Within) {
        self.within = if self.told.len() < MOST { within } else { Within::None };
        if self.told.len() < MOST {
            self.told.push(vec![line.to_owned()]);
        }
    }

    fn add(&mut self, line: &str) {
        let is_of_use = !line.trim().is_empty() && !line.starts_with("note: ");
        if let Some(lines) = self.told.last_mut().filter(|lines| is_of_use && lines.len() < LINES) {
            lines.push(line.trim().to_owned());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(output: &str) -> Vec<Vec<String>> {
        let mut failures = Failures::default();
        output.lines().for_each(|line| failures.line(line));
        failures.into_told()
    }

    #[test]
    fn a_failed_test_is_told_with_what_it_printed() {
        let output = "\
running 2 tests
test links::one ... FAILED
test links::two ... ok

failures:

---- links::one stdout ----

thread 'links::one' (834) panicked at tests/tests/links.rs:43:31:
no link after 30s
note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace


failures:
    links::one

test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.26s
";
        let wanted = [
            "links::one",
            "thread 'links::one' (834) panicked at tests/tests/links.rs:43:31:",
            "no link after 30s",
        ];
        assert_eq!(told(output), [wanted]);
    }

    #[test]
    fn a_failed_case_is_told_with_the_lines_set_in_below_it() {
        let output = "\
PASS    hairpin     2 passed   0 failed   1.2 s
FAIL    restart     1 passed   1 failed   1.2 s
    step 1, flow 2 from a1: refused
PASS    vlan        2 passed   0 failed   1.2 s
    not of a failure
";
        let wanted = ["FAIL    restart     1 passed   1 failed   1.2 s", "step 1, flow 2 from a1: refused"];
        assert_eq!(told(output), [wanted]);
    }

    #[test]
    fn neither_many_failures_nor_a_long_one_make_a_flood() {
        let long = format!("FAIL    a\n{}", "    more\n".repeat(LINES + 5));
        assert_eq!(told(&long), [[&["FAIL    a"][..], &["more"; LINES - 1]].concat()]);
        let many = told(&"FAIL    a\n    why\n".repeat(MOST + 5));
        assert_eq!(many, vec![vec!["FAIL    a", "why"]; MOST]);
    }
}
