//! Writes values in the units of Grafana.

/// Writes a value. The unit has Grafana's name.
pub(super) fn text(value: f64, unit: &str) -> String {
    match unit {
        "s" => seconds(value),
        "percentunit" => format!("{} %", digits(value * 100.0)),
        "bytes" => binary(value, "B"),
        "Bps" => binary(value, "B/s"),
        "ops" => format!("{}/s", digits(value)),
        "pps" => format!("{} p/s", digits(value)),
        _ => digits(value),
    }
}

fn seconds(value: f64) -> String {
    match value.abs() {
        0.0 => "0 s".to_owned(),
        size if size < 1e-3 => format!("{} µs", digits(value * 1e6)),
        size if size < 1.0 => format!("{} ms", digits(value * 1e3)),
        _ => format!("{} s", digits(value)),
    }
}

fn binary(value: f64, unit: &str) -> String {
    let (size, prefix) = match value.abs() {
        size if size < 1024.0 => (1.0, ""),
        size if size < 1024.0 * 1024.0 => (1024.0, "Ki"),
        _ => (1024.0 * 1024.0, "Mi"),
    };
    format!("{} {prefix}{unit}", digits(value / size))
}

/// Writes three significant digits, without needless zeros.
fn digits(value: f64) -> String {
    let decimals = match value.abs() {
        size if size >= 100.0 => 0,
        size if size >= 10.0 => 1,
        size if size >= 1.0 => 2,
        _ => 4,
    };
    let text = format!("{value:.decimals$}");
    let trimmed = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &*text };
    if trimmed == "-0" { "0".to_owned() } else { trimmed.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_have_the_prefix_that_fits() {
        for (value, unit, expected) in [
            (0.0, "s", "0 s"),
            (0.000_25, "s", "250 µs"),
            (0.0075, "s", "7.5 ms"),
            (105.07, "s", "105 s"),
            (39_596_032.0, "bytes", "37.8 MiB"),
            (8922.0, "Bps", "8.71 KiB/s"),
            (0.0337, "percentunit", "3.37 %"),
            (37.82, "ops", "37.8/s"),
            (3.0, "short", "3"),
        ] {
            assert_eq!(text(value, unit), expected);
        }
    }
}
