//! The README shows what bpftool prints of an entry.

use std::{format, vec::Vec};

use super::*;

#[test]
fn entry_in_the_readme_has_the_fields_of_the_map() {
    let readme = include_str!("../../../README.md");
    let entry =
        readme.split("An entry of the map `services`").nth(1).and_then(|text| text.split("```").nth(1));
    let names = entry.expect("an entry").split('"').skip(1).step_by(2);
    let names: Vec<&str> = names.filter(|name| !["key", "value"].contains(name)).collect();
    let key = ServiceKey { addr: Addr { octets: [0; 16] }, port: 0, proto: 0, tunneled: 0 };
    let value = ServiceValue {
        service: 0,
        generation: 0,
        inside_count: 0,
        outside_count: 0,
        affinity_seconds: 0,
        inside_list: 0,
        outside_list: 0,
        flags: 0,
    };
    let printed = format!("{key:?} {value:?}");
    let fields: Vec<&str> = printed.split_whitespace().filter_map(|word| word.strip_suffix(':')).collect();
    assert_eq!(names, fields);
}
