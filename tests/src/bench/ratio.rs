//! Ratios of rounds that ran one after the other: their median and their spread.

use std::fmt;

use serde::Serialize;

/// The distribution of ratios of pairs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Ratio {
    /// Half of the ratios are below this value.
    pub(super) median: f64,
    /// A quarter of the ratios is below this value.
    pub(super) lower_quartile: f64,
    /// A quarter of the ratios is above this value.
    pub(super) upper_quartile: f64,
    /// The number of pairs.
    pub(super) pairs: usize,
}

impl Ratio {
    /// Returns the distribution for pairs of a measured value and its reference. None if there are
    /// no pairs.
    pub(super) fn of(pairs: impl Iterator<Item = (f64, f64)>) -> Option<Self> {
        let mut ratios: Vec<f64> = pairs.map(|(value, base)| value / base).collect();
        ratios.sort_by(f64::total_cmp);
        Some(Self {
            median: quantile(&ratios, 50)?,
            lower_quartile: quantile(&ratios, 25)?,
            upper_quartile: quantile(&ratios, 75)?,
            pairs: ratios.len(),
        })
    }
}

impl fmt::Display for Ratio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.3}  ({:.3} to {:.3})", self.median, self.lower_quartile, self.upper_quartile)
    }
}

/// Returns the percentile of a sorted list.
pub(super) fn quantile<T: Copy>(sorted: &[T], percent: usize) -> Option<T> {
    let rank = (sorted.len() * percent).div_ceil(100);
    sorted.get(rank.saturating_sub(1)).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_taken_over_the_ratios() {
        let ratio = Ratio::of([(10.0, 10.0), (9.0, 10.0), (400.0, 500.0)].into_iter()).unwrap();
        assert!((ratio.median - 0.9).abs() < 1e-9, "{ratio}");
        assert!(
            (ratio.lower_quartile - 0.8).abs() < 1e-9 && (ratio.upper_quartile - 1.0).abs() < 1e-9,
            "{ratio}"
        );
    }

    #[test]
    fn without_pairs_there_is_no_ratio() {
        assert_eq!(Ratio::of(std::iter::empty()), None);
    }

    #[test]
    fn the_99th_percentile_of_a_hundred_values_is_the_99th() {
        let sorted: Vec<u32> = (1..=100).collect();
        assert_eq!(quantile(&sorted, 99), Some(99));
    }
}
