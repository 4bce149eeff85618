//! The rules of others, as `nft -j` and `iptables-save` print them, and texts of `/proc`.

use proxy_userspace::{
    kernel::fuzzing::read_text,
    link_path::{
        Evidence, judge, nft_json,
        ruleset::{Family, Source},
        save,
    },
};

pub(crate) fn run(input: &[u8]) {
    let Ok(text) = str::from_utf8(input) else { return };
    read_text(text);
    drop(nft_json::parse_names(text));
    let mut tables = nft_json::parse(text).unwrap_or_default();
    tables.extend(save::parse(text, Source::IptablesLegacy, Family::Ip));
    judge(&Evidence { tables, own_marks: 0xc000, ..Evidence::default() });
}
