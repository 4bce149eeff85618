//! Streaming lists in their encoding. A server that sends one again does not select and encode each
//! object again: a measurement of the proxy must not contain the work of the server.

use std::{mem, sync::Arc};

use anyhow::Result;
use bytes::Bytes;

use super::{Encoding, Resource, selectors::Selectors, store::Store};

/// The size from which a part is sent, that of a frame of HTTP/2.
const PART: usize = 16 << 10;

/// The objects of a streaming list as events, at some version.
#[derive(Debug)]
pub(super) struct KeptList {
    plural: &'static str,
    selectors: Selectors,
    encoding: Encoding,
    /// The bytes of several events each.
    pub(super) parts: Vec<Bytes>,
}

impl KeptList {
    /// Returns the list of the present objects. It is encoded unless the store has it.
    pub(super) fn of(
        store: &mut Store,
        resource: &Resource,
        selectors: &Selectors,
        encoding: Encoding,
    ) -> Result<Arc<Self>> {
        let plural = resource.plural;
        let is_asked = |list: &&Arc<Self>| {
            (list.plural, &list.selectors, list.encoding) == (plural, selectors, encoding)
        };
        if let Some(list) = store.kept_lists().iter().find(is_asked) {
            return Ok(Arc::clone(list));
        }
        let (mut parts, mut part) = (Vec::new(), Vec::new());
        let objects = store.list(plural, store.version());
        for object in objects.values().filter(|object| selectors.matches(object.value())) {
            part.extend_from_slice(&encoding.event("ADDED", object)?);
            if part.len() >= PART {
                parts.push(mem::take(&mut part).into());
            }
        }
        parts.extend((!part.is_empty()).then(|| part.into()));
        let list = Arc::new(Self { plural, selectors: selectors.clone(), encoding, parts });
        store.keep_list(Arc::clone(&list));
        Ok(list)
    }
}
