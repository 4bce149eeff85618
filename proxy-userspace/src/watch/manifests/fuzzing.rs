//! Reads bytes as a manifest, for fuzz targets.

use std::{collections::BTreeMap, io::Cursor, path::Path, sync::Arc};

use super::{documents::read_in_parts, file::Text};
use crate::model::{SharedValues, WatchEvent};

/// The objects of a manifest, and the errors of those that cannot be used.
pub type Manifest = (Vec<WatchEvent>, Vec<String>);

/// Reads the text of a manifest, whose name decides the format. Items of a YAML list are parsed
/// together until their text has `part` bytes.
pub fn read_manifest(name: &str, text: &[u8], part: usize) -> Manifest {
    let text = Text::new(Cursor::new(text)).expect("memory can be read");
    let (last, mut shared) = (BTreeMap::new(), SharedValues::default());
    let read = read_in_parts(Path::new(name), text, &last, &mut shared, part);
    let objects = read.objects.into_values().map(Arc::unwrap_or_clone);
    (objects.collect(), read.errors.into_iter().map(|(_, error)| error).collect())
}
