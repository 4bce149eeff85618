//! The list and watch requests for one kind.

use kube::api::{ListParams, Request, WatchParams};

use crate::watch::decode::Kind;

/// client-go's page size.
pub(super) const PAGE_SIZE: u32 = 500;

/// Selects objects of a kind on the server.
#[derive(Clone, Debug, Default)]
pub(super) struct Selectors {
    pub(super) labels: Option<String>,
    pub(super) fields: Option<String>,
}

pub(super) type HttpRequest = http::Request<Vec<u8>>;

/// Requests one page of a list, or the whole list without a limit. The list is up to date: it does
/// not come from a cache of the server.
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

/// Requests a watch that starts after `version`. Without a version, requests a streaming list
/// (KEP-3157): the present objects, a bookmark that ends them, and then their changes.
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
    match K::GROUP {
        "" => format!("/api/{}/{}", K::VERSION, K::PLURAL),
        group => format!("/apis/{group}/{}/{}", K::VERSION, K::PLURAL),
    }
}
