//! Generates the part of the chart's `values.schema.json` that describes the configuration file,
//! and checks that it is current.

use std::{fs, path::Path};

use serde_json::{Map, Value as Json, json};

use crate::config::{
    schema::{self, Field},
    value::Kind,
};

/// A duration in Go's syntax. Empty means that the field is unset.
const DURATION: &str = r"^(([0-9]+(\.[0-9]*)?|\.[0-9]+)(ns|us|µs|ms|s|m|h))+$|^0?$";
const CIDR: &str = "[0-9A-Fa-f:.]+/[0-9]{1,3}";

/// Returns the schema of a value. Null and empty text mean that the field is unset.
fn schema_of(kind: Kind) -> Json {
    let list = |item: Json| json!({"type": ["array", "null"], "items": item});
    match kind {
        Kind::Text => json!({"type": ["string", "null"]}),
        Kind::OneOf(words) => {
            let unset = [json!(""), Json::Null];
            let off = Kind::has_off(words).then_some(json!(false));
            json!({"enum": words.iter().map(|word| json!(word)).chain(off).chain(unset).collect::<Vec<_>>()})
        }
        Kind::Bool => json!({"type": ["boolean", "null"]}),
        Kind::Integer { min, max } => json!({"type": ["integer", "null"], "minimum": min, "maximum": max}),
        Kind::Number => json!({"type": ["number", "null"]}),
        Kind::Duration | Kind::Period => {
            json!({"type": ["string", "integer", "null"], "pattern": DURATION, "minimum": 0, "maximum": 0})
        }
        Kind::FlushFrequency => {
            json!({"type": ["string", "integer", "null"], "pattern": DURATION, "minimum": 0})
        }
        Kind::Address => json!({"type": ["string", "null"], "pattern": "^[0-9A-Fa-f:.]*$"}),
        Kind::BindAddress { .. } => json!({"type": ["string", "null"], "pattern": r"^[0-9A-Fa-f:.\[\]]*$"}),
        Kind::Cidrs => list(json!({"type": "string", "pattern": format!("^{CIDR}$")})),
        Kind::NodePortAddresses => {
            list(json!({"type": "string", "pattern": format!("^({CIDR}|primary|localhost|all)$")}))
        }
        Kind::InterfaceGlobs => list(json!({"type": "string", "minLength": 1})),
        Kind::FeatureGates => {
            json!({"type": ["object", "null"], "additionalProperties": {"type": "boolean"}})
        }
        Kind::VModule => list(json!({
            "type": "object",
            "additionalProperties": false,
            "required": ["filePattern", "verbosity"],
            "properties": {"filePattern": {"type": "string"}, "verbosity": {"type": "integer", "minimum": 0}},
        })),
        Kind::Quantity => json!({"type": ["string", "integer", "null"]}),
    }
}

fn section() -> Json {
    json!({"type": ["object", "null"], "additionalProperties": false, "properties": {}})
}

/// Returns the properties of an object of the schema.
fn properties(section: &mut Json) -> &mut Map<String, Json> {
    section["properties"].as_object_mut().expect("a section has properties")
}

fn add(root: &mut Json, field: &Field) {
    let mut names: Vec<&str> = field.path.split('.').collect();
    let last = names.pop().expect("a path is not empty");
    let owner = names.into_iter().fold(root, |at, name| properties(at).entry(name).or_insert_with(section));
    properties(owner).insert(last.to_owned(), schema_of(field.kind));
}

/// Returns the schema of the whole file.
fn schema_of_file() -> Json {
    let mut root = section();
    schema::fields().for_each(|field| add(&mut root, field));
    root["type"] = json!("object");
    root["description"] = json!("The KubeProxyConfiguration; docs/flags.md explains its fields.");
    root["required"] = json!(["apiVersion", "kind"]);
    for name in ["apiVersion", "kind"] {
        let field = schema::field(name).expect("a field");
        let Kind::OneOf(&[word]) = field.kind else { panic!("{name} has one value") };
        properties(&mut root)[name] = json!({"const": word});
    }
    root
}

/// Writes the schema if `SHUNT_WRITE_DOCS` is in the environment.
#[test]
fn the_schema_of_the_chart_has_every_field_of_the_file() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/chart/shunt/values.schema.json");
    let text = fs::read_to_string(&path).expect("values.schema.json");
    let mut chart: Json = serde_json::from_str(&text).expect("JSON");
    let current = schema_of_file();
    if std::env::var_os("SHUNT_WRITE_DOCS").is_some() {
        chart["definitions"]["config"] = current;
        fs::write(&path, format!("{chart:#}\n")).expect("written");
    } else {
        assert!(
            chart["definitions"]["config"] == current,
            "deploy/chart/shunt/values.schema.json is out of date; write it with SHUNT_WRITE_DOCS=1"
        );
    }
}
