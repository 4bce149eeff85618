//! Removes secrets from texts: those that the daemon reads, and what looks like one.

use std::{fs, path::Path};

use serde_json::Value;

/// What stands for a secret.
const REDACTED: &str = "REDACTED";
/// Shorter values are no secrets, and would remove other text.
const SHORTEST: usize = 6;
/// The token of a pod's service account.
const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount/token";
/// Fields of a kubeconfig whose values are secrets.
const FIELDS: [&str; 9] = [
    "token",
    "password",
    "client-key-data",
    "client-certificate-data",
    "id-token",
    "refresh-token",
    "access-token",
    "client-secret",
    "secret",
];
/// Fields of a kubeconfig that name a file whose content is secret.
const FILES: [&str; 2] = ["tokenFile", "client-key"];
/// Names before `:` or `=` whose values are secrets, in lower case. A name may end in one of them.
const NAMES: [&str; 13] = [
    "token",
    "password",
    "passwd",
    "passphrase",
    "secret",
    "authorization",
    "client-key-data",
    "client-certificate-data",
    "api-key",
    "apikey",
    "api_key",
    "private-key",
    "private_key",
];

/// The secrets to remove.
#[derive(Debug, Default)]
pub(super) struct Secrets {
    /// Values that are known, the longest first.
    known: Vec<String>,
}

impl Secrets {
    /// Reads the secrets of a kubeconfig, of the files that it names, and of the service account.
    /// What cannot be read is left to the patterns.
    pub(super) fn read(kubeconfig: Option<&Path>) -> Self {
        let mut secrets = Self::default();
        secrets.add_file(Path::new(SERVICE_ACCOUNT));
        if let Some(path) = kubeconfig
            && let Ok(text) = fs::read_to_string(path)
            && let Ok(document) = serde_yaml_ng::from_str::<Value>(&text)
        {
            secrets.add_fields(&document, path.parent().unwrap_or(Path::new("/")));
        }
        secrets.known.sort_unstable_by_key(|secret| std::cmp::Reverse(secret.len()));
        secrets.known.dedup();
        secrets
    }

    fn add(&mut self, secret: &str) {
        if secret.len() >= SHORTEST {
            self.known.push(secret.to_owned());
        }
    }

    fn add_file(&mut self, path: &Path) {
        let text = fs::read_to_string(path).unwrap_or_default();
        text.lines().map(str::trim).filter(|line| !line.starts_with("-----")).for_each(|line| self.add(line));
    }

    /// Adds the values of secret fields, at any depth, and all of the environment of a plugin.
    fn add_fields(&mut self, value: &Value, directory: &Path) {
        match value {
            Value::Array(items) => items.iter().for_each(|item| self.add_fields(item, directory)),
            Value::Object(fields) => {
                for (name, value) in fields {
                    match value {
                        Value::String(text) if FIELDS.contains(&name.as_str()) => self.add(text),
                        Value::String(file) if FILES.contains(&name.as_str()) => {
                            self.add_file(&directory.join(file));
                        }
                        Value::Array(variables) if name == "env" => {
                            let values = variables.iter().filter_map(|variable| variable["value"].as_str());
                            values.for_each(|value| self.add(value));
                        }
                        Value::String(url) => user_of(url).into_iter().for_each(|user| self.add_user(user)),
                        _ => self.add_fields(value, directory),
                    }
                }
            }
            _ => {}
        }
    }

    fn add_user(&mut self, user: &str) {
        self.add(user.split_once(':').map_or(user, |(_, password)| password));
    }

    /// Returns the text without secrets.
    pub(super) fn redacted(&self, text: &str) -> String {
        let mut text = without_keys(text);
        for secret in &self.known {
            if text.contains(secret.as_str()) {
                text = text.replace(secret, REDACTED);
            }
        }
        let lines = text.split_inclusive('\n').map(|line| {
            let line = without_users(line);
            without_values(&without_credentials(&line))
        });
        lines.collect()
    }
}

/// Returns user and password of a URL.
fn user_of(url: &str) -> Option<&str> {
    let rest = url.split_once("://")?.1;
    let authority = rest.split(['/', '?', '#', '"', '\'', ' ', '\n', '\t']).next()?;
    authority.rsplit_once('@').map(|(user, _)| user).filter(|user| !user.is_empty())
}

/// Replaces users and passwords in URLs.
fn without_users(line: &str) -> String {
    let (mut text, mut rest) = (String::new(), line);
    while let Some(at) = rest.find("://") {
        let (before, url) = rest.split_at(at);
        text.push_str(before);
        text.push_str("://");
        rest = &url[3..];
        if let Some(user) = user_of(url) {
            text.push_str(REDACTED);
            rest = &rest[user.len()..];
        }
    }
    text + rest
}

/// Replaces private keys (PEM), also if their lines are joined.
fn without_keys(text: &str) -> String {
    const BEGIN: &str = "-----BEGIN ";
    let (mut result, mut rest) = (String::new(), text);
    while let Some(at) = rest.find(BEGIN) {
        let (before, block) = rest.split_at(at);
        result.push_str(before);
        let is_key =
            block[BEGIN.len()..].split("-----").next().is_some_and(|name| name.contains("PRIVATE KEY"));
        if !is_key {
            result.push_str(BEGIN);
            rest = &block[BEGIN.len()..];
            continue;
        }
        result.push_str(REDACTED);
        // A block without an end was cut: all of the rest is of the key.
        rest = block
            .split_once("-----END ")
            .map_or("", |(_, end)| end.split_once("-----").map_or("", |(_, rest)| rest));
    }
    result + rest
}

