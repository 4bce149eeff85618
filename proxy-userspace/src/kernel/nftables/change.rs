//! Changes to a table: as netlink messages, and as nft commands.

use std::{fmt, sync::Arc};

use libc::{
    NFT_MSG_DELCHAIN, NFT_MSG_DELRULE, NFT_MSG_DELSET, NFT_MSG_DELSETELEM, NFT_MSG_DELTABLE,
    NFT_MSG_NEWCHAIN, NFT_MSG_NEWRULE, NFT_MSG_NEWSET, NFT_MSG_NEWSETELEM, NFT_MSG_NEWTABLE, c_int,
};
use netlink_packet_core::{NLM_F_APPEND, NLM_F_CREATE, NLM_F_EXCL};

use super::{
    IpFamily, NftFamily,
    element::{self, ElementKey, ElementValue},
    expression,
    set::{Set, SetKind, push_user_data},
    statement::{Name, Rule},
    uapi::*,
};
use crate::kernel::netlink::MessageBuffer;

/// A change to a table.
///
/// Adding an element fails if the element exists. Adding a table, chain or set succeeds if it
/// exists, and leaves it as it is. Deleting fails if the object does not exist.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Adds the table, with this comment.
    AddTable(&'static str),
    /// Deletes the table with everything in it.
    DeleteTable,
    /// Adds a chain.
    AddChain(Chain),
    /// Deletes all rules of a chain.
    FlushChain(Name),
    /// Deletes a chain with its rules.
    DeleteChain(Name),
    /// Appends a rule to a chain.
    AddRule(Name, Rule),
    /// Adds a set or map.
    AddSet(Set),
    /// Deletes a set or map with its elements.
    DeleteSet(Name),
    /// Adds an element.
    AddElement(&'static Set, ElementKey, ElementValue),
    /// Deletes an element.
    DeleteElement(&'static Set, ElementKey),
}

/// A chain without its rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    /// The name.
    pub name: Name,
    /// The hook of a base chain. `None` for regular chains.
    pub hook: Option<Hook>,
}

/// The netfilter hook of a base chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hook {
    /// The chain type: `filter` or `nat`. In a listing also `route`, and `?` for another one.
    pub kind: &'static str,
    /// The hook: `NF_INET_*`.
    pub number: c_int,
    /// The priority. Chains with smaller priorities run first.
    pub priority: c_int,
}

impl Hook {
    fn name(self) -> &'static str {
        match self.number {
            libc::NF_INET_PRE_ROUTING => "prerouting",
            libc::NF_INET_LOCAL_IN => "input",
            libc::NF_INET_FORWARD => "forward",
            libc::NF_INET_LOCAL_OUT => "output",
            libc::NF_INET_POST_ROUTING => "postrouting",
            _ => "?",
        }
    }
}

impl Change {
    /// Returns the change as an nft command.
    pub fn display(&self, family: IpFamily, table: &str) -> String {
        let at = format!("{} {table}", NftFamily::of(family).keyword);
        match self {
            Self::AddTable(comment) => format!("add table {at} {{ comment \"{comment}\"; }}"),
            Self::DeleteTable => format!("delete table {at}"),
            Self::AddChain(chain) => format!("add chain {at} {chain}"),
            Self::FlushChain(chain) => format!("flush chain {at} {chain}"),
            Self::DeleteChain(chain) => format!("delete chain {at} {chain}"),
            Self::AddRule(chain, rule) => format!("add rule {at} {chain} {}", rule.display(family)),
            Self::AddSet(set) => {
                format!("add {} {at} {} {}", set.keyword(), set.name, set.display(family))
            }
            Self::DeleteSet(set) => format!("delete set {at} {set}"),
            Self::AddElement(set, key, value) => {
                let key = element::display(key.bytes(), set.key, family);
                format!("add element {at} {} {{ {key}{} }}", set.name, value.display(set, family))
            }
            Self::DeleteElement(set, key) => {
                let key = element::display(key.bytes(), set.key, family);
                format!("delete element {at} {} {{ {key} }}", set.name)
            }
        }
    }

    /// Returns the message (`NFT_MSG_*`) and its flags.
    pub(super) const fn message_type(&self) -> (c_int, u16) {
        match self {
            Self::AddTable(_) => (NFT_MSG_NEWTABLE, NLM_F_CREATE),
            Self::DeleteTable => (NFT_MSG_DELTABLE, 0),
            Self::AddChain(_) => (NFT_MSG_NEWCHAIN, NLM_F_CREATE),
            Self::FlushChain(_) => (NFT_MSG_DELRULE, 0),
            Self::DeleteChain(_) => (NFT_MSG_DELCHAIN, 0),
            Self::AddRule(..) => (NFT_MSG_NEWRULE, NLM_F_CREATE | NLM_F_APPEND),
            Self::AddSet(_) => (NFT_MSG_NEWSET, NLM_F_CREATE),
            Self::DeleteSet(_) => (NFT_MSG_DELSET, 0),
            Self::AddElement(..) => (NFT_MSG_NEWSETELEM, NLM_F_CREATE | NLM_F_EXCL),
            Self::DeleteElement(..) => (NFT_MSG_DELSETELEM, 0),
        }
    }

