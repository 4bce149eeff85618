//! Settings by the path of their field, each with where it was set: the file's, overlaid with the flags'.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use glob::Pattern;
use ipnet::IpNet;
use serde_yaml_ng::Value as Yaml;

use super::{
    problem::{Note, Problem},
    resolve,
    schema::{self, Effect, Field},
    value::Value,
};

/// Where a setting was given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// In the configuration file, under the field's path.
    File,
    /// By this flag, without dashes.
    Flag(&'static str),
}

#[derive(Clone, Debug)]
struct Setting {
    origin: Origin,
    /// `None`: given explicitly as empty.
    value: Option<Value>,
    written: String,
}

/// All settings given, and what is wrong with them or in vain.
#[derive(Debug)]
pub(super) struct Settings {
    values: BTreeMap<&'static str, Setting>,
    defaults: BTreeMap<&'static str, Value>,
    problems: Vec<Problem>,
    notes: Vec<Note>,
}

impl Default for Settings {
    fn default() -> Self {
        let default = |field: &Field| Some((field.path, field.kind.read_text(field.default).ok()??));
        let defaults = schema::fields().filter_map(default).collect();
        Self { values: BTreeMap::new(), defaults, problems: Vec::new(), notes: Vec::new() }
    }
}

impl Settings {
    /// Takes in the whole file. Later flags override it.
    pub(super) fn add_file(&mut self, yaml: &Yaml) {
        let Yaml::Mapping(_) = yaml else {
            self.problems.push(Problem {
                setting: "--config".into(),
                value: "not a mapping".into(),
                allowed: "must be one KubeProxyConfiguration of kubeproxy.config.k8s.io/v1alpha1".into(),
            });
            return;
        };
        self.add_section("", yaml);
        for (path, wanted) in
            [("apiVersion", "kubeproxy.config.k8s.io/v1alpha1"), ("kind", "KubeProxyConfiguration")]
        {
            if yaml.get(path).is_none_or(Yaml::is_null) {
                self.problem(path.into(), "missing".into(), format!("must be {wanted}"));
            }
        }
    }

    fn add_section(&mut self, section: &str, yaml: &Yaml) {
        let Yaml::Mapping(entries) = yaml else {
            if !yaml.is_null() {
                let allowed = format!("must be a section with {}", schema::names_in(section).join(", "));
                self.problem(section.into(), written(yaml), allowed);
            }
            return;
        };
        for (key, yaml) in entries {
            let name = key.as_str().map_or_else(|| written(key), String::from);
            let path = if section.is_empty() { name } else { format!("{section}.{name}") };
            match schema::field(&path) {
                Some(field) => self.add_file_field(field, yaml),
                None if !schema::names_in(&path).is_empty() => self.add_section(&path, yaml),
                // As upstream, which decodes strictly, and leniently with a warning where that fails.
                None => {
                    let known = schema::names_in(section).join(", ");
                    self.note(path, format!("unknown field, ignored; known here: {known}"));
                }
            }
        }
    }

    fn add_file_field(&mut self, field: &'static Field, yaml: &Yaml) {
        match field.kind.read_yaml(yaml) {
            Ok(None) => {}
            Ok(Some(value)) if value.is_zero() && (field.zero_is_unset || field.kind.is_period()) => {}
            Ok(Some(value)) => {
                let setting = Setting { origin: Origin::File, value: Some(value), written: written(yaml) };
                self.values.insert(field.path, setting);
            }
            Err(()) => {
                self.problem(field.path.into(), written(yaml), format!("must be {}", field.kind.allowed()));
            }
        }
    }

    /// Takes in one flag, which overrides the file.
    pub(super) fn add_flag(&mut self, flag: &'static str, path: &'static str, text: &str) {
        let Some(field) = schema::field(path) else { return };
        match field.kind.read_text(text) {
            Ok(value) => {
                let written = format!("{text:?}");
                self.values.insert(path, Setting { origin: Origin::Flag(flag), value, written });
            }
            Err(()) => self.refuse_flag(flag, text, &field.kind.allowed()),
        }
    }

    /// Notes a setting that is wrong only beside others.
    pub(super) fn refuse(&mut self, path: &'static str, allowed: impl Into<String>) {
        let (setting, value) = match self.values.get(path) {
            Some(setting) => (name(path, &setting.origin), setting.written.clone()),
            None => (path.into(), "not set".into()),
        };
        self.problem(setting, value, allowed.into());
    }

    fn problem(&mut self, setting: String, value: String, allowed: String) {
        self.problems.push(Problem { setting, value, allowed });
    }

    /// A flag that holds none of what is allowed.
    pub(super) fn refuse_flag(&mut self, flag: &str, text: &str, allowed: &str) {
        self.problem(format!("--{flag}"), format!("{text:?}"), format!("must be {allowed}"));
    }

    /// Something that was given in vain.
    pub(super) fn note(&mut self, setting: impl Into<String>, why: impl Into<String>) {
        self.notes.push(Note { setting: setting.into(), why: why.into() });
    }

