//! Sorts and filters rows.

use std::{cmp::Ordering, net::SocketAddr};

use super::TopRow;

/// The value of a cell, for sorting.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Key<'a> {
    /// A number. Rows without one come last in either order.
    Number(Option<f64>),
    /// A text.
    Text(&'a str),
    /// An address.
    Address(SocketAddr),
}

impl Key<'_> {
    fn compare(self, other: Self, descending: bool) -> Ordering {
        let directed = |order: Ordering| if descending { order.reverse() } else { order };
        match (self, other) {
            (Key::Number(Some(one)), Key::Number(Some(other))) => directed(one.total_cmp(&other)),
            (Key::Number(one), Key::Number(other)) => other.is_some().cmp(&one.is_some()),
            (Key::Text(one), Key::Text(other)) => directed(one.cmp(other)),
            (Key::Address(one), Key::Address(other)) => directed(one.cmp(&other)),
            _ => Ordering::Equal,
        }
    }
}

/// By which column rows are sorted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sorting {
    /// The index of the column.
    pub column: usize,
    /// The largest comes first.
    pub descending: bool,
}

/// Returns the indexes of the rows that contain the filter, sorted. Equal rows keep their order.
pub fn sort_and_filter<T: TopRow>(rows: &[T], sorting: Sorting, filter: &str) -> Vec<usize> {
    let filter = filter.to_lowercase();
    let mut shown: Vec<usize> = (0..rows.len()).filter(|&index| rows[index].contains(&filter)).collect();
    let key = |&index: &usize| rows[index].key(sorting.column);
    shown.sort_by(|one, other| key(one).compare(key(other), sorting.descending));
    shown
}