    /// Writes the attributes of the message, without the list of elements. `id` identifies a new
    /// set within the transaction.
    pub(super) fn write(&self, family: IpFamily, table: &str, id: u32, to: &mut MessageBuffer) {
        to.string(NFTA_TABLE_NAME, table);
        match self {
            Self::AddTable(comment) => write_comment(NFTA_TABLE_USERDATA, comment, to),
            Self::DeleteTable => {}
            Self::AddChain(chain) => {
                to.string(NFTA_CHAIN_NAME, &chain.name);
                if let Some(hook) = chain.hook {
                    to.nested(NFTA_CHAIN_HOOK, |to| {
                        to.be_int(NFTA_HOOK_HOOKNUM, hook.number);
                        to.be_int(NFTA_HOOK_PRIORITY, hook.priority);
                    });
                    to.string(NFTA_CHAIN_TYPE, hook.kind);
                }
            }
            Self::DeleteChain(chain) => to.string(NFTA_CHAIN_NAME, chain),
            Self::FlushChain(chain) => to.string(NFTA_RULE_CHAIN, chain),
            Self::AddRule(chain, rule) => {
                to.string(NFTA_RULE_CHAIN, chain);
                to.nested(NFTA_RULE_EXPRESSIONS, |to| expression::write(rule, family, to));
                if let Some(comment) = &rule.comment {
                    write_comment(NFTA_RULE_USERDATA, comment, to);
                }
            }
            Self::AddSet(set) => set.write(family, id, to),
            Self::DeleteSet(set) => to.string(NFTA_SET_NAME, set),
            Self::AddElement(set, ..) | Self::DeleteElement(set, _) => {
                to.string(NFTA_SET_ELEM_LIST_SET, &set.name);
            }
        }
    }

    /// Returns the element that this change adds or deletes.
    pub(super) const fn element(&self) -> Option<(&'static Set, &ElementKey, Option<&ElementValue>)> {
        match self {
            Self::AddElement(set, key, value) => Some((set, key, Some(value))),
            Self::DeleteElement(set, key) => Some((set, key, None)),
            _ => None,
        }
    }
}

impl fmt::Display for Chain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        self.hook.map_or(Ok(()), |hook| {
            write!(f, " {{ type {} hook {} priority {}; }}", hook.kind, hook.name(), hook.priority)
        })
    }
}

impl ElementValue {
    fn display(&self, set: &Set, family: IpFamily) -> String {
        let comment = self.comment().map_or_else(String::new, |comment| format!(" comment \"{comment}\""));
        match self {
            Self::Member(_) => comment,
            Self::Verdict(value) => format!("{comment} : {}", value.verdict),
            Self::Data(data) => match set.kind {
                SetKind::DataMap(fields) => format!(" : {}", element::display(data.bytes(), fields, family)),
                _ => format!(" : {data:?}"),
            },
        }
    }
}

/// Writes an element of the list in a message. A deletion has no value.
pub(super) fn write_element(key: &ElementKey, value: Option<&ElementValue>, to: &mut MessageBuffer) {
    to.nested(NFTA_LIST_ELEM, |to| {
        to.nested(NFTA_SET_ELEM_KEY, |to| to.bytes(NFTA_DATA_VALUE, key.bytes()));
        match value {
            None | Some(ElementValue::Member(_)) => {}
            Some(ElementValue::Data(data)) => {
                to.nested(NFTA_SET_ELEM_DATA, |to| to.bytes(NFTA_DATA_VALUE, data.bytes()));
            }
            Some(ElementValue::Verdict(value)) => {
                to.nested(NFTA_SET_ELEM_DATA, |to| expression::write_verdict(&value.verdict, to));
            }
        }
        if let Some(comment) = value.and_then(ElementValue::comment) {
            write_comment(NFTA_SET_ELEM_USERDATA, comment, to);
        }
    });
}

/// The maximum length of a comment, including the terminating zero (`NFTNL_UDATA_COMMENT_MAXLEN`).
const MAX_COMMENT_LENGTH: usize = 128;

/// Returns a comment, truncated to the maximum length.
pub fn comment(text: &str) -> Arc<str> {
    truncated(text).into()
}

fn truncated(text: &str) -> &str {
    &text[..text.floor_char_boundary(MAX_COMMENT_LENGTH - 1)]
}

/// Writes a comment as user data (`NFTNL_UDATA_*_COMMENT`, which is 0 for all objects except sets).
fn write_comment(kind: c_int, text: &str, to: &mut MessageBuffer) {
    let mut data = Vec::new();
    push_user_data(&mut data, 0, &[truncated(text).as_bytes(), &[0]].concat());
    to.bytes(kind, &data);
}
