//! Finds the items of a list in JSON.

use serde::Deserialize;

use super::super::{
    failure::Failure,
    wire::{ListMetadata, MAX_MESSAGE},
};

/// The depth within `items`: the list is an object, and `items` its only array.
const ITEMS_DEPTH: usize = 2;

/// A list, or a page of one, without its items.
#[derive(Deserialize)]
pub(super) struct Page {
    #[serde(default)]
    pub(super) metadata: ListMetadata,
}

/// A list in JSON.
#[derive(Default)]
pub(in crate::watch::api) struct JsonList {
    /// The list without its items.
    rest: Vec<u8>,
    /// The bytes of the present item so far.
    item: Vec<u8>,
    /// How many objects and arrays are open.
    depth: usize,
    is_in_items: bool,
    is_in_string: bool,
    is_escaped: bool,
}

impl JsonList {
    /// Reads the next bytes, and calls `take` with each item that they complete.
    pub(super) fn read(
        &mut self,
        bytes: &[u8],
        mut take: impl FnMut(&[u8]) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        for &byte in bytes {
            let before = self.depth;
            self.track(byte);
            let is_item = self.is_in_items && before.max(self.depth) > ITEMS_DEPTH;
            if is_item {
                push(&mut self.item, byte)?;
                if self.depth == ITEMS_DEPTH {
                    take(&self.item)?;
                    self.item.clear();
                }
            } else if !self.is_in_items || before < ITEMS_DEPTH {
                push(&mut self.rest, byte)?;
            }
        }
        Ok(())
    }

    /// Returns the list without its items, once all bytes were read.
    pub(super) fn finish(self) -> Result<Page, Failure> {
        serde_json::from_slice(&self.rest).map_err(Failure::invalid)
    }

    /// Follows strings, objects and arrays.
    fn track(&mut self, byte: u8) {
        match byte {
            _ if self.is_escaped => self.is_escaped = false,
            b'\\' if self.is_in_string => self.is_escaped = true,
            b'"' => self.is_in_string = !self.is_in_string,
            _ if self.is_in_string => {}
            b'{' | b'[' => {
                self.depth += 1;
                self.is_in_items |= byte == b'[' && self.depth == ITEMS_DEPTH;
            }
            b'}' | b']' => {
                self.depth = self.depth.saturating_sub(1);
                self.is_in_items &= self.depth >= ITEMS_DEPTH;
            }
            _ => {}
        }
    }
}

fn push(part: &mut Vec<u8>, byte: u8) -> Result<(), Failure> {
    if part.len() >= MAX_MESSAGE {
        return Err(Failure::invalid(format!(
            "a part of a list has more than {MAX_MESSAGE} bytes, the limit"
        )));
    }
    part.push(byte);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads a list in parts of this size.
    fn items(list: &str, size: usize) -> Result<(Vec<String>, Page), Failure> {
        let (mut reader, mut items) = (JsonList::default(), Vec::new());
        for part in list.as_bytes().chunks(size) {
            reader.read(part, |item| {
                items.push(String::from_utf8_lossy(item).into_owned());
                Ok(())
            })?;
        }
        Ok((items, reader.finish()?))
    }

    #[test]
    fn items_are_found_however_the_bytes_are_split() {
        let list = r#"{"kind":"ServiceList", "metadata":{"resourceVersion":"7","continue":"x"},
            "items": [ {"a":"]}\\\"[{","b":[1,[2]]} ,{"c":{}},{}
            ]}"#;
        for size in [1, 2, 3, 7, 1000] {
            let (items, page) = items(list, size).expect("a list");
            assert_eq!(items, [r#"{"a":"]}\\\"[{","b":[1,[2]]}"#, r#"{"c":{}}"#, "{}"], "{size}");
            assert_eq!(page.metadata.resource_version.as_deref(), Some("7"));
            assert_eq!(page.metadata.continue_token.as_deref(), Some("x"));
        }
    }

    #[test]
    fn lists_without_items_are_read_and_others_are_refused() {
        for list in [r#"{"metadata":{},"items":[]}"#, r#"{"metadata":{},"items":null}"#, r#"{"items":[]}"#] {
            assert!(items(list, 5).expect(list).0.is_empty());
        }
        for list in ["", "<html>no JSON</html>", r#"{"metadata":{},"items":[{"a":1}"#, r#"{"items":[{}]]}"#] {
            assert!(items(list, 5).is_err(), "{list}");
        }
    }

    #[test]
    fn items_and_lists_without_end_are_refused() {
        let endless = "x".repeat(MAX_MESSAGE);
        for begin in [r#"{"items":[{"a":""#, r#"{"metadata":{"continue":""#] {
            let failure = items(&format!("{begin}{endless}"), 1 << 20).err().expect("too long");
            assert!(failure.to_string().contains("more than 16777216 bytes"), "{failure}");
        }
    }
}
