//! Decides whether the legacy iptables rules of a network namespace redirect its own outgoing
//! packets. The kernel does not report changes of these rules, so this is cheap enough to repeat.

use std::{
    fs::File,
    io,
    mem::size_of,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::fs::FileExt as _,
    },
    path::Path,
};

use libc::{NF_INET_LOCAL_OUT, SOL_IP, SOL_IPV6, c_int};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

use super::uapi::*;

/// The tables whose chain OUTPUT translates or reroutes: a packet whose mark changes in mangle is
/// routed again.
const REDIRECTING_TABLES: [&str; 2] = ["nat", "mangle"];
/// No list of tables is longer: there are five, and names have at most 31 characters.
const MAX_NAMES: usize = 256;

/// The legacy iptables tables of one network namespace, for both IP families.
#[derive(Debug)]
pub(super) struct LegacyTables([Tables; 2]);

#[derive(Debug)]
struct Tables {
    family: &'static Family,
    /// Lists the tables that exist.
    names: Option<File>,
    /// For each of [`REDIRECTING_TABLES`], whether it existed when [`LegacyTables::read_names`] was
    /// called.
    exist: [bool; 2],
    /// Opened when a table exists that may redirect.
    socket: Option<OwnedFd>,
}

#[derive(Debug)]
struct Family {
    /// The file below /proc/self/net. It exists while the kernel module is loaded.
    names: &'static str,
    domain: AddressFamily,
    level: c_int,
    get_info: c_int,
}

static FAMILIES: [Family; 2] = [
    Family {
        names: "ip_tables_names",
        domain: AddressFamily::Inet,
        level: SOL_IP,
        get_info: IPT_SO_GET_INFO,
    },
    Family {
        names: "ip6_tables_names",
        domain: AddressFamily::Inet6,
        level: SOL_IPV6,
        get_info: IP6T_SO_GET_INFO,
    },
];

/// `struct ipt_getinfo`, which is the same as `struct ip6t_getinfo`.
#[repr(C)]
#[derive(Default)]
struct TableInfo {
    name: [u8; 32],
    valid_hooks: u32,
    /// The offset of the first rule of each hook's chain.
    hook_entry: [u32; 5],
    /// The offset of the policy of each hook's chain.
    underflow: [u32; 5],
    entry_count: u32,
    size: u32,
}

impl LegacyTables {
    /// Opens what exists in the calling thread's network namespace.
    pub(super) fn open() -> Self {
        let mut tables = Self([0, 1].map(|index: usize| Tables {
            family: &FAMILIES[index],
            names: None,
            exist: [false; 2],
            socket: None,
        }));
        tables.open_missing();
        tables.read_names();
        tables.open_missing();
        tables
    }

    /// Reads which tables exist.
    pub(super) fn read_names(&mut self) {
        self.0.iter_mut().for_each(Tables::read_names);
    }

    /// Returns true if [`Self::open_missing`] has to be called in the network namespace.
    /// `is_loaded` is what [`loaded_families`] returns.
    pub(super) fn are_missing(&self, is_loaded: [bool; 2]) -> bool {
        self.0
            .iter()
            .zip(is_loaded)
            .any(|(tables, is_loaded)| (is_loaded && tables.names.is_none()) || tables.needs_socket())
    }

    /// Opens what was missing, in the calling thread's network namespace.
    pub(super) fn open_missing(&mut self) {
        for tables in &mut self.0 {
            let path = Path::new("/proc/thread-self/net").join(tables.family.names);
            tables.names = tables.names.take().or_else(|| File::open(path).ok());
            if tables.needs_socket() {
                // Any socket of the family answers. A kernel without IPv6 has none.
                let flags = SockFlag::SOCK_CLOEXEC;
                tables.socket = socket(tables.family.domain, SockType::Datagram, flags, None).ok();
            }
        }
    }

    /// Returns true if the chain OUTPUT of a table for NAT or mangling has a rule.
    pub(super) fn redirect(&self) -> bool {
        self.0.iter().any(|tables| {
            let has_rules = |table| tables.output_has_rules(table).unwrap_or(false);
            tables.redirecting().any(has_rules)
        })
    }
}

impl Tables {
    fn read_names(&mut self) {
        let mut buffer = [0; MAX_NAMES];
        let length = match &self.names {
            Some(file) => file.read_at(&mut buffer, 0),
            None => Ok(0),
        };
        if length.is_err() {
            // The module was unloaded.
            self.names = None;
        }
        let names = &buffer[..length.unwrap_or(0)];
        self.exist = REDIRECTING_TABLES
            .map(|table| names.split(|byte| *byte == b'\n').any(|name| name == table.as_bytes()));
    }

    /// Returns the tables that may redirect and exist. The kernel creates a table when it is asked
    /// for one that does not exist, so only these may be asked for.
    fn redirecting(&self) -> impl Iterator<Item = &'static str> {
        REDIRECTING_TABLES.into_iter().zip(self.exist).filter_map(|(table, exists)| exists.then_some(table))
    }

    fn needs_socket(&self) -> bool {
        self.socket.is_none() && self.exist.contains(&true)
    }

    fn output_has_rules(&self, table: &str) -> io::Result<bool> {
        let Some(socket) = &self.socket else { return Ok(false) };
        let info = self.info(socket, table)?;
        let output = usize::try_from(NF_INET_LOCAL_OUT).map_err(io::Error::other)?;
        Ok(info.hook_entry[output] != info.underflow[output])
    }

    fn info(&self, socket: &OwnedFd, table: &str) -> io::Result<TableInfo> {
        let mut info = TableInfo::default();
        info.name[..table.len()].copy_from_slice(table.as_bytes());
        let mut length = libc::socklen_t::try_from(size_of::<TableInfo>()).map_err(io::Error::other)?;
        // SAFETY: the kernel reads and writes at most `length` bytes of `info`, which has as many.
        let result = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                self.family.level,
                self.family.get_info,
                (&raw mut info).cast(),
                &raw mut length,
            )
        };
        if result == 0 { Ok(info) } else { Err(io::Error::last_os_error()) }
    }
}

/// Returns for each IP family whether the kernel has the legacy iptables, and has loaded it.
pub(super) fn loaded_families() -> [bool; 2] {
    [0, 1].map(|index: usize| Path::new("/proc/self/net").join(FAMILIES[index].names).exists())
}
