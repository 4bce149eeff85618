//! Finds the compiler's warnings in cargo's output.

/// Warnings. Each ends at an empty line.
#[derive(Debug, Default)]
pub struct Warnings {
    /// The lines of all warnings.
    pub lines: Vec<String>,
    /// True if the compiler warned. Cargo has warnings too, such as those about the network.
    pub are_of_compiler: bool,
    inside: bool,
}

impl Warnings {
    /// Takes a line of cargo's output, if it belongs to a warning.
    pub fn take(&mut self, line: &str) {
        let begins = line.starts_with("warning");
        let is_summary = is_summary(line);
        self.are_of_compiler |= is_summary;
        // A summary has no new information.
        let goes_on = self.inside && !line.is_empty() && !begins;
        self.inside = goes_on || begins && !is_summary;
        if self.inside {
            self.lines.push(line.to_owned());
        }
    }
}

/// Returns true for a line such as "warning: `x` (lib) generated 3 warnings". Messages of the
/// compiler may begin with a name too.
fn is_summary(line: &str) -> bool {
    let summary = line.strip_prefix("warning: `").and_then(|line| line.split_once(" generated "));
    let count = summary.and_then(|(_, summary)| summary.split_once(" warning"));
    count.is_some_and(|(count, _)| count.parse::<u64>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn warnings(lines: &[&str]) -> Warnings {
        let mut warnings = Warnings::default();
        for line in lines {
            warnings.take(line);
        }
        warnings
    }

    #[test]
    fn whole_warnings_are_kept_and_progress_is_not() {
        let lines = [
            "  Compiling proxy-ebpf",
            "warning: unused import",
            "  --> src/main.rs:1:5",
            "",
            "warning: `x` (bin \"x\") generated 1 warning",
            "  Finished",
        ];
        let warnings = warnings(&lines);
        assert_eq!(warnings.lines, ["warning: unused import", "  --> src/main.rs:1:5"]);
        assert!(warnings.are_of_compiler);
    }

    #[test]
    fn message_that_begins_with_a_name_is_no_summary() {
        let message = "warning: `expect` attribute without specifying a reason";
        let warnings = warnings(&[message, "  --> src/main.rs:1:5", "", "  Finished"]);
        assert_eq!(warnings.lines, [message, "  --> src/main.rs:1:5"]);
    }

    #[test]
    fn warning_of_cargo_is_not_of_the_compiler() {
        let warnings = warnings(&["warning: spurious network error (3 tries remaining)", "  Finished"]);
        assert!(!warnings.are_of_compiler);
    }
}
