//! Scenes: what programs beside the conformance runner try, one after the other, and how each is said to have ended.

use anyhow::{Result, ensure};

use crate::deadline::Stopwatch;

/// The scenes that `only` names, or all if it names none; a name that no scene has is an error.
pub fn chosen<S: Copy>(scenes: &[(&'static str, S)], only: &[String]) -> Result<Vec<(&'static str, S)>> {
    let is_known = |name: &String| scenes.iter().any(|(scene, _)| scene == name);
    let names: Vec<&str> = scenes.iter().map(|(name, _)| *name).collect();
    ensure!(only.iter().all(is_known), "--only: scenes are {}", names.join(", "));
    let is_chosen = |(name, _): &&(&'static str, S)| only.is_empty() || only.iter().any(|only| only == name);
    Ok(scenes.iter().filter(is_chosen).copied().collect())
}

/// Plays scenes, and prints a line for each and their numbers at the end; whether all went well.
pub fn play<S>(
    scenes: impl IntoIterator<Item = (&'static str, S)>,
    mut play: impl FnMut(S) -> Result<()>,
) -> bool {
    let (mut passed, mut failed) = (0, 0);
    for (name, scene) in scenes {
        let began = Stopwatch::start();
        let ended = play(scene);
        let took = began.elapsed().as_secs_f32();
        match ended {
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

    const SCENES: [(&str, u8); 2] = [("one", 1), ("two", 2)];

    #[test]
    fn all_are_chosen_or_those_that_are_named_and_others_are_refused() {
        let names = |only: &[&str]| {
            let only: Vec<String> = only.iter().map(ToString::to_string).collect();
            chosen(&SCENES, &only)
                .map(|scenes| scenes.into_iter().map(|(_, number)| number).collect::<Vec<_>>())
        };
        assert_eq!(names(&[]).unwrap(), [1, 2]);
        assert_eq!(names(&["two"]).unwrap(), [2]);
        assert_eq!(names(&["three"]).unwrap_err().to_string(), "--only: scenes are one, two");
    }

    #[test]
    fn one_that_fails_does_not_keep_the_others_from_being_played() {
        let mut played = Vec::new();
        let all_well = play(SCENES, |number| {
            played.push(number);
            ensure!(number != 1, "it is the first");
            Ok(())
        });
        assert_eq!((all_well, played), (false, vec![1, 2]));
    }
}
