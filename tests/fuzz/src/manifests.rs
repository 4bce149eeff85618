//! Manifests in YAML and JSON, down to the model.

use proxy_userspace::{
    model::{Delta, WatchEvent},
    watch::read_manifest,
};

use crate::objects;

/// Longer than every input.
const WHOLE: usize = usize::MAX;

pub(crate) fn run(input: &[u8]) {
    let (objects, errors) = read_manifest("a.yaml", input, WHOLE);
    // The way in which a list is split must not change what the file means.
    let (in_parts, errors_in_parts) = read_manifest("a.yaml", input, 1);
    assert_eq!(errors.is_empty(), errors_in_parts.is_empty(), "{errors:?} {errors_in_parts:?}");
    if errors.is_empty() {
        assert_eq!(objects, in_parts);
    }
    let (of_json, _) = read_manifest("a.json", input, WHOLE);
    let mut model = objects::model();
    for event in objects.into_iter().chain(of_json) {
        model.apply(event);
        model.resolve();
    }
    // Without Services no service port is left.
    model.apply(WatchEvent::Services(Delta::Replace(Vec::new())));
    model.resolve();
    assert!(model.snapshot().ports.is_empty(), "{:?}", model.snapshot().ports);
}
