//! What a table holds, read out of the kernel's listings.

use std::{collections::BTreeMap, io};

use netlink_packet_core::{NLM_F_DUMP, NLMSG_DONE, NLMSG_ERROR, NetlinkBuffer};

use super::{
    Family, Nftables,
    attributes::{self, Attributes},
    element::{Data, Key, Value},
    expression,
    set::Shape,
    socket::{HEAD, SUBSYSTEM, code},
    statement::{Name, Verdict},
};
use crate::kernel::KernelError;

/// `NFT_MSG_GETCHAIN`, `NFT_MSG_GETSET` and `NFT_MSG_GETSETELEM`.
const GET_TABLE: u16 = 1;
const GET_CHAIN: u16 = 4;
const GET_SET: u16 = 10;
const GET_ELEMENT: u16 = 13;
/// `NFT_SET_ANONYMOUS`.
const ANONYMOUS: u32 = 1;
/// `NLM_F_DUMP_INTR`: the ruleset changed while it was listed.
const INTERRUPTED: u16 = 0x10;
/// A listing that others' changes interrupt is begun anew so often.
const TRIES: usize = 20;

/// What a table of one family holds, but for the rules of its chains.
#[derive(Debug, Default)]
pub struct Found {
    /// The table is there.
    pub is_there: bool,
    /// Its chains.
    pub chains: Vec<Name>,
    /// Its sets and maps.
    pub sets: BTreeMap<Name, Shape>,
}

impl Nftables {
    /// What the table of this name holds, but for rules and elements.
    pub fn find(&mut self, family: Family, table: &str) -> Result<Found, KernelError> {
        let mut found = Found::default();
        self.list(
            GET_TABLE,
            family,
            table,
            |_| {},
            |message| {
                found.is_there |= name_of(message, 1) == Some(table);
            },
        )?;
        if !found.is_there {
            return Ok(found);
        }
        self.list(
            GET_CHAIN,
            family,
            table,
            |to| to.text(1, table),
            |message| {
                let name = name_of(message, 3).filter(|_| name_of(message, 1) == Some(table));
                found.chains.extend(name.map(Name::from));
            },
        )?;
        self.list(
            GET_SET,
            family,
            table,
            |to| to.text(1, table),
            |message| {
                let shape = shape(message);
                // Those without a name of their own belong to a rule, and go with it.
                let is_named = name_of(message, 1) == Some(table) && shape.flags & ANONYMOUS == 0;
                let name = name_of(message, 2).filter(|_| is_named);
                found.sets.extend(name.map(|name| (Name::from(name), shape)));
            },
        )?;
        Ok(found)
    }

    /// All elements of a set or map.
    pub fn elements(
        &mut self,
        family: Family,
        table: &str,
        set: &str,
    ) -> Result<Vec<(Key, Value)>, KernelError> {
        let mut elements = Vec::new();
        let ask = |to: &mut Attributes| {
            to.text(1, table);
            to.text(2, set);
        };
        self.list(GET_ELEMENT, family, set, ask, |message| {
            let list = attributes::find(message, 3).unwrap_or_default();
            elements.extend(attributes::read(list).filter_map(|(_, element)| read_element(element)));
        })?;
        // A listing that was begun anew has told some twice.
        Ok(elements)
    }

    fn list(
        &mut self,
        kind: u16,
        family: Family,
        object: &str,
        ask: impl Fn(&mut Attributes),
        mut take: impl FnMut(&[u8]),
    ) -> Result<(), KernelError> {
        for _ in 0..TRIES {
            self.buffer.clear();
            self.message(SUBSYSTEM << 8 | kind, NLM_F_DUMP, family.number(), 0, &ask);
            let sent = self.socket.send(self.buffer.as_bytes(), 0);
            self.buffer.clear();
            let failed = |source| KernelError::call("list nftables:", object)(source);
            sent.map_err(failed)?;
            let mut messages = Vec::new();
            if self.receive_listing(&mut messages).map_err(failed)? {
                for message in &messages {
                    take(message);
                }
                return Ok(());
            }
        }
        Err(KernelError::call("list nftables:", object)(io::Error::other("others keep changing it")))
    }

    /// The attributes of all messages; false if the ruleset changed meanwhile.
    fn receive_listing(&self, to: &mut Vec<Vec<u8>>) -> io::Result<bool> {
        let mut is_whole = true;
        loop {
            let (bytes, _) = self.socket.recv_from_full()?;
            let mut rest = &*bytes;
            while let Ok(message) = NetlinkBuffer::new_checked(rest) {
                let length = message.length() as usize;
                let body = rest.get(HEAD..length).unwrap_or_default();
                rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
                if message.sequence_number() != self.sequence {
                    continue;
                }
                is_whole &= message.flags() & INTERRUPTED == 0;
                match message.message_type() {
                    NLMSG_DONE => return Ok(is_whole),
                    NLMSG_ERROR => match code(body) {
                        libc::ENOENT => return Ok(true),
                        code => return Err(io::Error::from_raw_os_error(code)),
                    },
                    _ => to.push(body.get(4..).unwrap_or_default().to_vec()),
                }
            }
        }
    }
}

fn name_of(message: &[u8], kind: u16) -> Option<&str> {
    attributes::find(message, kind).and_then(attributes::text)
}

fn shape(message: &[u8]) -> Shape {
    let number = |kind| attributes::find(message, kind).and_then(attributes::number).unwrap_or(0);
    let timeout = attributes::find(message, 11).and_then(|value| value.first_chunk());
    Shape {
        flags: number(3),
        key_type: number(4),
        key_length: number(5),
        data_type: number(6),
        timeout: timeout.map_or(0, |bytes| u64::from_be_bytes(*bytes)),
    }
}

fn read_element(element: &[u8]) -> Option<(Key, Value)> {
    let key = attributes::find(attributes::find(element, 1)?, expression::DATA_VALUE)?;
    let key = Key::read(key)?;
    let comment = attributes::find(element, 6).and_then(read_comment);
    let Some(data) = attributes::find(element, 2) else {
        return Some((key, Value::Member(comment)));
    };
    if let Some(bytes) = attributes::find(data, expression::DATA_VALUE) {
        return Some((key, Value::Data(Data::read(bytes)?)));
    }
    let verdict = read_verdict(attributes::find(data, expression::DATA_VERDICT)?)?;
    Some((key, Value::verdict(verdict, comment)))
}

fn read_verdict(verdict: &[u8]) -> Option<Verdict> {
    let chain = name_of(verdict, expression::VERDICT_CHAIN).map(Name::from);
    match (attributes::find(verdict, expression::VERDICT_CODE).and_then(attributes::number)?, chain) {
        (expression::DROP, _) => Some(Verdict::Drop),
        (expression::CONTINUE, _) => Some(Verdict::Continue),
        (expression::JUMP, Some(chain)) => Some(Verdict::Jump(chain)),
        (expression::GOTO, Some(chain)) => Some(Verdict::Goto(chain)),
        // Nothing of ours: a name that no chain has, so that it differs from all that is wanted.
        _ => Some(Verdict::Return),
    }
}

fn read_comment(data: &[u8]) -> Option<std::sync::Arc<str>> {
    let (head, text) = data.split_first_chunk::<2>()?;
    let text = text.get(..usize::from(head[1])).filter(|_| head[0] == 0)?;
    attributes::text(text).map(Into::into)
}
