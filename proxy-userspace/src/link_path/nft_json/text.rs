//! Prints rules from their JSON, nearly as nft prints them. People read it; nothing parses it.

use serde_json::Value;

use super::{only_member, string};

/// Prints the statements of a rule.
pub(super) fn of_statements(statements: &[Value]) -> String {
    statements.iter().map(of_statement).collect::<Vec<_>>().join(" ")
}

fn of_statement(statement: &Value) -> String {
    let Some((kind, value)) = only_member(statement) else { return statement.to_string() };
    match kind {
        "match" => {
            let operator = match value["op"].as_str() {
                None | Some("==" | "in") => String::new(),
                Some(operator) => format!(" {operator}"),
            };
            format!("{}{operator} {}", of_expression(&value["left"]), of_expression(&value["right"]))
        }
        "vmap" => format!("{} vmap {}", of_expression(&value["key"]), of_expression(&value["data"])),
        "mangle" => format!("{} set {}", of_expression(&value["key"]), of_expression(&value["value"])),
        "jump" | "goto" => format!("{kind} {}", string(&value["target"])),
        "dnat" | "snat" if !value["addr"].is_null() => format!("{kind} to {}", of_expression(&value["addr"])),
        _ => kind.to_owned(),
    }
}

/// Prints an expression.
pub(super) fn of_expression(expression: &Value) -> String {
    if let Value::String(text) = expression {
        return text.clone();
    }
    if let Value::Array(items) = expression {
        return items.iter().map(of_expression).collect::<Vec<_>>().join(", ");
    }
    let Some((kind, value)) = only_member(expression) else { return expression.to_string() };
    match kind {
        "meta" => format!("meta {}", string(&value["key"])),
        "ct" => ["ct", value["dir"].as_str().unwrap_or_default(), &string(&value["key"])]
            .into_iter()
            .filter(|word| !word.is_empty())
            .collect::<Vec<_>>()
            .join(" "),
        "payload" if value["field"].is_string() => {
            format!("{} {}", string(&value["protocol"]), string(&value["field"]))
        }
        "fib" => format!("fib {} {}", of_expression(&value["flags"]), string(&value["result"])),
        "set" => format!("{{ {} }}", of_expression(value)),
        "range" => format!("{}-{}", of_expression(&value[0]), of_expression(&value[1])),
        "prefix" => format!("{}/{}", string(&value["addr"]), value["len"]),
        "concat" => value
            .as_array()
            .map(|parts| parts.iter().map(of_expression).collect::<Vec<_>>().join(" . "))
            .unwrap_or_default(),
        "&" | "|" | "^" => format!("{} {kind} {}", of_expression(&value[0]), of_expression(&value[1])),
        "jump" | "goto" => format!("{kind} {}", string(&value["target"])),
        _ if value.is_null() => kind.to_owned(),
        _ => expression.to_string(),
    }
}
