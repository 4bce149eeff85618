//! Writes a profile as pprof's `profile.proto`, which `go tool pprof` and other viewers read.

use std::{
    collections::HashMap,
    hash::Hash,
    path::Path,
    time::{Duration, UNIX_EPOCH},
};

use pprof::{Report, Symbol};
use prost::Message as _;

use self::messages::{Function, Label, Line, Location, Profile, Sample, ValueType};

/// The parts of `profile.proto` that are written.
pub(super) mod messages {
    use prost::Message;

    #[derive(Clone, PartialEq, Message)]
    pub(crate) struct Profile {
        #[prost(message, repeated, tag = "1")]
        pub(crate) sample_type: Vec<ValueType>,
        #[prost(message, repeated, tag = "2")]
        pub(crate) sample: Vec<Sample>,
        #[prost(message, repeated, tag = "4")]
        pub(crate) location: Vec<Location>,
        #[prost(message, repeated, tag = "5")]
        pub(crate) function: Vec<Function>,
        #[prost(string, repeated, tag = "6")]
        pub(crate) string_table: Vec<String>,
        #[prost(int64, tag = "9")]
        pub(crate) time_nanos: i64,
        #[prost(int64, tag = "10")]
        pub(crate) duration_nanos: i64,
        #[prost(message, optional, tag = "11")]
        pub(crate) period_type: Option<ValueType>,
        #[prost(int64, tag = "12")]
        pub(crate) period: i64,
    }

    /// All texts are indices of the string table.
    #[derive(Clone, Copy, PartialEq, Message)]
    pub(crate) struct ValueType {
        #[prost(int64, tag = "1")]
        pub(crate) kind: i64,
        #[prost(int64, tag = "2")]
        pub(crate) unit: i64,
    }

    #[derive(Clone, PartialEq, Message)]
    pub(crate) struct Sample {
        /// The innermost frame first.
        #[prost(uint64, repeated, tag = "1")]
        pub(crate) location_id: Vec<u64>,
        #[prost(int64, repeated, tag = "2")]
        pub(crate) value: Vec<i64>,
        #[prost(message, repeated, tag = "3")]
        pub(crate) label: Vec<Label>,
    }

    #[derive(Clone, Copy, PartialEq, Message)]
    pub(crate) struct Label {
        #[prost(int64, tag = "1")]
        pub(crate) key: i64,
        #[prost(int64, tag = "2")]
        pub(crate) text: i64,
    }

    #[derive(Clone, PartialEq, Message)]
    pub(crate) struct Location {
        #[prost(uint64, tag = "1")]
        pub(crate) id: u64,
        /// The innermost inlined function first.
        #[prost(message, repeated, tag = "4")]
        pub(crate) line: Vec<Line>,
    }

    #[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
    pub(crate) struct Line {
        #[prost(uint64, tag = "1")]
        pub(crate) function_id: u64,
        #[prost(int64, tag = "2")]
        pub(crate) line: i64,
    }

    #[derive(Clone, Copy, PartialEq, Message)]
    pub(crate) struct Function {
        #[prost(uint64, tag = "1")]
        pub(crate) id: u64,
        #[prost(int64, tag = "2")]
        pub(crate) name: i64,
        #[prost(int64, tag = "3")]
        pub(crate) system_name: i64,
        #[prost(int64, tag = "4")]
        pub(crate) filename: i64,
    }
}

/// Distinct values with a number each, from 0 on, in the order of their appearance.
#[derive(Debug)]
struct Table<T>(HashMap<T, usize>);

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<T: Eq + Hash> Table<T> {
    fn number(&mut self, value: T) -> usize {
        let next = self.0.len();
        *self.0.entry(value).or_insert(next)
    }

    fn into_values(self) -> impl Iterator<Item = (usize, T)> {
        let mut values: Vec<_> = self.0.into_iter().map(|(value, number)| (number, value)).collect();
        values.sort_unstable_by_key(|(number, _)| *number);
        values.into_iter()
    }
}

/// What the samples refer to.
#[derive(Default)]
struct Tables {
    texts: Table<String>,
    /// The text of the name, of the mangled name, and of the file.
    functions: Table<[i64; 3]>,
    locations: Table<Vec<Line>>,
}

impl Tables {
    fn text(&mut self, text: impl Into<String>) -> i64 {
        i64::try_from(self.texts.number(text.into())).unwrap_or_default()
    }

    fn line(&mut self, symbol: &Symbol) -> Line {
        let file = symbol.filename.as_deref().map(Path::to_string_lossy).unwrap_or_default();
        let function = [self.text(symbol.name()), self.text(symbol.sys_name()), self.text(file)];
        // The number 0 is reserved.
        let function_id = self.functions.number(function) as u64 + 1;
        Line { function_id, line: symbol.lineno().into() }
    }

    fn location(&mut self, frame: &[Symbol]) -> u64 {
        let lines = frame.iter().map(|symbol| self.line(symbol)).collect();
        self.locations.number(lines) as u64 + 1
    }
}

/// Returns a `Profile` message.
pub(super) fn encode(report: &Report) -> Vec<u8> {
    let mut tables = Tables::default();
    // The first text is empty by definition.
    tables.text("");
    let count = ValueType { kind: tables.text("samples"), unit: tables.text("count") };
    let time = ValueType { kind: tables.text("cpu"), unit: tables.text("nanoseconds") };
    let period = 1_000_000_000 / i64::from(report.timing.frequency.max(1));
    let thread = tables.text("thread");
    let samples = report.data.iter().map(|(frames, count)| {
        let count = i64::try_from(*count).unwrap_or(i64::MAX);
        Sample {
            location_id: frames.frames.iter().map(|frame| tables.location(frame)).collect(),
            value: vec![count, count.saturating_mul(period)],
            label: vec![Label { key: thread, text: tables.text(frames.thread_name_or_id()) }],
        }
    });
    let sample = samples.collect();
    let id = |number: usize| number as u64 + 1;
    let started = report.timing.start_time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let nanoseconds = |duration: Duration| i64::try_from(duration.as_nanos()).unwrap_or(i64::MAX);
    let function = |(number, [name, system_name, filename]): (usize, [i64; 3])| Function {
        id: id(number),
        name,
        system_name,
        filename,
    };
    Profile {
        sample_type: vec![count, time],
        sample,
        location: tables
            .locations
            .into_values()
            .map(|(number, line)| Location { id: id(number), line })
            .collect(),
        function: tables.functions.into_values().map(function).collect(),
        string_table: tables.texts.into_values().map(|(_, text)| text).collect(),
        time_nanos: nanoseconds(started),
        duration_nanos: nanoseconds(report.timing.duration),
        period_type: Some(time),
        period,
    }
    .encode_to_vec()
}
