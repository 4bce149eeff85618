//! Durations in Go's syntax: `30s`, `1m30s`, `1.5h`.

use std::time::Duration;

/// Suffixes and their units in nanoseconds.
const UNITS: [(&str, f64); 8] =
    [("ns", 1.0), ("us", 1e3), ("µs", 1e3), ("μs", 1e3), ("ms", 1e6), ("s", 1e9), ("m", 6e10), ("h", 3.6e12)];

/// Go's longest duration is 2^63 nanoseconds. A longer one is rejected.
const MAX_NANOS: f64 = 9.2e18;
/// The same for messages.
pub(crate) const MAX: &str = "2555555h";

/// Reads a duration in the syntax of Go's `time.ParseDuration`. Returns `None` if it is invalid or
/// negative.
pub(crate) fn parse(text: &str) -> Option<Duration> {
    let nanos = nanos(text).filter(|nanos| *nanos <= MAX_NANOS)?;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "checked against MAX_NANOS; digits only"
    )]
    let whole = nanos.round() as u64;
    Some(Duration::from_nanos(whole))
}

/// Returns true for a duration that [`parse`] refuses because it is longer than [`MAX`].
pub(crate) fn is_too_long(text: &str) -> bool {
    nanos(text).is_some_and(|nanos| nanos > MAX_NANOS)
}

fn nanos(text: &str) -> Option<f64> {
    let mut rest = text.strip_prefix('+').unwrap_or(text);
    if rest == "0" {
        return Some(0.0);
    }
    if rest.is_empty() {
        return None;
    }
    let mut nanos = 0.0_f64;
    while !rest.is_empty() {
        let (amount, after) = split_number(rest)?;
        let (unit, after) = split_unit(after)?;
        nanos += amount * unit;
        rest = after;
    }
    Some(nanos)
}

/// Formats a duration as Go's `Duration.String` does: `1h0m0s`, `1.5s`, `250ms`, `0s`.
pub(crate) fn format(duration: Duration) -> String {
    let nanos = duration.as_nanos();
    let seconds = duration.as_secs();
    let fraction = |nanos: u128, unit: u128| {
        let digits = unit.to_string().len() - 1;
        let text = format!("{}.{:0digits$}", nanos / unit, nanos % unit);
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    };
    match nanos {
        0 => "0s".into(),
        1..1_000 => format!("{nanos}ns"),
        1_000..1_000_000 => format!("{}µs", fraction(nanos, 1_000)),
        1_000_000..1_000_000_000 => format!("{}ms", fraction(nanos, 1_000_000)),
        _ => {
            let rest = fraction(nanos - u128::from(seconds / 60 * 60) * 1_000_000_000, 1_000_000_000);
            let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
            match (hours, minutes) {
                (0, 0) => format!("{rest}s"),
                (0, _) => format!("{minutes}m{rest}s"),
                _ => format!("{hours}h{minutes}m{rest}s"),
            }
        }
    }
}

fn split_number(text: &str) -> Option<(f64, &str)> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (digits, rest) = text.split_at(end);
    // Go accepts "1." and ".5", but not ".".
    if !digits.contains(|c: char| c.is_ascii_digit()) {
        return None;
    }
    Some((digits.parse().ok()?, rest))
}

fn split_unit(text: &str) -> Option<(f64, &str)> {
    let end = text.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(text.len());
    let (suffix, rest) = text.split_at(end);
    let (_, nanos) = UNITS.iter().find(|(name, _)| *name == suffix)?;
    Some((*nanos, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_as_go_reads_them() {
        let cases = [
            ("0", 0),
            ("0s", 0),
            ("30s", 30_000),
            ("1m30s", 90_000),
            ("1.5h", 5_400_000),
            ("250ms", 250),
            (".5s", 500),
            ("+2m", 120_000),
        ];
        for (text, millis) in cases {
            assert_eq!(parse(text), Some(Duration::from_millis(millis)), "{text}");
        }
        assert_eq!(parse("7ns"), Some(Duration::from_nanos(7)));
        assert_eq!(parse("7µs"), Some(Duration::from_micros(7)));
    }

    #[test]
    fn durations_are_written_as_go_writes_them() {
        for text in [
            "0s",
            "30s",
            "1m30s",
            "15m0s",
            "24h0m0s",
            "1.5s",
            "1m0.25s",
            "250ms",
            "1.5ms",
            "7µs",
            "7ns",
            "1h0m1.001s",
        ] {
            assert_eq!(format(parse(text).unwrap()), text);
        }
    }

    #[test]
    fn durations_that_go_rejects_or_that_are_negative_are_rejected() {
        for text in
            ["", "-1s", "30", "s", ".s", "1d", "1 s", "30 seconds", "1s-1s", "999999999999h", "1..5s", "+"]
        {
            assert_eq!(parse(text), None, "{text:?}");
        }
    }
}
