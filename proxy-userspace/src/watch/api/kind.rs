//! The requests for one kind.

use kube::api::{ListParams, Request, WatchParams};

use crate::watch::decode::Kind;

/// client-go's page size.
pub(super) const PAGE_SIZE: u32 = 500;

/// What restricts the objects of a kind, on the server.
#[derive(Clone, Debug, Default)]
pub(super) struct Selectors {
    labels: Option<String>,
    fields: Option<String>,
}

impl Selectors {
    pub(super) fn labels(selector: impl Into<String>) -> Self {
        Self { labels: Some(selector.into()), fields: None }
    }

    pub(super) fn fields(selector: impl Into<String>) -> Self {
        Self { labels: None, fields: Some(selector.into()) }
    }
}

/// One request's way to the server.
pub(super) type HttpRequest = http::Request<Vec<u8>>;

/// One page of a list, or the whole list without a limit, as it is now (not from a cache that may lag behind).
pub(super) fn list<K: Kind>(
    selectors: &Selectors,
    limit: Option<u32>,
    token: Option<&str>,
) -> Result<HttpRequest, kube::Error> {
    let params = ListParams {
        label_selector: selectors.labels.clone(),
        field_selector: selectors.fields.clone(),
        limit,
        continue_token: token.map(str::to_owned),
        ..ListParams::default()
    };
    Request::new(path::<K>()).list(&params).map_err(kube::Error::BuildRequest)
}

/// A watch from `version` on; without one a streaming list (KEP-3157): the objects as they are now, a bookmark that ends
/// them, and then their changes.
pub(super) fn watch<K: Kind>(
    selectors: &Selectors,
    version: Option<&str>,
    seconds: u32,
) -> Result<HttpRequest, kube::Error> {
    let params = WatchParams {
        label_selector: selectors.labels.clone(),
        field_selector: selectors.fields.clone(),
        timeout: Some(seconds),
        bookmarks: true,
        send_initial_events: version.is_none(),
    };
    Request::new(path::<K>()).watch(&params, version.unwrap_or_default()).map_err(kube::Error::BuildRequest)
}

fn path<K: Kind>() -> String {
    if K::GROUP.is_empty() {
        format!("/api/{}/{}", K::VERSION, K::PLURAL)
    } else {
        format!("/apis/{}/{}/{}", K::GROUP, K::VERSION, K::PLURAL)
    }
}
