//! Settings by field path, each with its source: the file's, overridden by the flags'.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use glob::Pattern;
use ipnet::IpNet;
use serde_yaml_ng::Value as Yaml;

use super::{
    error::{DeprecatedSetting, IneffectiveSetting, InvalidSetting},
    schema::{self, FLAGS_FOR_ALL_BUT_IPVS, Field, UsedBy},
    value::Value,
};
use crate::mode::Mode;

/// Where a setting was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    File,
    /// The flag's name without dashes.
    Flag(&'static str),
}

#[derive(Clone, Debug)]
struct Setting {
    source: Source,
    /// `None` if the setting was given as empty.
    value: Option<Value>,
    written: String,
}

impl Setting {
    /// Returns the flag or the path, for messages.
    fn name(&self, path: &str) -> String {
        match self.source {
            Source::Flag(flag) => format!("--{flag}"),
            Source::File => path.into(),
        }
    }
}

/// All settings that were given, and what is wrong with them.
#[derive(Debug)]
pub(super) struct Settings {
    values: BTreeMap<&'static str, Setting>,
    defaults: BTreeMap<&'static str, Value>,
    invalid: Vec<InvalidSetting>,
    /// Those that matter only if the mode of their section may run.
    of_one_mode: Vec<(&'static str, InvalidSetting)>,
    ineffective: Vec<IneffectiveSetting>,
    pub(super) deprecated: Vec<DeprecatedSetting>,
}

impl Default for Settings {
    fn default() -> Self {
        let default = |field: &Field| Some((field.path, field.kind.read_text(field.default).ok()??));
        let defaults = schema::fields().filter_map(default).collect();
        Self {
            values: BTreeMap::new(),
            defaults,
            invalid: Vec::new(),
            of_one_mode: Vec::new(),
            ineffective: Vec::new(),
            deprecated: Vec::new(),
        }
    }
}

impl Settings {
    /// Adds the whole file.
    pub(super) fn add_file(&mut self, yaml: &Yaml) {
        const HEAD: [(&str, &str); 2] =
            [("apiVersion", "kubeproxy.config.k8s.io/v1alpha1"), ("kind", "KubeProxyConfiguration")];
        if !yaml.is_mapping() {
            let allowed = "must be one KubeProxyConfiguration of kubeproxy.config.k8s.io/v1alpha1";
            return self.add_invalid("--config".into(), "not a mapping".into(), allowed.into());
        }
        self.add_section("", yaml);
        for (path, expected) in HEAD {
            if yaml.get(path).is_none_or(Yaml::is_null) {
                self.add_invalid(path.into(), "missing".into(), format!("must be {expected}"));
            }
        }
    }

    fn add_section(&mut self, section: &str, yaml: &Yaml) {
        let Yaml::Mapping(entries) = yaml else {
            if !yaml.is_null() {
                let allowed = format!("must be a section with {}", schema::names_in(section).join(", "));
                self.add_invalid(section.into(), written(yaml), allowed);
            }
            return;
        };
        for (key, yaml) in entries {
            let name = key.as_str().map_or_else(|| written(key), String::from);
            let path = if section.is_empty() { name } else { format!("{section}.{name}") };
            match schema::field(&path) {
                Some(field) => self.add_file_field(field, yaml),
                None if !schema::names_in(&path).is_empty() => self.add_section(&path, yaml),
                // Upstream decodes strictly first, then leniently with a warning.
                None => {
                    let known = schema::names_in(section).join(", ");
                    self.add_ineffective(path, format!("unknown field, ignored; known here: {known}"));
                }
            }
        }
    }

    fn add_file_field(&mut self, field: &'static Field, yaml: &Yaml) {
        match field.kind.read_yaml(yaml) {
            Ok(None) => {}
            Ok(Some(value)) if value.is_zero() && (field.zero_is_unset || field.kind.is_period()) => {}
            Ok(value) => {
                let setting = Setting { source: Source::File, value, written: written(yaml) };
                self.values.insert(field.path, setting);
            }
            Err(()) => {
                let allowed =
                    format!("must be {}", field.kind.allowed_instead_of(yaml.as_str().unwrap_or("")));
                let invalid = InvalidSetting { setting: field.path.into(), value: written(yaml), allowed };
                self.add_invalid_field(field, invalid, field.kind.is_decodable(yaml));
            }
        }
    }

