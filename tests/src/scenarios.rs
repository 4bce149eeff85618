//! Runs the scenarios of programs other than the conformance runner, and prints their results.

use anyhow::{Result, ensure};

use crate::deadline::Stopwatch;

/// Returns the scenarios that `only` names, or all if `only` is empty. An unknown name is an error.
pub fn select<S: Copy>(scenarios: &[(&'static str, S)], only: &[String]) -> Result<Vec<(&'static str, S)>> {
    let is_known = |name: &String| scenarios.iter().any(|(scenario, _)| scenario == name);
    let names: Vec<&str> = scenarios.iter().map(|(name, _)| *name).collect();
    ensure!(only.iter().all(is_known), "--only: scenarios are {}", names.join(", "));
    let is_selected =
        |(name, _): &&(&'static str, S)| only.is_empty() || only.iter().any(|only| only == name);
    Ok(scenarios.iter().filter(is_selected).copied().collect())
}

/// Runs scenarios, and prints a line for each and the totals at the end. Returns true if none
/// failed.
pub fn run_all<S>(
    scenarios: impl IntoIterator<Item = (&'static str, S)>,
    mut run: impl FnMut(S) -> Result<()>,
) -> bool {
    let (mut passed, mut failed) = (0, 0);
    for (name, scenario) in scenarios {
        let began = Stopwatch::start();
        let result = run(scenario);
        let took = began.elapsed().as_secs_f32();
        match result {
            Ok(()) => {
                passed += 1;
                println!("PASS    {name} ({took:.1} s)");
            }
            Err(error) => {
                failed += 1;
                println!("FAIL    {name} ({took:.1} s)\n    {error:#}");
            }
        }
    }
    println!("{passed} passed, {failed} failed");
    failed == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    const SCENARIOS: [(&str, u8); 2] = [("one", 1), ("two", 2)];

    #[test]
    fn select_returns_all_or_the_named_and_rejects_unknown_names() {
        let select = |only: &[&str]| {
            let only: Vec<String> = only.iter().map(ToString::to_string).collect();
            select(&SCENARIOS, &only)
                .map(|scenarios| scenarios.into_iter().map(|(_, number)| number).collect::<Vec<_>>())
        };
        assert_eq!(select(&[]).unwrap(), [1, 2]);
        assert_eq!(select(&["two"]).unwrap(), [2]);
        assert_eq!(select(&["three"]).unwrap_err().to_string(), "--only: scenarios are one, two");
    }

    #[test]
    fn a_failed_scenario_does_not_stop_the_others() {
        let mut run = Vec::new();
        let passed = run_all(SCENARIOS, |number| {
            run.push(number);
            ensure!(number != 1, "it is the first");
            Ok(())
        });
        assert_eq!((passed, run), (false, vec![1, 2]));
    }
}
