//! The envelopes of lists and watches. Objects stay text, so that each can be decoded, or fail to, on its own.

use serde::Deserialize;
use serde_json::value::RawValue;

/// A list, or a page of one.
#[derive(Deserialize)]
pub(super) struct Page<'a> {
    #[serde(default)]
    pub(super) metadata: PageMetadata,
    #[serde(borrow)]
    pub(super) items: Option<Vec<&'a RawValue>>,
}

/// `metadata` of a list.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct PageMetadata {
    pub(super) resource_version: Option<String>,
    #[serde(rename = "continue")]
    pub(super) next: Option<String>,
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
    pub(super) metadata: BookmarkMetadata,
}

/// Its `metadata`.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct BookmarkMetadata {
    pub(super) resource_version: Option<String>,
    pub(super) annotations: Option<BookmarkAnnotations>,
}

/// The annotation of the bookmark that ends the objects of a streaming list (KEP-3157).
#[derive(Deserialize)]
pub(super) struct BookmarkAnnotations {
    #[serde(rename = "k8s.io/initial-events-end")]
    pub(super) ends_list: Option<String>,
}

/// The object of an `ERROR`.
#[derive(Deserialize)]
pub(super) struct Status {
    #[serde(default)]
    pub(super) code: u16,
    #[serde(default)]
    pub(super) message: String,
}