    /// Notes what was given, differs from the default, and has no effect in this mode.
    pub(super) fn note_what_has_no_effect(&mut self, mode: &str) {
        let mut notes = Vec::new();
        for (path, setting) in &self.values {
            let (Some(field), Some(value)) = (schema::field(path), &setting.value) else { continue };
            let why = match field.effect {
                Effect::Everywhere => continue,
                Effect::In(modes) if modes.contains(&mode) => continue,
                // These flags are for modes that have a section of their own too.
                Effect::In(_)
                    if setting.origin != Origin::File
                        && resolve::FLAGS_FOR_ALL_BUT_IPVS.contains(path)
                        && mode != "ipvs" =>
                {
                    continue;
                }
                Effect::In(modes) => {
                    format!("only {} reads it, and the mode is {mode}", modes.join(" or "))
                }
                Effect::Nowhere(why) => why.into(),
            };
            // Go writes zeros for fields nobody set.
            if self.defaults.get(path) != Some(value) && !value.is_zero() {
                notes.push(Note { setting: name(path, &setting.origin), why });
            }
        }
        self.notes.extend(notes);
    }

    /// What is given there, or the default.
    fn value(&self, path: &'static str) -> Option<&Value> {
        debug_assert!(schema::field(path).is_some_and(Field::is_read), "{path} is not in the schema as read");
        self.given_or_default(path)
    }

    /// The same of a field that may have no effect.
    pub(super) fn given_or_default(&self, path: &'static str) -> Option<&Value> {
        self.given(path).or_else(|| self.defaults.get(path))
    }

    /// What is given there.
    pub(super) fn given(&self, path: &str) -> Option<&Value> {
        self.values.get(path)?.value.as_ref()
    }

    /// Whether something is given there that is not the default.
    pub(super) fn is_set_apart_from_default(&self, path: &'static str) -> bool {
        self.given(path).is_some_and(|value| self.defaults.get(path) != Some(value))
    }

    /// Whether anything is given there.
    pub(super) fn is_given(&self, path: &str) -> bool {
        self.given(path).is_some()
    }

    /// The setting was given as an explicitly empty flag, which upstream takes for "off".
    pub(super) fn is_emptied_by_flag(&self, path: &'static str) -> bool {
        matches!(self.values.get(path), Some(Setting { origin: Origin::Flag(_), value: None, .. }))
    }

    /// The setting was given as a flag.
    pub(super) fn is_by_flag(&self, path: &'static str) -> bool {
        matches!(self.values.get(path), Some(Setting { origin: Origin::Flag(_), .. }))
    }

    pub(super) fn text(&self, path: &'static str) -> Option<&str> {
        match self.value(path)? {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }

    pub(super) fn is_true(&self, path: &'static str) -> bool {
        matches!(self.value(path), Some(Value::Bool(true)))
    }

    /// 0 where it has no default.
    pub(super) fn integer<T: TryFrom<i64> + Default>(&self, path: &'static str) -> T {
        match self.value(path) {
            Some(Value::Integer(value)) => T::try_from(*value).unwrap_or_default(),
            _ => T::default(),
        }
    }

    /// Zero where it has no default.
    pub(super) fn duration(&self, path: &'static str) -> Duration {
        match self.value(path) {
            Some(Value::Duration(duration)) => *duration,
            _ => Duration::ZERO,
        }
    }

    pub(super) fn address(&self, path: &'static str) -> Option<IpAddr> {
        match self.value(path)? {
            Value::Address(address) => Some(*address),
            _ => None,
        }
    }

    pub(super) fn bind_address(&self, path: &'static str) -> Option<SocketAddr> {
        match self.value(path)? {
            Value::BindAddress(address) => Some(*address),
            _ => None,
        }
    }

    /// CIDRs, and whether `primary` was among them.
    pub(super) fn cidrs(&self, path: &'static str) -> Option<(Vec<IpNet>, bool)> {
        match self.value(path)? {
            Value::Cidrs { cidrs, primary } => Some((cidrs.clone(), *primary)),
            _ => None,
        }
    }

    /// Patterns of interface names; empty where none are set.
    pub(super) fn globs(&self, path: &'static str) -> Vec<Pattern> {
        match self.value(path) {
            Some(Value::Globs(globs)) => globs.clone(),
            _ => Vec::new(),
        }
    }

    /// Whether a feature gate is on; they are off by default where that matters here.
    pub(super) fn gate(&self, name: &str) -> bool {
        match self.given("featureGates") {
            Some(Value::Gates(gates)) => gates.get(name).copied().unwrap_or_default(),
            _ => false,
        }
    }

    /// What is wrong, and what was given in vain.
    pub(super) fn finish(self) -> (Vec<Problem>, Vec<Note>) {
        (self.problems, self.notes)
    }
}

fn name(path: &str, origin: &Origin) -> String {
    match origin {
        Origin::Flag(flag) => format!("--{flag}"),
        Origin::File => path.into(),
    }
}

/// A value as it may be shown in a message: on one line, and not at any length.
fn written(yaml: &Yaml) -> String {
    const LONGEST: usize = 120;
    let text = serde_json::to_string(yaml).unwrap_or_else(|_| "(not text)".into());
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
