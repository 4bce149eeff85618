//! Collects failures and their reasons from the output of test programs, to repeat them at the end
//! of a long run.

/// The maximum number of failures reported for one step.
const MOST: usize = 20;
/// The maximum number of lines reported for one failure.
const LINES: usize = 12;

/// The failures of one step, collected line by line.
#[derive(Debug, Default)]
pub(crate) struct Failures {
    /// Each failure with its lines.
    pub(crate) all: Vec<Vec<String>>,
    /// The block that the last line belonged to.
    block: Block,
}

/// A block of output lines.
#[derive(Debug, Default, Clone, Copy)]
enum Block {
    /// Not about a failure.
    #[default]
    None,
    /// The output of a failed libtest test. It ends at the next heading.
    TestOutput,
    /// The indented lines below a "FAIL".
    Indented,
}

impl Failures {
    /// Adds a line of output.
    pub(crate) fn line(&mut self, line: &str) {
        if let Some(name) = line.strip_prefix("---- ").and_then(|rest| rest.strip_suffix(" stdout ----")) {
            self.begin(name, Block::TestOutput);
        } else if line.starts_with("FAIL ") {
            self.begin(line, Block::Indented);
        } else if self.goes_on(line) {
            self.add(line);
        } else {
            self.block = Block::None;
        }
    }

    fn goes_on(&self, line: &str) -> bool {
        match self.block {
            Block::None => false,
            Block::TestOutput => line != "failures:" && !line.starts_with("test result: "),
            Block::Indented => line.starts_with(' '),
        }
    }

    fn begin(&mut self, line: &str, block: Block) {
        self.block = if self.all.len() < MOST { block } else { Block::None };
        if self.all.len() < MOST {
            self.all.push(vec![line.to_owned()]);
        }
    }

    fn add(&mut self, line: &str) {
        let is_of_use = !line.trim().is_empty() && !line.starts_with("note: ");
        if let Some(lines) = self.all.last_mut().filter(|lines| is_of_use && lines.len() < LINES) {
            lines.push(line.trim().to_owned());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(output: &str) -> Vec<Vec<String>> {
        let mut failures = Failures::default();
        output.lines().for_each(|line| failures.line(line));
        failures.all
    }

    #[test]
    fn failed_test_is_reported_with_its_output() {
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
        assert_eq!(report(output), [wanted]);
    }

    #[test]
    fn failed_case_is_reported_with_the_indented_lines_below_it() {
        let output = "\
PASS    hairpin     2 passed   0 failed   1.2 s
FAIL    restart     1 passed   1 failed   1.2 s
    step 1, flow 2 from a1: refused
PASS    vlan        2 passed   0 failed   1.2 s
    not of a failure
";
        let wanted = ["FAIL    restart     1 passed   1 failed   1.2 s", "step 1, flow 2 from a1: refused"];
        assert_eq!(report(output), [wanted]);
    }

    #[test]
    fn number_of_failures_and_lines_is_limited() {
        let long = format!("FAIL    a\n{}", "    more\n".repeat(LINES + 5));
        assert_eq!(report(&long), [[&["FAIL    a"][..], &["more"; LINES - 1]].concat()]);
        let many = report(&"FAIL    a\n    why\n".repeat(MOST + 5));
        assert_eq!(many, vec![vec!["FAIL    a", "why"]; MOST]);
    }
}
