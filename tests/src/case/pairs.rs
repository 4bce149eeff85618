//! Expands a case file with the key `pairs` to one case for each ordered pair of modes.

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;

use super::MODES;

const FROM: &str = "FROM_MODE";
const TO: &str = "TO_MODE";
const KEY: &str = "pairs:";

#[derive(Deserialize)]
struct Head {
    pairs: Vec<String>,
}

/// Returns the text of each case in a file. Without `pairs`, this is the file itself. Otherwise,
/// two modes replace `FROM_MODE` and `TO_MODE`.
pub(super) fn texts(text: &str) -> Result<Vec<String>> {
    let Some(line) = text.lines().find(|line| line.starts_with(KEY)) else {
        return Ok(vec![text.to_owned()]);
    };
    let Head { pairs: modes } =
        serde_yaml_ng::from_str(line).context("pairs: not a list of modes on one line")?;
    if let Some(unknown) = modes.iter().find(|mode| !MODES.contains(&mode.as_str())) {
        anyhow::bail!("pairs: unknown mode {unknown:?}; known are {}", MODES.join(", "));
    }
    ensure!(modes.len() > 1, "pairs: at least two modes are needed");
    let rest = text.replacen(line, "", 1);
    let other = |from: &String| modes.iter().filter(move |to| *to != from).cloned().collect::<Vec<_>>();
    let pairs = modes.iter().flat_map(|from| other(from).into_iter().map(move |to| (from, to)));
    Ok(pairs.map(|(from, to)| rest.replace(FROM, from).replace(TO, &to)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_give_a_case_for_each_ordered_pair_of_modes() {
        let texts = texts("name: FROM_MODE-to-TO_MODE\npairs: [ebpf, iptables]\n").unwrap();
        assert_eq!(texts, ["name: ebpf-to-iptables\n\n", "name: iptables-to-ebpf\n\n"]);
    }

    #[test]
    fn a_file_without_pairs_is_one_case() {
        assert_eq!(texts("name: x\n").unwrap(), ["name: x\n"]);
    }

    #[test]
    fn an_unknown_mode_is_an_error_that_names_it() {
        assert!(texts("pairs: [ebpf, xyz]\n").unwrap_err().to_string().contains("xyz"));
        assert!(texts("pairs: [ebpf]\n").is_err());
    }
}
