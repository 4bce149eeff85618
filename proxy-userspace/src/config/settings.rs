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
    problem::Problem,
    schema::{self, Field},
    value::{self, Value},
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

/// All settings given, and what is wrong with them.
#[derive(Debug, Default)]
pub(super) struct Settings {
    values: BTreeMap<&'static str, Setting>,
    problems: Vec<Problem>,
    unread: Vec<&'static str>,
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
                None => {
                    let allowed =
                        format!("unknown field; known here: {}", schema::names_in(section).join(", "));
                    self.problem(path, written(yaml), allowed);
                }
            }
        }
    }

    fn add_file_field(&mut self, field: &'static Field, yaml: &Yaml) {
        match field.kind.read_yaml(yaml) {
            Ok(None) => {}
            Ok(Some(value)) => {
                if !field.read && value::is_worth_a_warning(&value) {
                    self.unread.push(field.path);
                }
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
            Err(()) => {
                self.problem(
                    format!("--{flag}"),
                    format!("{text:?}"),
                    format!("must be {}", field.kind.allowed()),
                );
            }
        }
    }

    /// Notes a setting that is wrong only beside others.
    pub(super) fn refuse(&mut self, path: &'static str, allowed: impl Into<String>) {
        let (setting, value) = match self.values.get(path) {
            Some(Setting { origin: Origin::Flag(flag), written, .. }) => {
                (format!("--{flag}"), written.clone())
            }
            Some(Setting { origin: Origin::File, written, .. }) => (path.into(), written.clone()),
            None => (path.into(), "not set".into()),
        };
        self.problem(setting, value, allowed.into());
    }

    fn problem(&mut self, setting: String, value: String, allowed: String) {
        self.problems.push(Problem { setting, value, allowed });
    }

    fn value(&self, path: &'static str) -> Option<&Value> {
        debug_assert!(
            schema::field(path).is_some_and(|field| field.read),
            "{path} is not in the schema as read"
        );
        self.values.get(path)?.value.as_ref()
    }

    /// The setting was given as an explicitly empty flag, which upstream takes for "off".
    pub(super) fn is_emptied_by_flag(&self, path: &'static str) -> bool {
        matches!(self.values.get(path), Some(Setting { origin: Origin::Flag(_), value: None, .. }))
    }

    /// The setting was given as a flag.
    pub(super) fn is_by_flag(&self, path: &'static str) -> bool {
        matches!(self.values.get(path), Some(Setting { origin: Origin::Flag(_), .. }))
    }

    /// Nothing in this mode depends on a section: what the file has there is to be warned of.
    pub(super) fn leave_unread(&mut self, section: &str) {
        let is_worth_it = |path: &str, setting: &Setting| {
            let is_in_section = path.strip_prefix(section).is_some_and(|rest| rest.starts_with('.'));
            let value = setting.value.as_ref().filter(|_| setting.origin == Origin::File);
            is_in_section && value.is_some_and(value::is_worth_a_warning)
        };
        let given = self.values.iter().filter(|(path, setting)| is_worth_it(path, setting));
        let given: Vec<_> = given.map(|(path, _)| *path).filter(|path| !self.unread.contains(path)).collect();
        self.unread.extend(given);
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

    /// A switch that is neither on nor off where nobody set it.
    pub(super) fn flag(&self, path: &'static str) -> Option<bool> {
        match self.value(path)? {
            Value::Bool(value) => Some(*value),
            _ => None,
        }
    }

    pub(super) fn integer(&self, path: &'static str) -> Option<u32> {
        match self.value(path)? {
            Value::Integer(value) => u32::try_from(*value).ok(),
            _ => None,
        }
    }

    pub(super) fn signed(&self, path: &'static str) -> Option<i32> {
        match self.value(path)? {
            Value::Integer(value) => i32::try_from(*value).ok(),
            _ => None,
        }
    }

    pub(super) fn duration(&self, path: &'static str) -> Option<Duration> {
        match self.value(path)? {
            Value::Duration(duration) => Some(*duration),
            _ => None,
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

    /// What is wrong, and which fields of the file were set although nothing reads them.
    pub(super) fn finish(self) -> (Vec<Problem>, Vec<&'static str>) {
        (self.problems, self.unread)
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
