//! `shunt top` on the command line.

use std::time::Duration;

use clap::{Arg, ArgAction, ArgMatches, Command, error::ErrorKind, value_parser};

use super::{Sorting, View};
use crate::{
    duration,
    inspect::{Output, ServiceName, output_argument},
};

/// `shunt top`.
#[derive(Clone, Debug)]
pub struct TopArguments {
    /// The table.
    pub view: View,
    /// The Service of [`View::Endpoints`].
    pub service: Option<ServiceName>,
    /// Prints one reading, instead of a live table.
    pub once: bool,
    /// The time between two readings.
    pub interval: Duration,
    /// By which column rows are sorted.
    pub sorting: Sorting,
    /// Only rows that contain this.
    pub filter: String,
    /// How to print one reading.
    pub output: Output,
}

const KEYS: &str = "Keys of the live table:
  1 2 3 or Tab     Services, maps, programs
  up down j k      choose a row
  Enter            the endpoints of the Service; Esc goes back
  left right       sort by another column; r reverses the order
  /                show only rows that contain a text; Esc shows all
  space or p       pause
  ? q              help, quit";

/// Returns the definition of the subcommand.
pub fn command() -> Command {
    Command::new("top")
        .about("Show live what the Services, maps and programs of this node do: services, endpoints, maps or programs")
        .after_help(format!(
            "Asks the shunt that runs in this network namespace. Counts that the mode does not have are shown as -. Maps \
             and programs are of the ebpf mode. While programs are shown, the kernel measures the runs of all programs of \
             the machine. It exits with status 1 if nothing answers, and with 2 if the command line is wrong.\n\n{KEYS}"
        ))
        .arg(
            Arg::new("view")
                .value_name("VIEW")
                .value_parser(value_parser!(View))
                .default_value("services")
                .help("What to show"),
        )
        .arg(Arg::new("name").value_name("NAME").help("The Service whose endpoints are shown: NAME, or NAMESPACE/NAME"))
        .arg(
            Arg::new("namespace")
                .short('n')
                .long("namespace")
                .value_name("NAMESPACE")
                .default_value("default")
                .help("The namespace of NAME"),
        )
        .arg(
            Arg::new("once")
                .long("once")
                .action(ArgAction::SetTrue)
                .help("Print one reading and exit; works without a terminal"),
        )
        .arg(
            Arg::new("interval")
                .long("interval")
                .value_name("DURATION")
                .value_parser(interval)
                .default_value("2s")
                .help("Time between two readings"),
        )
        .arg(Arg::new("sort").long("sort").value_name("COLUMN").help("Sort by this column, such as CONN/S; -COLUMN reverses the order").allow_hyphen_values(true))
        .arg(Arg::new("filter").long("filter").value_name("TEXT").default_value("").help("Show only rows that contain this"))
        .arg(output_argument("Format with --once: table, wide, json, yaml, or jsonpath=TEMPLATE").requires("once"))
}

impl TopArguments {
    /// Reads the arguments of the subcommand. The error is for the person who wrote them.
    pub fn read(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let wrong = |text: String| command().bin_name("shunt top").error(ErrorKind::ValueValidation, text);
        let view = matches.get_one("view").copied().unwrap_or(View::Services);
        let text = |name: &str| matches.get_one::<String>(name).cloned().unwrap_or_default();
        let name = text("name");
        let (namespace, name) = match name.split_once('/') {
            Some((namespace, name)) => (namespace.to_owned(), name.to_owned()),
            None => (text("namespace"), name),
        };
        let service = (!name.is_empty()).then_some(ServiceName { namespace, name });
        match (view, &service) {
            (View::Endpoints, None) => return Err(wrong("endpoints needs the NAME of a Service".to_owned())),
            (View::Endpoints, Some(_)) | (_, None) => {}
            (_, Some(_)) => return Err(wrong("NAME has a meaning only for endpoints".to_owned())),
        }
        let sorting = match matches.get_one::<String>("sort") {
            Some(column) => sorting(view, column).ok_or_else(|| wrong(unknown_column(view, column)))?,
            None => view.first_sorting(),
        };
        Ok(Self {
            view,
            service,
            once: matches.get_flag("once"),
            interval: matches.get_one("interval").copied().unwrap_or(Duration::from_secs(2)),
            sorting,
            filter: text("filter"),
            output: matches.get_one::<Output>("output").cloned().unwrap_or(Output::Table),
        })
    }
}

/// Reads a column. Texts are sorted upwards and numbers downwards unless a minus reverses it.
fn sorting(view: View, text: &str) -> Option<Sorting> {
    let (reverses, name) = text.strip_prefix('-').map_or((false, text), |name| (true, name));
    let column = view.columns().iter().position(|column| column.eq_ignore_ascii_case(name))?;
    Some(Sorting { column, descending: is_number(view, column) != reverses })
}

/// Returns true if the column has numbers.
pub(super) fn is_number(view: View, column: usize) -> bool {
    match view {
        View::Services => column >= 4,
        View::Endpoints => column == 5,
        View::Maps | View::Programs => column >= 1,
    }
}

fn unknown_column(view: View, column: &str) -> String {
    let columns = view.columns().join(", ");
    format!("--sort {column}: {} has no such column; it has {columns}", view.title().to_lowercase())
}

fn interval(text: &str) -> Result<Duration, String> {
    let allowed = Duration::from_millis(200)..=Duration::from_hours(1);
    let wrong = || format!("{text} is no interval: must be like 2s, 1m30s or 500ms, from 200ms to 1h");
    duration::parse(text).filter(|interval| allowed.contains(interval)).ok_or_else(wrong)
}
