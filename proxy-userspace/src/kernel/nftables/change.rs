//! Changes to a table, in the words of nft and as the kernel's messages.

use std::{fmt, sync::Arc};

use super::{
    Family,
    attributes::Attributes,
    element::{self, Key, Value},
    expression,
    set::Set,
    statement::{Name, Rule},
};

/// `NFT_MSG_*`.
const NEW_TABLE: u16 = 0;
const DELETE_TABLE: u16 = 2;
const NEW_CHAIN: u16 = 3;
const DELETE_CHAIN: u16 = 5;
const NEW_RULE: u16 = 6;
const DELETE_RULE: u16 = 8;
const NEW_SET: u16 = 9;
const DELETE_SET: u16 = 11;
const NEW_ELEMENT: u16 = 12;
const DELETE_ELEMENT: u16 = 14;
/// `NLM_F_EXCL`, `NLM_F_CREATE` and `NLM_F_APPEND`.
const EXCLUSIVE: u16 = 0x200;
const CREATE: u16 = 0x400;
const APPEND: u16 = 0x800;

/// A change to a table. It fails where what it adds is there, or what it removes is not; tables, chains and sets that are there
/// already are left as they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Make the table, with this comment.
    AddTable(&'static str),
    /// Remove it with all it holds.
    DeleteTable,
    /// Make a chain.
    AddChain(Chain),
    /// Remove all rules of a chain.
    FlushChain(Name),
    /// Remove a chain with its rules.
    DeleteChain(Name),
    /// Append a rule to a chain.
    AddRule(Name, Rule),
    /// Make a set or map.
    AddSet(Set),
    /// Remove a set or map with its elements.
    DeleteSet(Name),
    /// Add an element.
    AddElement(&'static Set, Key, Value),
    /// Remove an element.
    DeleteElement(&'static Set, Key),
}

/// A chain without its rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    /// Its name.
    pub name: Name,
    /// Where packets enter it; of other chains none.
    pub hook: Option<Hook>,
    /// What people read of it.
    pub comment: &'static str,
}

/// Where packets enter a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hook {
    /// `filter` or `nat`.
    pub kind: &'static str,
    /// `NF_INET_*`: 0 prerouting, 1 input, 2 forward, 3 output, 4 postrouting.
    pub number: u32,
    /// The smaller comes first.
    pub priority: i32,
}

impl Change {
    /// As nft would be told it.
    pub fn show<'a>(&'a self, family: Family, table: &'a str) -> impl fmt::Display + 'a {
        Shown(self, family, table)
    }
}

impl Hook {
    fn name(self) -> &'static str {
        ["prerouting", "input", "forward", "output", "postrouting"]
            .get(self.number as usize)
            .copied()
            .unwrap_or("?")
    }
}

/// A change as nft would be told it.
pub(super) struct Shown<'a>(pub(super) &'a Change, pub(super) Family, pub(super) &'a str);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(change, family, table) = self;
        let at = format!("{} {table}", family.word());
        match change {
            Change::AddTable(comment) => write!(f, "add table {at} {{ comment \"{comment}\"; }}"),
            Change::DeleteTable => write!(f, "delete table {at}"),
            Change::AddChain(chain) => write!(f, "add chain {at} {}{}", chain.name, chain.head()),
            Change::FlushChain(chain) => write!(f, "flush chain {at} {chain}"),
            Change::DeleteChain(chain) => write!(f, "delete chain {at} {chain}"),
            Change::AddRule(chain, rule) => write!(f, "add rule {at} {chain} {}", rule.show(*family)),
            Change::AddSet(set) => write!(f, "add {} {at} {} {}", set.word(), set.name, set.show(*family)),
            Change::DeleteSet(set) => write!(f, "delete set {at} {set}"),
            Change::AddElement(set, key, value) => {
                let key = element::show(key.bytes(), set.key, *family);
                write!(f, "add element {at} {} {{ {key}{} }}", set.name, value.show(set, *family))
            }
            Change::DeleteElement(set, key) => {
                let key = element::show(key.bytes(), set.key, *family);
                write!(f, "delete element {at} {} {{ {key} }}", set.name)
            }
        }
    }
}

impl Chain {
    fn head(&self) -> String {
        let hook = self
            .hook
            .map(|hook| format!("type {} hook {} priority {}; ", hook.kind, hook.name(), hook.priority));
        let comment = (!self.comment.is_empty()).then(|| format!("comment \"{}\"; ", self.comment));
        match hook.into_iter().chain(comment).collect::<String>() {
            head if head.is_empty() => head,
            head => format!(" {{ {head}}}"),
        }
    }
}