    /// Adds a flag, which overrides the file.
    pub(super) fn add_flag(&mut self, flag: &'static str, path: &'static str, text: &str) {
        let Some(field) = schema::field(path) else { return };
        if let Ok(value) = field.kind.read_text(text) {
            let written = format!("{text:?}");
            self.values.insert(path, Setting { source: Source::Flag(flag), value, written });
        } else {
            let allowed = format!("must be {}", field.kind.allowed_in_flag(text));
            let invalid =
                InvalidSetting { setting: format!("--{flag}"), value: format!("{text:?}"), allowed };
            self.add_invalid_field(field, invalid, field.kind.is_parsable(text));
        }
    }

    /// As upstream, checks values in the section of one mode only if that mode may run. What cannot
    /// even be decoded is always an error.
    fn add_invalid_field(&mut self, field: &'static Field, invalid: InvalidSetting, is_decodable: bool) {
        let is_of_one_mode = ["ipvs.", "nftables."].iter().any(|section| field.path.starts_with(section));
        if is_decodable && is_of_one_mode {
            self.of_one_mode.push((field.path, invalid));
        } else {
            self.invalid.push(invalid);
        }
    }

    /// Rejects the invalid settings in the sections of modes that may run.
    pub(super) fn check_sections(&mut self, mode: Mode, mode_is_auto: bool) {
        for (path, invalid) in std::mem::take(&mut self.of_one_mode) {
            let Some(UsedBy::Modes(modes)) = schema::field(path).map(|field| field.used_by) else { continue };
            let may_run = |used: &Mode| *used == mode || mode_is_auto && used.is_for_auto();
            if modes.iter().any(may_run) {
                self.invalid.push(invalid);
            } else {
                let InvalidSetting { setting, value, allowed } = invalid;
                self.add_ineffective(setting, format!("{value}: {allowed}; the mode {mode} does not use it"));
            }
        }
    }

    /// Rejects a setting that is only invalid together with others.
    pub(super) fn reject(&mut self, path: &str, allowed: impl Into<String>) {
        let value = self.values.get(path).map_or_else(|| "not set".into(), |setting| setting.written.clone());
        self.add_invalid(self.name_of(path), value, allowed.into());
    }

    /// Returns the flag that set a field, or else its path, for messages.
    fn name_of(&self, path: &str) -> String {
        self.values.get(path).map_or_else(|| path.into(), |setting| setting.name(path))
    }

    /// Rejects a flag whose value is not allowed.
    pub(super) fn reject_flag(&mut self, flag: &str, text: &str, allowed: &str) {
        self.add_invalid(format!("--{flag}"), format!("{text:?}"), format!("must be {allowed}"));
    }

    fn add_invalid(&mut self, setting: String, value: String, allowed: String) {
        self.invalid.push(InvalidSetting { setting, value, allowed });
    }

    /// Adds a setting that was given and has no effect.
    pub(super) fn add_ineffective(&mut self, setting: impl Into<String>, why: impl Into<String>) {
        self.ineffective.push(IneffectiveSetting { setting: setting.into(), why: why.into() });
    }

    /// Adds a part of a field that has no effect.
    pub(super) fn add_ineffective_part(&mut self, path: &str, why: impl Into<String>) {
        self.add_ineffective(self.name_of(path), why);
    }

    /// Adds the settings that differ from the default and have no effect in this mode.
    pub(super) fn find_ineffective(&mut self, mode: Mode) {
        for (path, setting) in &self.values {
            let (Some(field), Some(value)) = (schema::field(path), &setting.value) else { continue };
            // Some flags also apply to modes that have a section of their own in the file.
            let is_for_all = setting.source != Source::File && FLAGS_FOR_ALL_BUT_IPVS.contains(path);
            let why = match field.used_by {
                UsedBy::AllModes => continue,
                UsedBy::Modes(modes) if modes.contains(&mode) => continue,
                UsedBy::Modes(_) if is_for_all && mode != Mode::Ipvs => continue,
                UsedBy::Modes(modes) => {
                    let names: Vec<_> = modes.iter().map(|mode| mode.name()).collect();
                    format!("only mode {} uses it, and the mode is {mode}", names.join(" or "))
                }
                UsedBy::Nothing(why) => why.into(),
            };
            // Go writes zeros for fields that nobody set.
            if self.defaults.get(path) != Some(value) && !value.is_zero() {
                self.ineffective.push(IneffectiveSetting { setting: setting.name(path), why });
            }
        }
    }

