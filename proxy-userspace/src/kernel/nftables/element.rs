//! Elements of sets and maps: keys and data as the kernel has them in its registers, and as nft shows them.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use super::{
    Family,
    statement::{Verdict, octets, protocol_name},
};

/// The longest key: two IPv6 addresses, a protocol and a port.
const KEY: usize = 40;
/// The longest data: an IPv6 address and a port.
const DATA: usize = 20;

/// What a part of a key or of data is. Each takes a multiple of four bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FieldKind {
    /// An address of the table's family.
    Address,
    /// A protocol of IP.
    Protocol,
    /// A port.
    Port,
    /// A number drawn with `numgen`; in the order of the host, unlike all others.
    Number,
}

/// A part of a key or of data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field {
    /// An address.
    Address(IpAddr),
    /// A protocol of IP.
    Protocol(u8),
    /// A port.
    Port(u16),
    /// A number.
    Number(u32),
}

/// A few bytes, in place.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Short<const N: usize> {
    bytes: [u8; N],
    length: u8,
}

/// The key of an element.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(Short<KEY>);

/// What a map has for a key.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Data(Short<DATA>);

/// What an element is besides its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// Of a set: nothing but what people read of it.
    Member(Option<Arc<str>>),
    /// Of a verdict map. In one piece elsewhere: most elements are no verdicts, and there are very many.
    Verdict(Arc<Led>),
    /// Of any other map.
    Data(Data),
}

/// Where a verdict map leads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Led {
    /// What becomes of the packet.
    pub verdict: Verdict,
    /// What people read of the element.
    pub comment: Option<Arc<str>>,
}

impl Value {
    /// Of a verdict map.
    pub fn verdict(verdict: Verdict, comment: Option<Arc<str>>) -> Self {
        Self::Verdict(Arc::new(Led { verdict, comment }))
    }

    /// What people read of the element.
    pub(super) fn comment(&self) -> Option<&Arc<str>> {
        match self {
            Self::Member(comment) => comment.as_ref(),
            Self::Verdict(led) => led.comment.as_ref(),
            Self::Data(_) => None,
        }
    }
}

impl FieldKind {
    pub(super) const fn length(self, family: Family) -> usize {
        match self {
            Self::Address => family.address_length() as usize,
            Self::Protocol | Self::Port | Self::Number => 4,
        }
    }
}

impl<const N: usize> Short<N> {
    fn new(bytes: &[u8]) -> Option<Self> {
        let mut this = Self { bytes: [0; N], length: u8::try_from(bytes.len()).ok()? };
        this.bytes.get_mut(..bytes.len())?.copy_from_slice(bytes);
        Some(this)
    }

    fn of(fields: &[Field]) -> Self {
        let mut bytes = Vec::with_capacity(N);
        for field in fields {
            match field {
                Field::Address(address) => bytes.extend(octets(*address)),
                Field::Protocol(protocol) => bytes.push(*protocol),
                Field::Port(port) => bytes.extend(port.to_be_bytes()),
                Field::Number(number) => bytes.extend(number.to_ne_bytes()),
            }
            bytes.resize(bytes.len().next_multiple_of(4), 0);
        }
        bytes.truncate(N);
        Self::new(&bytes).unwrap_or(Self { bytes: [0; N], length: 0 })
    }

    fn get(&self) -> &[u8] {
        &self.bytes[..usize::from(self.length)]
    }
}

impl Key {
    /// A key of these parts.
    pub fn new(fields: &[Field]) -> Self {
        Self(Short::of(fields))
    }

    pub(super) fn read(bytes: &[u8]) -> Option<Self> {
        Short::new(bytes).map(Self)
    }

    /// Its bytes; parts that are compared alone come first.
    pub fn bytes(&self) -> &[u8] {
        self.0.get()
    }
}

impl Data {
    /// An address and a port.
    pub fn endpoint(address: SocketAddr) -> Self {
        Self(Short::of(&[Field::Address(address.ip()), Field::Port(address.port())]))
    }

    pub(super) fn read(bytes: &[u8]) -> Option<Self> {
        Short::new(bytes).map(Self)
    }

    /// The address and port that [`Self::endpoint`] made it of.
    pub fn to_endpoint(self) -> Option<SocketAddr> {
        let bytes = self.bytes();
        let (address, port): (IpAddr, _) = match bytes.len() {
            8 => (bytes.first_chunk::<4>().copied()?.into(), &bytes[4..]),
            20 => (bytes.first_chunk::<16>().copied()?.into(), &bytes[16..]),
            _ => return None,
        };
        Some(SocketAddr::new(address, u16::from_be_bytes(*port.first_chunk()?)))
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        self.0.get()
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:02x?}", self.bytes())
    }
}

impl fmt::Debug for Data {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:02x?}", self.bytes())
    }
}

/// Bytes as nft shows them, given what they are.
pub(super) fn show(mut bytes: &[u8], kinds: &[FieldKind], family: Family) -> String {
    let mut parts = Vec::new();
    for kind in kinds {
        let Some((part, rest)) = bytes.split_at_checked(kind.length(family)) else { break };
        bytes = rest;
        parts.push(show_field(part, *kind));
    }
    parts.join(" . ")
}

fn show_field(bytes: &[u8], kind: FieldKind) -> String {
    let word: [u8; 4] = bytes.first_chunk().copied().unwrap_or_default();
    match kind {
        FieldKind::Address => match bytes.first_chunk::<16>() {
            Some(octets) => IpAddr::from(*octets).to_string(),
            None => IpAddr::from(word).to_string(),
        },
        FieldKind::Protocol => protocol_name(word[0]),
        FieldKind::Port => u16::from_be_bytes([word[0], word[1]]).to_string(),
        FieldKind::Number => u32::from_ne_bytes(word).to_string(),
    }
}