impl Value {
    fn show(&self, set: &Set, family: Family) -> String {
        let comment = self.comment().map_or_else(String::new, |comment| format!(" comment \"{comment}\""));
        match self {
            Self::Member(_) => comment,
            Self::Verdict(led) => format!("{comment} : {}", led.verdict),
            Self::Data(data) => match set.holds {
                super::Holds::Data(kinds) => format!(" : {}", element::show(data.bytes(), kinds, family)),
                _ => format!(" : {data:?}"),
            },
        }
    }
}

/// The message's type and flags.
pub(super) const fn kind(change: &Change) -> (u16, u16) {
    match change {
        Change::AddTable(_) => (NEW_TABLE, CREATE),
        Change::DeleteTable => (DELETE_TABLE, 0),
        Change::AddChain(_) => (NEW_CHAIN, CREATE),
        Change::FlushChain(_) => (DELETE_RULE, 0),
        Change::DeleteChain(_) => (DELETE_CHAIN, 0),
        Change::AddRule(..) => (NEW_RULE, CREATE | APPEND),
        Change::AddSet(_) => (NEW_SET, CREATE),
        Change::DeleteSet(_) => (DELETE_SET, 0),
        Change::AddElement(..) => (NEW_ELEMENT, CREATE | EXCLUSIVE),
        Change::DeleteElement(..) => (DELETE_ELEMENT, 0),
    }
}

/// The attributes of the message, but for the elements of a set: those follow one by one. `number` is the message's own.
pub(super) fn write(change: &Change, family: Family, table: &str, number: u32, to: &mut Attributes) {
    to.text(1, table);
    match change {
        Change::AddTable(comment) => to.bytes(6, &comment_data(0, comment)),
        Change::DeleteTable => {}
        Change::AddChain(chain) => {
            to.text(3, &chain.name);
            if let Some(hook) = chain.hook {
                to.nested(4, |to| {
                    to.number(1, hook.number);
                    to.number(2, hook.priority.cast_unsigned());
                });
                to.text(7, hook.kind);
            }
            if !chain.comment.is_empty() {
                to.bytes(12, &comment_data(0, chain.comment));
            }
        }
        Change::DeleteChain(chain) => to.text(3, chain),
        Change::FlushChain(chain) => to.text(2, chain),
        Change::AddRule(chain, rule) => {
            to.text(2, chain);
            to.nested(4, |to| expression::write(rule, family, to));
            if let Some(comment) = &rule.comment {
                to.bytes(7, &comment_data(0, comment));
            }
        }
        Change::AddSet(set) => set.write(family, number, to),
        Change::DeleteSet(set) => to.text(2, set),
        Change::AddElement(set, ..) | Change::DeleteElement(set, _) => to.text(2, &set.name),
    }
}

/// An element of the list in such a message (`NFTA_LIST_ELEM` with `NFTA_SET_ELEM_*`).
pub(super) fn write_element(key: &Key, value: Option<&Value>, to: &mut Attributes) {
    to.nested(1, |to| {
        to.nested(1, |to| to.bytes(expression::DATA_VALUE, key.bytes()));
        match value {
            None | Some(Value::Member(_)) => {}
            Some(Value::Data(data)) => to.nested(2, |to| to.bytes(expression::DATA_VALUE, data.bytes())),
            Some(Value::Verdict(led)) => to.nested(2, |to| expression::write_verdict(&led.verdict, to)),
        }
        if let Some(comment) = value.and_then(Value::comment) {
            to.bytes(6, &comment_data(0, comment));
        }
    });
}

/// The longest comment that fits, with the zero at its end.
const MOST: usize = 128;

/// What people read of an element, cut to what fits.
pub fn comment(text: &str) -> Arc<str> {
    cut(text).into()
}

fn cut(text: &str) -> &str {
    let mut end = text.len().min(MOST - 1);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// A comment among user data, where nft looks for it.
fn comment_data(kind: u8, text: &str) -> Vec<u8> {
    let text = cut(text);
    let mut data = vec![kind, u8::try_from(text.len() + 1).unwrap_or(u8::MAX)];
    data.extend_from_slice(text.as_bytes());
    data.push(0);
    data
}
