//! Rates from two readings.

use std::time::Duration;

/// How a number that only grows changed between two readings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// The number at the second reading minus that at the first one.
    pub difference: u64,
    /// The time between them; not zero.
    pub elapsed: Duration,
}

impl Change {
    /// Returns the change. `None` if the number shrank, because it began again, or if no time
    /// passed.
    pub fn between(before: u64, now: u64, elapsed: Duration) -> Option<Self> {
        let difference = now.checked_sub(before)?;
        (!elapsed.is_zero()).then_some(Self { difference, elapsed })
    }

    /// Returns the change a second, to three decimals.
    pub fn per_second(self) -> f64 {
        rounded(as_f64(self.difference) / self.elapsed.as_secs_f64())
    }
}

/// Rounds to three decimals.
pub(super) fn rounded(number: f64) -> f64 {
    (number * 1000.0).round() / 1000.0
}

/// Converts a count. Beyond 2^53 the last digits do not matter for a rate.
#[expect(clippy::cast_precision_loss, reason = "a rate needs no more digits")]
pub(super) const fn as_f64(count: u64) -> f64 {
    count as f64
}

/// Writes a number in at most five characters, such as `0`, `0.4`, `17`, `950`, `1.3k` or `12M`.
pub(super) fn short(number: f64) -> String {
    const UNITS: [&str; 6] = ["", "k", "M", "G", "T", "P"];
    let mut scaled = number;
    let mut unit = 0;
    // 999.5 would be written as 1000.
    while scaled >= 999.5 && unit + 1 < UNITS.len() {
        scaled /= 1000.0;
        unit += 1;
    }
    let has_decimal = scaled < 9.95 && (unit > 0 || scaled.fract() >= 0.05);
    let digits = usize::from(has_decimal);
    format!("{scaled:.digits$}{}", UNITS[unit])
}

/// Writes a number as [`short`] does, or `-` if there is none.
pub(super) fn short_or_dash(number: Option<f64>) -> String {
    number.map_or_else(|| "-".to_owned(), short)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_the_difference_by_the_time_between_the_readings() {
        let rate = |before, now, millis| {
            Change::between(before, now, Duration::from_millis(millis)).map(Change::per_second)
        };
        assert_eq!(rate(10, 30, 2000), Some(10.0));
        assert_eq!(rate(0, 1, 3000), Some(0.333));
        assert_eq!(rate(30, 10, 2000), None, "the counter began again");
        assert_eq!(rate(10, 30, 0), None, "no time passed");
    }

    #[test]
    fn numbers_take_five_characters() {
        for (number, expected) in [
            (0.0, "0"),
            (0.04, "0"),
            (0.35, "0.3"),
            (1.0, "1"),
            (9.96, "10"),
            (17.4, "17"),
            (999.4, "999"),
            (999.6, "1.0k"),
            (1234.0, "1.2k"),
            (45_678.0, "46k"),
            (2.5e7, "25M"),
            (3e18, "3000P"),
        ] {
            assert_eq!(short(number), expected, "{number}");
        }
    }
}