const fn is_of_token(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '~' | '+' | '/' | '=')
}

/// Replaces what follows `Bearer` and `Basic`, and JSON web tokens.
fn without_credentials(line: &str) -> String {
    let mut text = String::new();
    let mut rest = line;
    while let Some(at) = rest.find(is_of_token) {
        let (before, word_and_rest) = rest.split_at(at);
        let end = word_and_rest.find(|c| !is_of_token(c)).unwrap_or(word_and_rest.len());
        let (word, after) = word_and_rest.split_at(end);
        text.push_str(before);
        let head = text.trim_end().to_ascii_lowercase();
        let follows_scheme = before.chars().all(|c| c == ' ')
            && !before.is_empty()
            && (head.ends_with("bearer") || head.ends_with("basic"))
            && word.len() >= SHORTEST;
        let is_web_token = word.starts_with("eyJ") && word.matches('.').count() == 2;
        text.push_str(if follows_scheme || is_web_token { REDACTED } else { word });
        rest = after;
    }
    text + rest
}

/// Replaces the values of names such as `password: ` and `"token":"`.
fn without_values(line: &str) -> String {
    let lower = line.to_ascii_lowercase();
    let mut cuts: Vec<(usize, usize)> = Vec::new();
    for name in NAMES {
        for (at, _) in lower.match_indices(name) {
            let after = &line[at + name.len()..];
            let unquoted = after.trim_start_matches(['"', '\'', '\\']);
            let Some(value) = unquoted.trim_start().strip_prefix([':', '=']) else { continue };
            let value = value.trim_start_matches([' ', '"', '\'', '\\']);
            let start = line.len() - value.len();
            let is_end = |c: char| {
                matches!(c, '"' | '\'' | '\\' | ',' | '}' | '\n') || (c == ' ' && name != "authorization")
            };
            let length = value.find(is_end).unwrap_or(value.len());
            let is_empty = matches!(&value[..length], "" | "null" | "true" | "false" | "{" | "[");
            if !is_empty {
                cuts.push((start, start + length));
            }
        }
    }
    cuts.sort_unstable();
    let (mut text, mut at) = (String::new(), 0);
    for (start, end) in cuts {
        if start >= at {
            text.push_str(&line[at..start]);
            text.push_str(REDACTED);
            at = end;
        }
    }
    text + &line[at..]
}

#[cfg(test)]
mod tests {
    use super::*;

    const HIDDEN: &str = "hidden-secret-1";

    #[test]
    fn what_looks_like_a_secret_is_removed() {
        let secrets = Secrets::default();
        for text in [
            "https_proxy=http://user:hidden-secret-1@192.0.2.1:3128/path",
            "cannot connect to http://hidden-secret-1@proxy:80",
            "Authorization: Bearer hidden-secret-1",
            "\"authorization\": \"Custom scheme hidden-secret-1\"",
            "authorization=Basic hidden-secret-1",
            "sent Bearer hidden-secret-1 to it",
            "token: hidden-secret-1",
            "{\"id_token\":\"hidden-secret-1\",\"a\":1}",
            "MY_PASSWORD=hidden-secret-1 other",
            "client-key-data: hidden-secret-1",
            "got eyJhbGciOiJ.eyJhidden-secret-1.c2lnbmF0dXJl",
            "-----BEGIN RSA PRIVATE KEY-----\nhidden-secret-1\n-----END RSA PRIVATE KEY-----\nafter",
            "\"key\": \"-----BEGIN PRIVATE KEY-----\\nhidden-secret-1\\n-----END PRIVATE KEY-----\\n\"",
            "-----BEGIN EC PRIVATE KEY-----\nhidden-secret-1",
        ] {
            let redacted = secrets.redacted(text);
            assert!(!redacted.contains(HIDDEN) && redacted.contains(REDACTED), "{text}: {redacted}");
        }
    }

    #[test]
    fn other_text_stays() {
        let secrets = Secrets::default();
        for text in [
            "tokens of service accounts can be refused\n",
            "{\"token\": null, \"address\": \"10.0.0.1:80\"}\n",
            "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n",
            "http://192.0.2.1:6443/api?watch=1\n",
            "-A INPUT -m comment --comment \"a basic rule\" -j ACCEPT\n",
            "",
        ] {
            assert_eq!(secrets.redacted(text), text);
        }
    }

    #[test]
    fn secrets_of_the_kubeconfig_are_removed_wherever_they_are() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = |name: &str, text: &str| fs::write(folder.path().join(name), text).expect("a file");
        file("token", "of-the-token-file\n");
        file("key", "-----BEGIN PRIVATE KEY-----\nof-the-key-file\n-----END PRIVATE KEY-----\n");
        file(
            "kubeconfig",
            "clusters: [{name: c, cluster: {server: https://a, proxy-url: 'http://u:of-the-proxy@p:1'}}]\n\
             users:\n- {name: a, user: {token: of-the-token, password: of-the-password, client-key-data: of-the-data}}\n\
             - {name: b, user: {tokenFile: token, client-key: key}}\n\
             - {name: c, user: {exec: {command: x, env: [{name: A, value: of-the-plugin}]}}}\n",
        );
        let secrets = Secrets::read(Some(&folder.path().join("kubeconfig")));
        for secret in [
            "of-the-token-file",
            "of-the-key-file",
            "of-the-proxy",
            "of-the-token",
            "of-the-password",
            "of-the-data",
            "of-the-plugin",
        ] {
            let text = format!("an error names {secret} somewhere");
            assert_eq!(secrets.redacted(&text), "an error names REDACTED somewhere", "{secret}");
        }
    }
}
