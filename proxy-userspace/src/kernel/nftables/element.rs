//! Elements of sets and maps: keys and values as the kernel has them in its registers, and as nft
//! shows them.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use super::{
    IpFamily, NftFamily,
    statement::{Verdict, octets},
};
use crate::net::Protocol;

/// The longest key has two IPv6 addresses, a protocol and a port.
const MAX_KEY_LENGTH: usize = 40;
/// The longest data has an IPv6 address and a port.
const MAX_DATA_LENGTH: usize = 20;

/// The type of a field in a key or in data. Each field is padded to a multiple of four bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FieldType {
    /// An address of the table's family.
    Address,
    /// An IP protocol number.
    Protocol,
    /// A port.
    Port,
    /// A number from `numgen`. It has the host's byte order. All other fields have network order.
    Number,
}

/// A field of a key or of data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field {
    /// An address.
    Address(IpAddr),
    /// A protocol.
    Protocol(Protocol),
    /// A port.
    Port(u16),
    /// A number.
    Number(u32),
}

/// The fields of a key or of data: up to `N` bytes, without an allocation.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FieldBytes<const N: usize> {
    bytes: [u8; N],
    length: u8,
}

/// The key of an element.
pub type ElementKey = FieldBytes<MAX_KEY_LENGTH>;
/// The data that a map has for a key.
pub type ElementData = FieldBytes<MAX_DATA_LENGTH>;

/// The value of an element.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ElementValue {
    /// In a set: only the comment.
    Member(Option<Arc<str>>),
    /// In a verdict map. It is shared, to keep this type small: few elements have verdicts.
    Verdict(Arc<VerdictValue>),
    /// In all other maps.
    Data(ElementData),
}

/// The value of an element in a verdict map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerdictValue {
    /// The verdict.
    pub verdict: Verdict,
    /// The comment.
    pub comment: Option<Arc<str>>,
}

impl ElementValue {
    /// Returns a value of a verdict map.
    pub fn verdict(verdict: Verdict, comment: Option<Arc<str>>) -> Self {
        Self::Verdict(Arc::new(VerdictValue { verdict, comment }))
    }

    pub(super) fn comment(&self) -> Option<&Arc<str>> {
        match self {
            Self::Member(comment) => comment.as_ref(),
            Self::Verdict(value) => value.comment.as_ref(),
            Self::Data(_) => None,
        }
    }
}

impl FieldType {
    /// Returns the length in bytes, with padding.
    pub(super) fn length(self, family: IpFamily) -> u32 {
        match self {
            Self::Address => NftFamily::of(family).address_length(),
            Self::Protocol | Self::Port | Self::Number => 4,
        }
    }
}

impl<const N: usize> FieldBytes<N> {
    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let mut this = Self { bytes: [0; N], length: u8::try_from(bytes.len()).ok()? };
        this.bytes.get_mut(..bytes.len())?.copy_from_slice(bytes);
        Some(this)
    }

    /// Returns the bytes of these fields.
    pub fn new(fields: &[Field]) -> Self {
        let mut bytes = Vec::with_capacity(N);
        for field in fields {
            match field {
                Field::Address(address) => bytes.extend(octets(*address)),
                Field::Protocol(protocol) => bytes.push(protocol.number()),
                Field::Port(port) => bytes.extend(port.to_be_bytes()),
                Field::Number(number) => bytes.extend(number.to_ne_bytes()),
            }
            bytes.resize(bytes.len().next_multiple_of(4), 0);
        }
        bytes.truncate(N);
        Self::from_bytes(&bytes).unwrap_or(Self { bytes: [0; N], length: 0 })
    }

    /// Returns the bytes, field by field.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.length)]
    }
}

impl ElementData {
    /// Returns the data for an address and a port.
    pub fn from_endpoint(address: SocketAddr) -> Self {
        Self::new(&[Field::Address(address.ip()), Field::Port(address.port())])
    }

    /// Returns the address and port, if the data has the length of [`Self::from_endpoint`].
    pub fn to_endpoint(self) -> Option<SocketAddr> {
        let bytes = self.bytes();
        let (address, port): (IpAddr, _) = match bytes.len() {
            8 => (bytes.first_chunk::<4>().copied()?.into(), &bytes[4..]),
            20 => (bytes.first_chunk::<16>().copied()?.into(), &bytes[16..]),
            _ => return None,
        };
        Some(SocketAddr::new(address, u16::from_be_bytes(*port.first_chunk()?)))
    }
}

impl<const N: usize> fmt::Debug for FieldBytes<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:02x?}", self.bytes())
    }
}

/// Returns the fields of a key or of data as nft shows them.
pub(super) fn display(mut bytes: &[u8], fields: &[FieldType], family: IpFamily) -> String {
    let mut words = Vec::new();
    for field in fields {
        let Some((first, rest)) = bytes.split_at_checked(field.length(family) as usize) else { break };
        bytes = rest;
        words.push(display_field(first, *field));
    }
    words.join(" . ")
}

fn display_field(bytes: &[u8], field: FieldType) -> String {
    let word: [u8; 4] = bytes.first_chunk().copied().unwrap_or_default();
    match field {
        FieldType::Address => match bytes.first_chunk::<16>() {
            Some(octets) => IpAddr::from(*octets).to_string(),
            None => IpAddr::from(word).to_string(),
        },
        FieldType::Protocol => Protocol::from_number(word[0])
            .map_or_else(|| word[0].to_string(), |protocol| protocol.lowercase_name().into()),
        FieldType::Port => u16::from_be_bytes([word[0], word[1]]).to_string(),
        FieldType::Number => u32::from_ne_bytes(word).to_string(),
    }
}
