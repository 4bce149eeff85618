//! Rights of the client, as a `ClusterRole` grants them. The server refuses everything else, and
//! knows which rights were used.

use std::sync::Arc;

use anyhow::{Context as _, Result};
use axum::{
    extract::{Request, State},
    middleware::Next,
    response::Response,
};
use http::{Method, Uri};
use serde::Deserialize;
use serde_json::Value;

use super::{ApiServer, Encoding, Resource, Shared, Verb, lock, responses};

/// What a request asks for, as `RequestInfo` of the API server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Attributes {
    pub(super) verb: &'static str,
    /// The API group; empty for the core group.
    pub(super) group: String,
    /// The resource, and after a slash the subresource.
    pub(super) resource: String,
    pub(super) namespace: Option<String>,
    /// The name of the object, also if a list or watch selects it by its name.
    pub(super) name: Option<String>,
}

/// A rule of a role.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Rule {
    api_groups: Vec<String>,
    resources: Vec<String>,
    #[serde(default)]
    resource_names: Vec<String>,
    verbs: Vec<String>,
}

/// One verb on one resource.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Right {
    verb: String,
    group: String,
    resource: String,
    /// The only objects, if this is not empty.
    names: Vec<String>,
    is_used: bool,
}

/// The rights of the client, and the requests that it had no right to.
#[derive(Debug, Default)]
pub(super) struct Rights {
    rights: Vec<Right>,
    refused: Vec<String>,
}

impl Attributes {
    /// Returns what a request asks for. `None` if its path is not that of a resource.
    fn of(method: &Method, uri: &Uri) -> Option<Self> {
        let parts: Vec<&str> = uri.path().trim_matches('/').split('/').collect();
        let (group, rest) = match parts[..] {
            ["api", _, ref rest @ ..] => ("", rest),
            ["apis", group, _, ref rest @ ..] => (group, rest),
            _ => return None,
        };
        let (namespace, rest) = match rest {
            ["namespaces", namespace, rest @ ..] if !rest.is_empty() => (Some(*namespace), rest),
            rest => (None, rest),
        };
        let (resource, name) = match *rest {
            [resource] => (resource.to_owned(), None),
            [resource, name] => (resource.to_owned(), Some(name)),
            [resource, name, subresource] => (format!("{resource}/{subresource}"), Some(name)),
            _ => return None,
        };
        let query = Query::of(uri);
        Some(Self {
            verb: verb(method, name.is_some(), query.watches),
            group: group.to_owned(),
            resource,
            namespace: namespace.map(ToOwned::to_owned),
            name: name.map(ToOwned::to_owned).or(query.name),
        })
    }

    /// Returns what a list or watch of all objects asks for.
    pub(super) fn of_all(resource: &Resource, verb: Verb) -> Self {
        Self {
            verb: if verb == Verb::List { "list" } else { "watch" },
            group: resource.group.to_owned(),
            resource: resource.plural.to_owned(),
            namespace: None,
            name: None,
        }
    }
}

impl std::fmt::Display for Attributes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { verb, group, resource, namespace, name } = self;
        write!(f, "{verb} {resource} of {group:?}")?;
        namespace.iter().try_for_each(|namespace| write!(f, " in {namespace}"))?;
        name.iter().try_for_each(|name| write!(f, ": {name}"))
    }
}

/// What the query of a request says about its rights.
struct Query {
    watches: bool,
    name: Option<String>,
}

impl Query {
    fn of(uri: &Uri) -> Self {
        let query = percent_encoding::percent_decode_str(uri.query().unwrap_or_default()).decode_utf8_lossy();
        let value = |key: &str| query.split('&').find_map(|pair| pair.strip_prefix(key)?.strip_prefix('='));
        Self {
            watches: matches!(value("watch"), Some("true" | "1")),
            name: value("fieldSelector").and_then(|field| Some(field.strip_prefix("metadata.name=")?.into())),
        }
    }
}

fn verb(method: &Method, has_name: bool, watches: bool) -> &'static str {
    match (method.as_str(), has_name) {
        ("GET" | "HEAD", true) => "get",
        ("GET" | "HEAD", false) if watches => "watch",
        ("GET" | "HEAD", false) => "list",
        ("POST", _) => "create",
        ("PUT", _) => "update",
        ("PATCH", _) => "patch",
        ("DELETE", true) => "delete",
        ("DELETE", false) => "deletecollection",
        _ => "",
    }
}

impl Rights {
    /// Returns the rights of a `ClusterRole`. Wildcards grant nothing here: no role of shunt has
    /// one.
    fn of(role: &Value) -> Result<Self> {
        let rules: Vec<Rule> =
            serde_json::from_value(role["rules"].clone()).context("rules of a ClusterRole")?;
        let mut rights = Vec::new();
        for Rule { api_groups, resources, resource_names, verbs } in &rules {
            for (group, resource) in
                api_groups.iter().flat_map(|group| resources.iter().map(move |of| (group, of)))
            {
                rights.extend(verbs.iter().map(|verb| Right {
                    verb: verb.clone(),
                    group: group.clone(),
                    resource: resource.clone(),
                    names: resource_names.clone(),
                    is_used: false,
                }));
            }
        }
        Ok(Self { rights, refused: Vec::new() })
    }

