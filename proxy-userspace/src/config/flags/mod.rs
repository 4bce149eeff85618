//! The command line. Each flag sets one field of the configuration file.

mod generate;
mod table;
mod words;

use std::{collections::BTreeMap, ffi::OsString, path::PathBuf};

use clap::{Arg, ArgAction, ArgMatches, Command, ValueHint};

pub use self::generate::Generated;
pub(super) use self::table::{FLAGS, Flag, Target};
use self::table::{NO_EFFECT, SWITCH};
use super::{
    error::DeprecatedSetting,
    go,
    schema::{self, UsedBy},
    settings::Settings,
};
use crate::{
    doctor::{self, DoctorArguments},
    inspect::Verb,
    top::{self, TopArguments},
};

const CONFIG_HELP: &str = "KubeProxyConfiguration (kubeproxy.config.k8s.io/v1alpha1), with shunt's own settings \
                           in the section 'shunt'; shunt watches it for changes";
const ONCE: &str = "Do one thing and exit";

/// The output format of `shunt probe`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum ProbeOutput {
    /// A table for people.
    Table,
    /// One JSON document.
    Json,
}

/// The command line. The values of flags are not checked yet.
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
    /// `--cleanup-own`.
    pub cleanup_own: bool,
    /// The subcommand `probe` and its output format.
    pub probe: Option<ProbeOutput>,
    /// The subcommand `get` or `explain`.
    pub verb: Option<Verb>,
    /// The subcommand `doctor`.
    pub doctor: Option<DoctorArguments>,
    /// The subcommand `top`.
    pub top: Option<TopArguments>,
    /// The subcommand `completion` or `man`.
    pub generated: Option<Generated>,
    given: Vec<GivenFlag>,
}

#[derive(Clone, Debug)]
struct GivenFlag {
    /// The index in [`FLAGS`].
    index: usize,
    /// The name or the alias that was given.
    name: &'static str,
    text: String,
}

impl Flags {
    /// Reads a command line whose first item is the program's name. `--help` and `--version` also
    /// return `Err`.
    pub fn parse(arguments: impl IntoIterator<Item = impl Into<OsString>>) -> Result<Self, clap::Error> {
        let mut command = command();
        let arguments = arguments.into_iter().filter_map(|argument| normalize(argument.into()));
        let arguments = words::without_empty(arguments, &command);
        let matches = command.try_get_matches_from_mut(&arguments)?;
        let given = FLAGS.iter().enumerate();
        let given = given.filter_map(|(index, flag)| {
            let name = words::given_name(flag, &arguments);
            Some(GivenFlag { index, name, text: joined(&matches, flag)? })
        });
        let given = given.collect();
        let is_on = |name: &str| matches.get_one(name).copied().unwrap_or(false);
        let flags = Self {
            config: given_file(&matches, "config"),
            write_config_to: given_file(&matches, "write-config-to"),
            init_only: is_on("init-only"),
            probe: matches.subcommand_matches("probe").and_then(|probe| probe.get_one("output").copied()),
            verb: Verb::read(&matches)?,
            doctor: matches.subcommand_matches("doctor").and_then(DoctorArguments::read),
            top: matches.subcommand_matches("top").map(TopArguments::read).transpose()?,
            generated: Generated::read(&matches),
            cleanup: is_on("cleanup"),
            cleanup_own: is_on("cleanup-own"),
            given,
        };
        words::check(&mut command, &matches, &flags.tasks())?;
        Ok(flags)
    }

