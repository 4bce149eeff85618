//! Reads and writes YAML with the booleans of YAML 1.1, as kubectl and kube-proxy do.
//!
//! `serde_yaml_ng` has YAML 1.2, where `yes` and `on` are text. The library of Kubernetes reads
//! them as booleans, unless they are quoted or have a tag.
#![forbid(unsafe_code)]

use std::borrow::Cow;

use saphyr_parser::{Event, Parser, ScalarStyle};
use serde::{Deserialize as _, Serialize};
use serde_yaml_ng::{Error, Value};

/// Parses one document. Documents after it must be empty, as after a last line `---`.
pub fn parse(text: &str) -> Result<Value, Error> {
    let text = with_plain(text, |_, boolean| boolean.to_owned());
    serde_yaml_ng::from_str(&text).or_else(|error| only_document(&text).ok_or(error))
}

/// Returns the first document if all others are empty.
fn only_document(text: &str) -> Option<Value> {
    let mut documents = documents(text);
    let first = documents.next()?.ok()?;
    documents.all(|document| matches!(document, Ok(Value::Null))).then_some(first)
}

/// Returns true if the text has more than one document.
pub fn has_several_documents(text: &str) -> bool {
    let mut documents = documents(text);
    matches!((documents.next(), documents.next()), (Some(Ok(_)), Some(Ok(_))))
}

fn documents(text: &str) -> impl Iterator<Item = Result<Value, Error>> {
    serde_yaml_ng::Deserializer::from_str(text).map(Value::deserialize)
}

/// Writes one document. Texts that YAML 1.1 would read as booleans are quoted.
pub fn to_string(value: &impl Serialize) -> Result<String, Error> {
    let text = serde_yaml_ng::to_string(value)?;
    Ok(with_plain(&text, |word, _| format!("'{word}'")).into_owned())
}

/// Returns the boolean that a plain scalar means in YAML 1.1 only (`resolveMapList` in
/// `goyaml.v2/resolve.go` of sigs.k8s.io/yaml).
fn boolean(word: &str) -> Option<&'static str> {
    match word {
        "y" | "Y" | "yes" | "Yes" | "YES" | "on" | "On" | "ON" => Some("true"),
        "n" | "N" | "no" | "No" | "NO" | "off" | "Off" | "OFF" => Some("false"),
        _ => None,
    }
}

/// Returns the text with other words in the place of these plain scalars. `other` gets the word and
/// the boolean. Few texts have one, and only those are scanned for scalars. The text after a syntax
/// error stays as it is.
fn with_plain(text: &str, other: impl Fn(&str, &str) -> String) -> Cow<'_, str> {
    let is_end_of_word = |c: char| c.is_whitespace() || "[]{},:".contains(c);
    if !text.split(is_end_of_word).any(|word| boolean(word).is_some()) {
        return Cow::Borrowed(text);
    }
    let mut replaced = String::with_capacity(text.len());
    let mut rest = text.chars();
    // The parser counts characters, not bytes.
    let mut position = 0;
    for (event, span) in Parser::new_from_str(text).map_while(Result::ok) {
        if let Event::Scalar(word, ScalarStyle::Plain, _, None) = event
            && let Some(boolean) = boolean(&word)
        {
            let start = span.start.index();
            replaced.extend(rest.by_ref().take(start - position));
            replaced.push_str(&other(&word, boolean));
            position = start + word.len();
            rest.by_ref().take(word.len()).for_each(drop);
        }
    }
    replaced.extend(rest);
    Cow::Owned(replaced)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_words_are_booleans_as_kubernetes_reads_them() {
        for (words, value) in
            [("y Y yes Yes YES on On ON true", true), ("n N no No NO off Off OFF false", false)]
        {
            for word in words.split(' ') {
                assert_eq!(
                    parse(&format!("ä: {word} # a comment\n")).unwrap()["ä"],
                    Value::Bool(value),
                    "{word}"
                );
            }
        }
        let lists = parse("a: [yes, off,\n  on]\nb:\n- no\n? y\n: {n: No}\n").unwrap();
        assert_eq!(lists["a"], Value::from(vec![true, false, true]));
        assert_eq!(lists["b"], Value::from(vec![false]));
        assert_eq!(lists[Value::Bool(true)][Value::Bool(false)], Value::Bool(false));
    }

    #[test]
    fn empty_documents_at_the_end_mean_nothing() {
        for text in ["a: 1\n---\n", "---\na: 1\n---\n# the end\n---\n", "a: 1\n...\n"] {
            assert_eq!(parse(text).unwrap()["a"], Value::from(1), "{text}");
        }
        assert!(parse("a: 1\n---\nb: 2\n").is_err());
        assert!(parse("a: 1\n---\nb: [\n").is_err());
    }

    #[test]
    fn quoted_tagged_and_longer_texts_stay() {
        let text = "a: \"yes\"\nb: 'on'\nc: !!str no\nd: |\n  on: yes\ne: yes and\n  no\nf: yEs\ng: no-op\n";
        let value = parse(text).unwrap();
        for (key, expected) in [
            ("a", "yes"),
            ("b", "on"),
            ("c", "no"),
            ("d", "on: yes\n"),
            ("e", "yes and no"),
            ("f", "yEs"),
            ("g", "no-op"),
        ] {
            assert_eq!(value[key], Value::from(expected), "{key}");
        }
    }

    #[test]
    fn a_written_text_is_a_text_when_it_is_read() {
        let value = parse("a: 'n'\nb: ['on', x]\n'yes': true\nc: \"no\\nyes\"\n").unwrap();
        let text = to_string(&value).unwrap();
        assert_eq!(parse(&text).unwrap(), value, "{text}");
    }

    #[test]
    fn a_syntax_error_is_that_of_the_text() {
        let error = parse("a: yes\nb: [\n").unwrap_err();
        assert!(error.to_string().contains("line 3"), "{error}");
    }
}
