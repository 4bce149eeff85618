//! `shunt top`: what the Services, maps and programs of this node do at the moment. The rows and
//! the state of the screen are plain values; `draw.rs` draws them, and `sample.rs` asks the daemon
//! and the kernel.
#![forbid(unsafe_code)]

mod arguments;
#[cfg(feature = "live-top")]
mod draw;
mod order;
mod rates;
mod rows;
mod sample;
#[cfg(feature = "live-top")]
mod screen;

#[cfg(all(test, feature = "live-top"))]
mod tests;

pub use self::{
    arguments::{TopArguments, command},
    order::{Key, Sorting, sort_and_filter},
    rates::Change,
    rows::{EndpointLoad, MapRow, ProgramLoad, Rows, ServiceRate, TopRow},
    sample::{Sample, Sampler, TopError},
};
#[cfg(feature = "live-top")]
pub use self::{
    draw::draw,
    screen::{Action, Input, Screen},
};

/// A table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum View {
    /// Service ports by what happens a second.
    #[value(alias = "service", alias = "svc")]
    Services,
    /// The endpoints of one Service.
    #[value(alias = "endpoint", alias = "ep")]
    Endpoints,
    /// Maps by fill.
    #[value(alias = "map")]
    Maps,
    /// Programs by CPU time.
    #[value(alias = "program")]
    Programs,
}

impl View {
    /// All views.
    pub const ALL: [Self; 4] = [Self::Services, Self::Endpoints, Self::Maps, Self::Programs];

    /// Returns the heading.
    pub const fn title(self) -> &'static str {
        match self {
            Self::Services => "Services",
            Self::Endpoints => "Endpoints",
            Self::Maps => "Maps",
            Self::Programs => "Programs",
        }
    }

    /// Returns the kind of the list in JSON and YAML.
    pub const fn kind(self) -> &'static str {
        match self {
            Self::Services => "ServiceRateList",
            Self::Endpoints => "EndpointLoadList",
            Self::Maps => "MapFillList",
            Self::Programs => "ProgramLoadList",
        }
    }

    /// Returns true for the views of which only the ebpf mode has rows.
    pub const fn is_of_ebpf(self) -> bool {
        matches!(self, Self::Maps | Self::Programs)
    }

    /// Returns true if the rows have rates, so that one reading is not enough.
    pub const fn has_rates(self) -> bool {
        matches!(self, Self::Services | Self::Programs)
    }

    /// Returns the headings of the columns.
    pub fn columns(self) -> &'static [&'static str] {
        match self {
            Self::Services => ServiceRate::NAMES,
            Self::Endpoints => EndpointLoad::NAMES,
            Self::Maps => MapRow::NAMES,
            Self::Programs => ProgramLoad::NAMES,
        }
    }

    /// Returns the column by which rows are sorted unless somebody chooses another.
    const fn first_sorting(self) -> Sorting {
        let (column, descending) = match self {
            Self::Services => (ServiceRate::CONNECTIONS, true),
            Self::Endpoints => (EndpointLoad::FLOWS, true),
            Self::Maps => (MapRow::FILL, true),
            Self::Programs => (ProgramLoad::CPU, true),
        };
        Sorting { column, descending }
    }
}
