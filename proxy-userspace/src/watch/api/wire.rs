//! The envelopes of lists and watches. Objects stay text: each is decoded on its own, so that one
//! object which cannot be decoded affects no other.

use serde::Deserialize;
use serde_json::value::RawValue;

/// A list, or a page of one, without its items.
#[derive(Deserialize)]
pub(super) struct Page {
    #[serde(default)]
    pub(super) metadata: ListMetadata,
}

/// `metadata` of a list or a bookmark.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ListMetadata {
    pub(super) resource_version: Option<String>,
    #[serde(rename = "continue")]
    pub(super) continue_token: Option<String>,
    pub(super) annotations: Option<BookmarkAnnotations>,
}

/// A line of a watch.
#[derive(Deserialize)]
pub(super) struct Event<'a> {
    #[serde(rename = "type")]
    pub(super) event_type: &'a str,
    #[serde(borrow)]
    pub(super) object: &'a RawValue,
}

/// The object of a `BOOKMARK`.
#[derive(Deserialize)]
pub(super) struct Bookmark {
    pub(super) metadata: ListMetadata,
}

/// The annotation of the bookmark that ends the objects of a streaming list (KEP-3157).
#[derive(Deserialize)]
pub(super) struct BookmarkAnnotations {
    #[serde(rename = "k8s.io/initial-events-end")]
    pub(super) initial_events_end: Option<String>,
}

/// The object of an `ERROR`.
#[derive(Deserialize)]
pub(super) struct Status {
    #[serde(default)]
    pub(super) code: u16,
    #[serde(default)]
    pub(super) message: String,
}
