//! `shunt doctor` on the command line.

use std::path::PathBuf;

use clap::{Arg, ArgMatches, Command, value_parser};

use crate::{
    inspect::{Output, output_argument},
    kernel::bpf::DEFAULT_PIN_DIR,
};

/// `shunt doctor`.
#[derive(Clone, Debug)]
pub struct DoctorArguments {
    /// How to print.
    pub output: Output,
    /// Where to write a bug report: [`crate::output_file`].
    pub bundle: Option<PathBuf>,
    /// The directory of pins if no daemon names its own.
    pub pin_directory: PathBuf,
}

/// Returns the definition of the subcommand.
pub fn command() -> Command {
    Command::new("doctor")
        .about("Find what is wrong on this node, and say what mends it")
        .after_help(
            "It changes nothing, and works in each mode and without a shunt that runs. It exits with status 0 if there \
             is nothing to mend, 1 if there are warnings, 2 if there are errors or the command line is wrong, and 3 if \
             the report cannot be written.",
        )
        .arg(output_argument("Format: table, json, yaml, or jsonpath=TEMPLATE"))
        .arg(
            Arg::new("bundle")
                .long("bundle")
                .value_name("FILE.tar.zst")
                .value_parser(value_parser!(PathBuf))
                .help(
                    "Write a bug report to a new file, or with - to standard output, without secrets, and print what \
                     is in it",
                ),
        )
        .arg(
            Arg::new("bpf-pin-dir")
                .long("bpf-pin-dir")
                .value_name("DIRECTORY")
                .value_parser(value_parser!(PathBuf))
                .default_value(DEFAULT_PIN_DIR)
                .help("Where pins are, if no shunt runs that says it"),
        )
}

impl DoctorArguments {
    /// Reads the arguments of the subcommand.
    pub fn read(matches: &ArgMatches) -> Option<Self> {
        Some(Self {
            output: matches.get_one::<Output>("output")?.clone(),
            bundle: matches.get_one::<PathBuf>("bundle").cloned(),
            pin_directory: matches.get_one::<PathBuf>("bpf-pin-dir")?.clone(),
        })
    }
}