    /// Returns the flags that ask for one task only.
    fn tasks(&self) -> Vec<&'static str> {
        let tasks = [
            ("cleanup", self.cleanup),
            ("cleanup-own", self.cleanup_own),
            ("init-only", self.init_only),
            ("write-config-to", self.write_config_to.is_some()),
        ];
        tasks.into_iter().filter_map(|(name, is_on)| is_on.then_some(name)).collect()
    }

    /// Returns each flag with the value that was given, or else with its default, for `/flagz`. As
    /// with upstream, the configuration file does not count.
    pub fn values(&self) -> BTreeMap<&'static str, String> {
        let path = |path: &Option<PathBuf>| path.as_ref().map(|path| path.display().to_string());
        let once = [
            ("cleanup", self.cleanup.to_string()),
            ("cleanup-own", self.cleanup_own.to_string()),
            ("config", path(&self.config).unwrap_or_default()),
            ("init-only", self.init_only.to_string()),
            ("write-config-to", path(&self.write_config_to).unwrap_or_default()),
        ];
        let default = |flag: &Flag| flag.path().and_then(schema::field).map_or("", |field| field.default);
        let defaults = FLAGS.iter().map(|flag| (flag.name, default(flag).to_owned()));
        let given = self.given.iter().map(|given| (FLAGS[given.index].name, given.text.clone()));
        once.into_iter().chain(defaults).chain(given).collect()
    }

    /// Returns true if shunt is to run: no flag asks for one task only.
    pub fn runs(&self) -> bool {
        self.tasks().is_empty()
    }

    /// Adds the given flags to the settings. As with upstream, most flags of kube-proxy are ignored
    /// if there is a file (`Options.Complete`).
    pub(super) fn add_to(&self, settings: &mut Settings) {
        let text_of = |name: &str| {
            self.given.iter().find(|given| FLAGS[given.index].name == name).map(|given| &*given.text)
        };
        for GivenFlag { index, name, text } in &self.given {
            let flag = &FLAGS[*index];
            if self.config.is_some() && !flag.overrides_file {
                let why = "ignored because --config is given, as with kube-proxy";
                settings.add_ineffective(format!("--{name}"), why);
                continue;
            }
            match flag.sets {
                Target::Field(path) => settings.add_flag(name, path, text),
                Target::Nothing(why) => settings.add_ineffective(format!("--{name}"), why),
                Target::PortOf(other) => {
                    let [setting, instead] = [flag.name, other].map(|name| format!("--{name}"));
                    settings.deprecated.push(DeprecatedSetting { setting, instead });
                    add_port(settings, flag.name, text, other, text_of(other));
                }
            }
        }
    }
}

/// Adds `--healthz-port` or `--metrics-port`, as upstream's `addressFromDeprecatedFlags` does. In
/// [`FLAGS`] they follow the flags whose values they change.
fn add_port(
    settings: &mut Settings,
    flag: &'static str,
    text: &str,
    other: &'static str,
    address: Option<&str>,
) {
    let Some(path) = FLAGS.iter().find(|flag| flag.name == other).and_then(Flag::path) else { return };
    match go::integer(text).map(u16::try_from) {
        Some(Ok(0)) => settings.add_flag(flag, path, ""),
        Some(Ok(port)) => {
            if let Some(ip) = address.and_then(crate::model::parse_ip_sloppy) {
                settings.add_flag(other, path, &std::net::SocketAddr::new(ip, port).to_string());
            }
        }
        _ => settings.reject_flag(flag, text, "a port from 1 to 65535, or 0 for none"),
    }
}

/// Normalizes an argument as upstream does (`WordSepNormalizeFunc` and `verflag` of
/// component-base): `_` may separate words, and `--version` and `--help` may have a value. Returns
/// `None` for an argument that means nothing, such as `--version=false`.
fn normalize(argument: OsString) -> Option<OsString> {
    let Some(flag) = argument.to_str().and_then(|text| text.strip_prefix("--")) else {
        return Some(argument);
    };
    let (name, value) = flag.split_once('=').map_or((flag, None), |(name, value)| (name, Some(value)));
    let name = name.replace('_', "-");
    let Some(value) = value else { return Some(format!("--{name}").into()) };
    let is_on = match (name.as_str(), value) {
        ("version", "raw") => Some(true),
        ("version" | "help", value) => go::bool(value),
        _ => None,
    };
    match is_on {
        Some(true) => Some(format!("--{name}").into()),
        Some(false) => None,
        None => Some(format!("--{name}={value}").into()),
    }
}

/// Returns the flag's value. A repeated flag adds to a list. Of other flags the last value counts,
/// as upstream.
fn joined(matches: &ArgMatches, flag: &Flag) -> Option<String> {
    let values: Vec<_> = matches.get_many::<String>(flag.name)?.map(String::as_str).collect();
    let is_list = flag.path().and_then(schema::field).is_some_and(|field| field.kind.is_list());
    if is_list { Some(values.join(",")) } else { values.last().map(ToString::to_string) }
}