    /// Returns true if the request is granted, and marks the right as used.
    fn grant(&mut self, asked: &Attributes) -> bool {
        let right = self.rights.iter_mut().find(|right| right.grants(asked));
        if let Some(right) = right {
            right.is_used = true;
            return true;
        }
        self.refused.push(asked.to_string());
        false
    }
}

impl Right {
    fn grants(&self, asked: &Attributes) -> bool {
        let Self { verb, group, resource, names, .. } = self;
        let is_named = names.is_empty() || asked.name.as_ref().is_some_and(|name| names.contains(name));
        (&**verb, group, resource) == (asked.verb, &asked.group, &asked.resource) && is_named
    }
}

impl ApiServer {
    /// Refuses from now on what this `ClusterRole` does not grant.
    pub fn grant_only(&self, role: &Value) -> Result<()> {
        *lock(&self.shared.rights) = Some(Rights::of(role)?);
        Ok(())
    }

    /// Returns the rights that no request used since they were granted: "list services of """.
    pub fn unused_rights(&self) -> Vec<String> {
        let rights = lock(&self.shared.rights);
        let unused = rights.iter().flat_map(|rights| &rights.rights).filter(|right| !right.is_used);
        unused.map(|Right { verb, group, resource, .. }| format!("{verb} {resource} of {group:?}")).collect()
    }

    /// Returns the requests that were refused since the rights were granted.
    pub fn refused_requests(&self) -> Vec<String> {
        lock(&self.shared.rights).iter().flat_map(|rights| rights.refused.clone()).collect()
    }
}

/// Answers a request, or refuses it if the client has no right to it.
pub(super) async fn authorize(State(shared): State<Arc<Shared>>, request: Request, next: Next) -> Response {
    let asked = Attributes::of(request.method(), request.uri());
    let encoding = Encoding::of(request.headers());
    let is_refused = |asked: &Attributes| lock(&shared.rights).as_mut().is_some_and(|all| !all.grant(asked));
    match asked {
        Some(asked) if is_refused(&asked) => responses::failure(encoding, responses::forbidden(&asked)),
        _ => next.run(request).await,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn asked(method: &Method, uri: &'static str) -> String {
        Attributes::of(method, &Uri::from_static(uri)).map(|asked| asked.to_string()).unwrap_or_default()
    }

    #[test]
    fn a_request_asks_for_a_verb_on_a_resource() {
        for (uri, expected) in [
            ("/api/v1/services?limit=500", "list services of \"\""),
            ("/api/v1/services?watch=true", "watch services of \"\""),
            ("/api/v1/nodes?fieldSelector=metadata.name%3Dnode1", "list nodes of \"\": node1"),
            ("/api/v1/namespaces", "list namespaces of \"\""),
            ("/api/v1/namespaces/jobs", "get namespaces of \"\": jobs"),
            ("/api/v1/namespaces/jobs/pods", "list pods of \"\" in jobs"),
            ("/api/v1/namespaces/jobs/pods/a", "get pods of \"\" in jobs: a"),
            ("/api/v1/namespaces/jobs/pods/a/log", "get pods/log of \"\" in jobs: a"),
            ("/apis/discovery.k8s.io/v1/endpointslices", "list endpointslices of \"discovery.k8s.io\""),
            ("/version", ""),
        ] {
            assert_eq!(asked(&Method::GET, uri), expected, "{uri}");
        }
        let events = "/apis/events.k8s.io/v1/namespaces/shop/events";
        assert_eq!(asked(&Method::POST, events), "create events of \"events.k8s.io\" in shop");
        assert_eq!(asked(&Method::DELETE, "/api/v1/nodes/a"), "delete nodes of \"\": a");
        assert_eq!(asked(&Method::PATCH, "/api/v1/nodes/a"), "patch nodes of \"\": a");
    }

    #[test]
    fn a_right_holds_for_its_verb_group_resource_and_names_only() {
        let rules = json!([
            {"apiGroups": [""], "resources": ["services"], "verbs": ["list"]},
            {"apiGroups": [""], "resources": ["nodes"], "resourceNames": ["node1"], "verbs": ["get"]},
        ]);
        let mut rights = Rights::of(&json!({"rules": rules})).unwrap();
        let mut grants = |uri| rights.grant(&Attributes::of(&Method::GET, &Uri::from_static(uri)).unwrap());
        assert!(grants("/api/v1/services"));
        assert!(!grants("/api/v1/services?watch=1"));
        assert!(!grants("/apis/other/v1/services"));
        assert!(!grants("/api/v1/pods"));
        assert!(grants("/api/v1/nodes/node1"));
        assert!(!grants("/api/v1/nodes/node2"));
        assert_eq!(rights.refused.len(), 4);
        assert!(rights.rights.iter().all(|right| right.is_used));
    }

    #[test]
    fn a_field_that_is_not_known_here_is_an_error() {
        let role = json!({"rules": [{"nonResourceURLs": ["/metrics"], "verbs": ["get"]}]});
        assert!(Rights::of(&role).is_err());
    }
}