    /// Returns the given value or the default.
    fn value(&self, path: &str) -> Option<&Value> {
        debug_assert!(
            schema::field(path).is_some_and(|field| !matches!(field.used_by, UsedBy::Nothing(_))),
            "{path} is not in the schema as used"
        );
        self.given_or_default(path)
    }

    /// Returns the given value or the default, also of a field without an effect.
    pub(super) fn given_or_default(&self, path: &str) -> Option<&Value> {
        self.given(path).or_else(|| self.defaults.get(path))
    }

    /// Returns the given value.
    pub(super) fn given(&self, path: &str) -> Option<&Value> {
        self.values.get(path)?.value.as_ref()
    }

    /// Returns true if the given value differs from the default.
    pub(super) fn is_not_default(&self, path: &str) -> bool {
        self.given(path).is_some_and(|value| self.defaults.get(path) != Some(value))
    }

    /// Returns true if the flag was given with an empty value, which means "off" for upstream.
    pub(super) fn is_emptied_by_flag(&self, path: &str) -> bool {
        self.is_by_flag(path) && self.given(path).is_none()
    }

    /// Returns true if the setting was given as a flag.
    pub(super) fn is_by_flag(&self, path: &str) -> bool {
        matches!(self.values.get(path), Some(Setting { source: Source::Flag(_), .. }))
    }

    pub(super) fn text(&self, path: &str) -> Option<&str> {
        if let Value::Text(text) = self.value(path)? { Some(text) } else { None }
    }

    pub(super) fn is_true(&self, path: &str) -> bool {
        matches!(self.value(path), Some(Value::Bool(true)))
    }

    /// Returns 0 if the field is unset and has no default.
    pub(super) fn integer<T: TryFrom<i64> + Default>(&self, path: &str) -> T {
        match self.value(path) {
            Some(Value::Integer(value)) => T::try_from(*value).unwrap_or_default(),
            _ => T::default(),
        }
    }

    /// Returns zero if the field is unset and has no default.
    pub(super) fn duration(&self, path: &str) -> Duration {
        if let Some(Value::Duration(duration)) = self.value(path) { *duration } else { Duration::ZERO }
    }

    pub(super) fn address(&self, path: &str) -> Option<IpAddr> {
        if let Value::Address(address) = self.value(path)? { Some(*address) } else { None }
    }

    pub(super) fn bind_address(&self, path: &str) -> Option<SocketAddr> {
        if let Value::BindAddress(address) = self.value(path)? { Some(*address) } else { None }
    }

    /// Returns CIDRs, and true if the list has the word `primary`.
    pub(super) fn cidrs(&self, path: &str) -> Option<(Vec<IpNet>, bool)> {
        if let Value::Cidrs { cidrs, primary } = self.value(path)? {
            Some((cidrs.clone(), *primary))
        } else {
            None
        }
    }

    /// Returns patterns of interface names.
    pub(super) fn globs(&self, path: &str) -> Vec<Pattern> {
        if let Some(Value::Globs(globs)) = self.value(path) { globs.clone() } else { Vec::new() }
    }

    /// Returns the invalid settings and those without an effect.
    pub(super) fn finish(self) -> (Vec<InvalidSetting>, Vec<IneffectiveSetting>) {
        (self.invalid, self.ineffective)
    }
}

/// Shows a value in a message: on one line and not too long.
fn written(yaml: &Yaml) -> String {
    const MAX: usize = 120;
    let text = serde_json::to_string(yaml).unwrap_or_else(|_| "(not text)".into());
    match text.char_indices().nth(MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
