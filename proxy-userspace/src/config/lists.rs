//! Values of several parts: feature gates, `vmodule`, quantities of bytes.

use std::collections::BTreeMap;

use serde_yaml_ng::{Mapping, Value as Yaml};

use super::go;

/// Reads `featureGates` of the file.
pub(super) fn gates_of_file(gates: &Mapping) -> Option<BTreeMap<String, bool>> {
    let gate = |(name, on): (&Yaml, &Yaml)| Some((name.as_str()?.to_owned(), on.as_bool()?));
    gates.iter().map(gate).collect()
}

/// Reads `--feature-gates`: `A=true,B=false`.
pub(super) fn gates_of_flag(text: &str) -> Option<BTreeMap<String, bool>> {
    let gate = |part: &str| {
        let (name, on) = part.split_once('=')?;
        Some((name.trim().to_owned(), go::bool(on.trim())?)).filter(|(name, _)| !name.is_empty())
    };
    text.split(',').filter(|part| !part.trim().is_empty()).map(gate).collect()
}

/// Reads `logging.vmodule` of the file: patterns of file names with a verbosity each.
pub(super) fn levels_of_file(items: &[Yaml]) -> Option<Vec<(String, u32)>> {
    let level = |item: &Yaml| {
        let known = ["filePattern", "verbosity"];
        let mut keys = item.as_mapping()?.keys();
        keys.all(|key| key.as_str().is_some_and(|key| known.contains(&key))).then_some(())?;
        let verbosity = item.get("verbosity").map_or(Some(0), Yaml::as_u64)?;
        checked_level(item.get("filePattern")?.as_str()?, verbosity)
    };
    items.iter().map(level).collect()
}

/// Reads `--vmodule`: `pattern=1,pattern=2`.
pub(super) fn levels_of_flag(text: &str) -> Option<Vec<(String, u32)>> {
    let level = |part: &str| {
        let (pattern, level) = part.split_once('=')?;
        checked_level(pattern, level.parse().ok()?)
    };
    text.split(',').filter(|part| !part.is_empty()).map(level).collect()
}

/// Makes upstream's checks (`component-base/logs/api/v1/options.go`, `Validate`).
fn checked_level(pattern: &str, verbosity: u64) -> Option<(String, u32)> {
    let verbosity = u32::try_from(verbosity).ok().filter(|level| i32::try_from(*level).is_ok())?;
    (!pattern.is_empty() && !pattern.contains(['=', ','])).then(|| (pattern.to_owned(), verbosity))
}

/// Returns true for a Kubernetes quantity of bytes: a decimal number with a suffix or an exponent.
pub(super) fn is_quantity(text: &str) -> bool {
    const SUFFIXES: [&str; 17] =
        ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei", "n", "u", "m", "k", "K", "M", "G", "T", "P", "E"];
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let exponent = suffix.strip_prefix(['e', 'E']).is_some_and(|exponent| exponent.parse::<i8>().is_ok());
    number.parse::<f64>().is_ok() && (exponent || SUFFIXES.contains(&suffix))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_numbers_with_a_suffix() {
        for good in ["0", "512", "1.5", "4Ki", "1M", "2e3"] {
            assert!(is_quantity(good), "{good}");
        }
        for bad in ["", "Ki", "4 Ki", "4KB", "1..5", "-1", "e3"] {
            assert!(!is_quantity(bad), "{bad}");
        }
    }
}
