//! The command line: each flag mirrors one field of the file, and says so in `--help`.

mod table;

use std::{ffi::OsString, path::PathBuf};

use clap::{Arg, ArgAction, ArgMatches, Command};

pub(super) use self::table::{FLAGS, Flag, Sets};
use self::table::{SWITCH, VAIN};
use super::{
    schema::{self, Effect},
    settings::Settings,
    value::{go_bool, go_integer},
};

const ONCE: &str = "Do one thing and exit";

/// How `shunt probe` reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum ProbeOutput {
    /// A table for people.
    Table,
    /// One JSON document.
    Json,
}

/// The command line, read but not yet checked.
#[derive(Clone, Debug)]
pub struct Flags {
    /// `--config`.
    pub config: Option<PathBuf>,
    /// `--write-config-to`.
    pub write_config_to: Option<PathBuf>,
    /// `--init-only`.
    pub init_only: bool,
    /// `--cleanup`.
    pub cleanup: bool,
    /// The subcommand `probe`, and how it reports.
    pub probe: Option<ProbeOutput>,
    given: Vec<(usize, String)>,
}

impl Flags {
    /// Reads a command line whose first item is the program's name. `Err` also stands for `--help` and `--version`.
    pub fn parse(arguments: impl IntoIterator<Item = impl Into<OsString>>) -> Result<Self, clap::Error> {
        let arguments = arguments.into_iter().filter_map(|argument| as_named_here(argument.into()));
        let matches = command().try_get_matches_from(arguments)?;
        let given = FLAGS.iter().enumerate();
        let given = given.filter_map(|(index, flag)| Some((index, joined(&matches, flag)?))).collect();
        let is_on = |name: &str| matches.get_one(name).copied().unwrap_or(false);
        Ok(Self {
            config: matches.get_one("config").cloned(),
            write_config_to: matches.get_one("write-config-to").cloned(),
            init_only: is_on("init-only"),
            probe: matches.subcommand_matches("probe").and_then(|probe| probe.get_one("output").copied()),
            cleanup: is_on("cleanup"),
            given,
        })
    }

    /// Overlays the settings with the flags that were given. Beside a file most of kube-proxy's flags do not count, as
    /// upstream (`Options.Complete`).
    pub(super) fn add_to(&self, settings: &mut Settings) {
        let text_of = |name: &str| {
            self.given.iter().find(|(index, _)| FLAGS[*index].name == name).map(|(_, text)| text.as_str())
        };
        for (index, text) in &self.given {
            let flag = &FLAGS[*index];
            if self.config.is_some() && !flag.counts_beside_file {
                settings
                    .note(format!("--{}", flag.name), "not looked at beside --config, as with kube-proxy");
                continue;
            }
            match flag.sets {
                Sets::Field(path) => settings.add_flag(flag.name, path, text),
                Sets::Nothing(why) => settings.note(format!("--{}", flag.name), why),
                Sets::PortOf(other) => add_port(settings, flag.name, text, other, text_of(other)),
            }
        }
    }
}

/// `--healthz-port` and `--metrics-port`: upstream's `addressFromDeprecatedFlags`. They stand after the flags they change.
fn add_port(
    settings: &mut Settings,
    flag: &'static str,
    text: &str,
    other: &'static str,
    address: Option<&str>,
) {
    let Some(path) = FLAGS.iter().find(|flag| flag.name == other).and_then(Flag::path) else { return };
    match go_integer(text).map(u16::try_from) {
        Some(Ok(0)) => settings.add_flag(flag, path, ""),
        Some(Ok(port)) => {
            if let Some(ip) = address.and_then(crate::model::sloppy_ip) {
                settings.add_flag(other, path, &std::net::SocketAddr::new(ip, port).to_string());
            }
        }
        _ => settings.refuse_flag(flag, text, "a port from 1 to 65535, or 0 for none"),
    }
}

/// Words in flags may be parted by `_` too, and `--version` and `--help` may have a value, as upstream (`WordSepNormalizeFunc` and
/// `verflag` of component-base). None where it then says nothing, as `--version=false` does.
fn as_named_here(argument: OsString) -> Option<OsString> {
    let Some(flag) = argument.to_str().and_then(|text| text.strip_prefix("--")) else {
        return Some(argument);
    };
    let (name, value) = flag.split_once('=').map_or((flag, None), |(name, value)| (name, Some(value)));
    let name = name.replace('_', "-");
    let Some(value) = value else { return Some(format!("--{name}").into()) };
    let is_on = match (name.as_str(), value) {
        ("version", "raw") => Some(true),
        ("version" | "help", value) => go_bool(value),
        _ => None,
    };
    match is_on {
        Some(true) => Some(format!("--{name}").into()),
        Some(false) => None,
        None => Some(format!("--{name}={value}").into()),
    }
}

