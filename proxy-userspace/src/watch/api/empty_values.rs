//! Empty texts in a kubeconfig, which mean the same as missing ones.
//!
//! client-go has no other form of a missing text: each setting is tested for its length.

use std::path::Path;

use kube::config::{AuthInfo, Cluster, Context, Kubeconfig};
use secrecy::{ExposeSecret, SecretString};

/// Removes all settings that are empty texts. `path` is the file.
pub(super) fn remove_empty(kubeconfig: &mut Kubeconfig, path: &Path) {
    // kube makes the names of files absolute, so an empty one is the directory with a slash at its
    // end.
    let directory = path.parent().and_then(|parent| parent.join("").to_str().map(str::to_owned));
    let of_file = |name: &str| name.is_empty() || Some(name) == directory.as_deref();
    remove(&mut kubeconfig.current_context);
    for context in kubeconfig.contexts.iter_mut().filter_map(|named| named.context.as_mut()) {
        let Context { user, namespace, .. } = context;
        for text in [user, namespace] {
            remove(text);
        }
    }
    for cluster in kubeconfig.clusters.iter_mut().filter_map(|named| named.cluster.as_mut()) {
        let Cluster { server, certificate_authority_data, proxy_url, tls_server_name, .. } = cluster;
        for text in [server, certificate_authority_data, proxy_url, tls_server_name] {
            remove(text);
        }
        cluster.certificate_authority.take_if(|name| of_file(name));
    }
    for user in kubeconfig.auth_infos.iter_mut().filter_map(|named| named.auth_info.as_mut()) {
        remove_of_user(user, of_file);
    }
}

fn remove_of_user(user: &mut AuthInfo, of_file: impl Fn(&str) -> bool) {
    for text in [
        &mut user.username,
        &mut user.client_certificate_data,
        &mut user.impersonate,
        &mut user.impersonate_uid,
    ] {
        remove(text);
    }
    for secret in [&mut user.password, &mut user.token, &mut user.client_key_data] {
        secret.take_if(|secret: &mut SecretString| secret.expose_secret().is_empty());
    }
    for name in [&mut user.client_certificate, &mut user.client_key, &mut user.token_file] {
        name.take_if(|name| of_file(name));
    }
}

fn remove(text: &mut Option<String>) {
    text.take_if(|text| text.is_empty());
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLUSTER: [&str; 5] =
        ["server", "certificate-authority", "certificate-authority-data", "proxy-url", "tls-server-name"];
    const USER: [&str; 10] = [
        "username",
        "password",
        "token",
        "tokenFile",
        "client-certificate",
        "client-certificate-data",
        "client-key",
        "client-key-data",
        "as",
        "as-uid",
    ];

    /// Returns a kubeconfig as JSON in which all of these settings have this value.
    fn kubeconfig(value: &str) -> serde_json::Value {
        let settings = |names: &[&str]| -> serde_json::Value {
            names.iter().map(|name| ((*name).to_owned(), serde_json::Value::from(value))).collect()
        };
        serde_json::json!({
            "current-context": value,
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": value, "namespace": value}}],
            "clusters": [{"name": "c", "cluster": settings(&CLUSTER)}],
            "users": [{"name": "u", "user": settings(&USER)}],
        })
    }

    /// Returns what is left of a kubeconfig that is read from a file.
    fn left(value: &str) -> serde_json::Value {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(&file, kubeconfig(value).to_string()).expect("written");
        let mut read = Kubeconfig::read_from(file.path()).expect("a kubeconfig");
        remove_empty(&mut read, file.path());
        serde_json::to_value(read).expect("JSON")
    }

    /// Returns true if all settings are missing. kube writes some missing ones as null.
    fn has_none(settings: &serde_json::Value) -> bool {
        settings.as_object().is_some_and(|settings| settings.values().all(serde_json::Value::is_null))
    }

    #[test]
    fn empty_texts_are_removed_and_others_stay() {
        let mut empty = left("");
        assert!(has_none(&empty["clusters"][0]["cluster"]), "{empty}");
        assert!(has_none(&empty["users"][0]["user"]), "{empty}");
        let context = empty["contexts"][0]["context"].as_object_mut().expect("a context");
        context.retain(|_, value| !value.is_null());
        assert_eq!(serde_json::json!(context), serde_json::json!({"cluster": "c"}));
        assert!(empty["current-context"].is_null(), "{empty}");
        assert_eq!(left("/x")["users"], kubeconfig("/x")["users"]);
        assert_eq!(left("/x")["clusters"], kubeconfig("/x")["clusters"]);
    }
}