/// Returns the command line's definition.
pub(super) fn command() -> Command {
    let about = "A Kubernetes Service proxy: makes the Services of a cluster work on this node.";
    let mut command = Command::new("shunt")
        .version(env!("CARGO_PKG_VERSION"))
        .about(about)
        .disable_help_flag(true)
        .disable_version_flag(true)
        .after_help(after_help())
        .subcommand(probe())
        .subcommands(Verb::commands())
        .subcommand(doctor::command())
        .subcommand(top::command())
        .subcommands(Generated::commands())
        .arg(file("config", CONFIG_HELP));
    for flag in FLAGS {
        command = command.arg(arg(flag));
    }
    let once = [
        toggle("cleanup", "Remove everything that shunt or kube-proxy wrote into the kernel, and exit"),
        toggle(
            "cleanup-own",
            "Wait until another proxy serves this node, hand connections over to it, remove only what is shunt's, and exit",
        ),
        toggle(
            "init-only",
            "Set the sysctls of conntrack and of the ipvs mode, and exit; run it as root before a shunt that has fewer privileges",
        ),
        file("write-config-to", "Write the configuration, with defaults and flags, to this file, and exit"),
        Arg::new("version")
            .long("version")
            .short('V')
            .action(ArgAction::Version)
            .help("Print the version, and exit"),
        Arg::new("help")
            .long("help")
            .short('h')
            .action(ArgAction::Help)
            // Also of subcommands.
            .global(true)
            .help("Print this help, and exit"),
    ];
    once.into_iter().fold(command, |command, arg| command.arg(arg.help_heading(ONCE)))
}

/// Names the flags that override the file.
fn after_help() -> String {
    let overriding = FLAGS.iter().filter(|flag| flag.overrides_file && flag.heading != NO_EFFECT);
    let names: Vec<_> = overriding.map(|flag| format!("--{}", flag.name)).collect();
    format!(
        "With --config, the file replaces kube-proxy's flags, as with kube-proxy. These flags override the \
         file: {}. Settings that are given nowhere have kube-proxy's defaults.",
        names.join(", ")
    )
}

fn arg(flag: &Flag) -> Arg {
    let arg = Arg::new(flag.name)
        .long(flag.name)
        .short(flag.name.chars().next().filter(|_| flag.name.len() == 1))
        .visible_aliases(flag.aliases)
        .value_name(flag.value)
        .help_heading(flag.heading)
        .help(help(flag))
        .allow_hyphen_values(true)
        .action(ArgAction::Append);
    if flag.value == SWITCH { switch(arg) } else { arg }
}

/// Returns the description of a flag with its default.
pub(super) fn help(flag: &Flag) -> String {
    let Some(field) = flag.path().and_then(schema::field) else {
        return if let Target::Nothing(why) = flag.sets { why.into() } else { flag.help.into() };
    };
    let help = if let UsedBy::Nothing(why) = field.used_by { why } else { flag.help };
    match field.default {
        "" | "false" => help.into(),
        default => format!("{help} [default: {default}]"),
    }
}

fn probe() -> Command {
    Command::new("probe")
        .about("Report what this kernel offers, what each mode lacks, how to fix that, and which mode auto chooses")
        .after_help("The probe tests each feature. Tests that change something run in a temporary network namespace, or remove it again, so nothing is left behind. It exits with status 1 if no mode works.")
        .arg(
            Arg::new("output")
                .short('o')
                .long("output")
                .value_name("FORMAT")
                .value_parser(clap::value_parser!(ProbeOutput))
                .default_value("table")
                .help("Output format"),
        )
}

/// Returns the path that a flag has. An empty one is none.
fn given_file(matches: &ArgMatches, name: &str) -> Option<PathBuf> {
    matches.get_one::<OsString>(name).filter(|path| !path.is_empty()).map(PathBuf::from)
}

fn file(name: &'static str, help: &'static str) -> Arg {
    // An empty path is accepted, as by kube-proxy: a template may leave one.
    let parser = clap::value_parser!(OsString);
    Arg::new(name)
        .long(name)
        .value_name("FILE")
        .value_parser(parser)
        .value_hint(ValueHint::FilePath)
        .help(help)
}

fn toggle(name: &'static str, help: &'static str) -> Arg {
    let value = |text: &str| go::bool(text).ok_or("must be true or false");
    switch(Arg::new(name).long(name).value_name(SWITCH).help(help)).value_parser(value)
}

/// Like Go's flags, `--flag` alone means true, and `--flag=false` means false.
fn switch(arg: Arg) -> Arg {
    arg.num_args(0..=1).require_equals(true).default_missing_value("true")
}