/// The flag's value; lists may also be given by repeating the flag. Of others the last one counts, as upstream.
fn joined(matches: &ArgMatches, flag: &Flag) -> Option<String> {
    let values: Vec<_> = matches.get_many::<String>(flag.name)?.map(String::as_str).collect();
    let is_list = flag.path().and_then(schema::field).is_some_and(|field| field.kind.is_list());
    if is_list { Some(values.join(",")) } else { values.last().map(ToString::to_string) }
}

/// The command, for `--help` and to read a command line with.
fn command() -> Command {
    let about = "A Kubernetes Service proxy: makes the Services of a cluster work on this node.";
    let mut command = Command::new("shunt")
        .version(env!("CARGO_PKG_VERSION"))
        .about(about)
        .disable_help_flag(true)
        .disable_version_flag(true)
        .after_help(after_help())
        .subcommand(probe())
        .arg(file("config", "A KubeProxyConfiguration (kubeproxy.config.k8s.io/v1alpha1), with shunt's own settings under 'shunt'; its changes are followed"));
    for flag in FLAGS {
        command = command.arg(arg(flag));
    }
    let once = [
        toggle("cleanup", "Remove everything this program or kube-proxy ever put into the kernel, and exit"),
        toggle(
            "init-only",
            "Set the sysctls of conntrack and of the ipvs mode, which a process with few privileges cannot do later, and exit",
        ),
        file("write-config-to", "Write the configuration, with defaults and flags, to this file and exit"),
        Arg::new("version")
            .long("version")
            .short('V')
            .action(ArgAction::Version)
            .help("Print the version and exit"),
        Arg::new("help").long("help").short('h').action(ArgAction::Help).help("Print this and exit"),
    ];
    once.into_iter().fold(command, |command, arg| command.arg(arg.help_heading(ONCE)))
}

/// The flags that count beside a file are named, so that nobody has to find out.
fn after_help() -> String {
    let beside = FLAGS.iter().filter(|flag| flag.counts_beside_file && flag.heading != VAIN);
    let names: Vec<_> = beside.map(|flag| format!("--{}", flag.name)).collect();
    format!(
        "With --config, the file takes the place of kube-proxy's flags, as it does with kube-proxy. These count beside it and \
         override it: {}. Settings given nowhere have kube-proxy's defaults.",
        names.join(", ")
    )
}

fn arg(flag: &Flag) -> Arg {
    let arg = Arg::new(flag.name)
        .long(flag.name)
        .visible_aliases(flag.aliases)
        .value_name(flag.value)
        .help_heading(flag.heading)
        .help(help(flag))
        .allow_hyphen_values(true)
        .action(ArgAction::Append);
    let arg = if let Some(short) = flag.short { arg.short(short) } else { arg };
    if flag.value == SWITCH { switch(arg) } else { arg }
}

/// What the flag is for, and its default.
pub(super) fn help(flag: &Flag) -> String {
    let Some(field) = flag.path().and_then(schema::field) else {
        return match flag.sets {
            Sets::Nothing(why) => why.into(),
            _ => flag.help.into(),
        };
    };
    let help = match field.effect {
        Effect::Nowhere(why) => why,
        _ => flag.help,
    };
    match field.default {
        "" | "false" => help.into(),
        default => format!("{help} [default: {default}]"),
    }
}

fn probe() -> Command {
    Command::new("probe")
        .about("Tell what this kernel offers, what each mode lacks and what to do about it, and which mode auto takes")
        .after_help("Everything is tried, in a network namespace of its own where it would change something, and nothing is left behind. Exits with 1 if no mode works.")
        .arg(
            Arg::new("output")
                .short('o')
                .long("output")
                .value_name("FORMAT")
                .value_parser(clap::value_parser!(ProbeOutput))
                .default_value("table")
                .help("How to report"),
        )
}

fn file(name: &'static str, help: &'static str) -> Arg {
    Arg::new(name).long(name).value_name("FILE").value_parser(clap::value_parser!(PathBuf)).help(help)
}

fn toggle(name: &'static str, help: &'static str) -> Arg {
    let value = |text: &str| go_bool(text).ok_or("must be true or false");
    switch(Arg::new(name).long(name).value_name(SWITCH).help(help)).value_parser(value)
}

/// `--flag` alone for true, and `--flag=false`, as Go's flags are.
fn switch(arg: Arg) -> Arg {
    arg.num_args(0..=1).require_equals(true).default_missing_value("true")
}
