//! The constants of a dispatcher: how many component programs it calls, and what each is.

use super::Obstacle;

/// The largest number of component programs (`MAX_DISPATCHER_ACTIONS`). This and what follows is of
/// libxdp: `headers/xdp/prog_dispatcher.h`, `lib/libxdp/protocol.org`.
pub(super) const MAX_COMPONENTS: usize = 10;
/// The code of a function whose component program is gone (`XDP_DISPATCHER_RETVAL`). It is in the
/// actions of every component program, so that the next one runs.
pub(super) const NO_PROGRAM: u8 = 31;
/// The flag of a component program that takes frames in several pieces (`BPF_F_XDP_HAS_FRAGS`).
pub(super) const HAS_FRAGS: u32 = 1 << 5;

const MAGIC: u8 = 236;
/// The offset of the actions. Priorities and flags of the component programs follow.
pub(super) const ACTIONS: usize = 4;
const WORDS: usize = 3 * MAX_COMPONENTS;
/// Version 3 has one more byte after the flags, and three bytes of padding. It is of libxdp 1.6;
/// version 2 is of libxdp 1.3.
const VERSIONS: [(u8, usize); 2] = [(2, ACTIONS + 4 * WORDS), (3, ACTIONS + 4 * WORDS + 4)];

/// How a dispatcher calls a component program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Call {
    /// The bits of the actions after which the next component program runs.
    pub(super) actions: u32,
    /// Component programs with smaller numbers run earlier.
    pub(super) priority: u32,
    /// [`HAS_FRAGS`], or 0.
    pub(super) flags: u32,
}

/// The constants, in the version of the dispatcher that is in use: who attached that one may know
/// no other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Config {
    /// The version.
    pub(super) version: u8,
    /// The calls, in their order.
    pub(super) calls: Vec<Call>,
}

impl Config {
    /// Reads the constants of a dispatcher. Fails for versions that are not known, and for a
    /// dispatcher that is bound to a device.
    pub(super) fn parse(value: &[u8]) -> Result<Self, Obstacle> {
        // Version 1 has no magic number. It begins with the number of component programs.
        let &[magic, version, count, ..] = value else { return Err(Obstacle::Version(None)) };
        if magic != MAGIC {
            return Err(Obstacle::Version(None));
        }
        let count = usize::from(count);
        if !VERSIONS.contains(&(version, value.len())) || count > MAX_COMPONENTS {
            return Err(Obstacle::Version(Some(version)));
        }
        let words: Vec<u32> =
            value[ACTIONS..].as_chunks().0.iter().map(|word| u32::from_ne_bytes(*word)).collect();
        if words.get(WORDS).is_some_and(|bound| bound.to_ne_bytes()[0] != 0) {
            return Err(Obstacle::BoundToDevice);
        }
        let word = |list: usize, at: usize| words.get(list * MAX_COMPONENTS + at).copied().unwrap_or(0);
        let call = |at| Call { actions: word(0, at), priority: word(1, at), flags: word(2, at) };
        Ok(Self { version, calls: (0..count).map(call).collect() })
    }

    /// Returns true if all component programs take frames in several pieces. Only then the
    /// dispatcher may get such frames.
    pub(super) fn has_frags(&self) -> bool {
        self.calls.iter().all(|call| call.flags & HAS_FRAGS != 0)
    }

    /// Returns the constants as the dispatcher reads them. `takes_frags` is true if it is loaded
    /// with [`HAS_FRAGS`].
    pub(super) fn bytes(&self, takes_frags: bool) -> Vec<u8> {
        let count = u8::try_from(self.calls.len()).unwrap_or(u8::MAX);
        let mut bytes = vec![MAGIC, self.version, count, takes_frags.into()];
        for field in [|call: &Call| call.actions, |call: &Call| call.priority, |call: &Call| call.flags] {
            let words = self.calls.iter().map(field).chain(std::iter::repeat(0)).take(MAX_COMPONENTS);
            bytes.extend(words.flat_map(u32::to_ne_bytes));
        }
        let length =
            VERSIONS.into_iter().find_map(|(known, length)| (known == self.version).then_some(length));
        bytes.resize(length.unwrap_or(bytes.len()), 0);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(version: u8, count: usize) -> Config {
        let call = |n: u32| Call { actions: 1 << NO_PROGRAM | 1 << n, priority: 10 * n, flags: HAS_FRAGS };
        Config { version, calls: (0..10).map(call).take(count).collect() }
    }

    #[test]
    fn constants_are_read_as_they_are_written() {
        for (version, length) in VERSIONS {
            for count in 0..=MAX_COMPONENTS {
                let config = config(version, count);
                let bytes = config.bytes(true);
                assert_eq!(bytes.len(), length);
                assert_eq!((bytes[0], bytes[1], usize::from(bytes[2]), bytes[3]), (236, version, count, 1));
                assert_eq!(Config::parse(&bytes), Ok(config));
            }
        }
    }

    #[test]
    fn other_versions_are_not_read() {
        let mut bytes = config(3, 2).bytes(false);
        bytes[1] = 4;
        assert_eq!(Config::parse(&bytes), Err(Obstacle::Version(Some(4))));
        bytes[1] = 2;
        assert_eq!(Config::parse(&bytes), Err(Obstacle::Version(Some(2))), "it has another length");
        bytes[0] = 1;
        assert_eq!(Config::parse(&bytes), Err(Obstacle::Version(None)));
        assert_eq!(Config::parse(&[]), Err(Obstacle::Version(None)));
    }

    #[test]
    fn dispatcher_that_is_bound_to_a_device_is_not_read() {
        let mut bytes = config(3, 1).bytes(false);
        bytes[124] = 1;
        assert_eq!(Config::parse(&bytes), Err(Obstacle::BoundToDevice));
    }
}
